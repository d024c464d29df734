"""swiglu: every rung against float64, every refusal."""

import pytest
import torch

import lab
import loader
from ops.swiglu import swiglu

RUNGS = loader.rungs("swiglu")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    assert not lab.check("swiglu", rung, isolate=False).having("outside")


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(2, 3)), "gate must be on .*, got meta"),
    "devices": (lambda t: (t(2, 3), t(2, 3, device="meta")), "on one device, got .* and meta"),
    "dtype": (lambda t: (t(2).long(), t(2).long()), "float32, float64, .* got Long"),
    "dtypes": (lambda t: (t(2), t(2).half()), "one dtype, got Float and Half"),
    "shapes": (lambda t: (t(2, 3), t(3, 2)), r"one shape, got \[2, 3\] and \[3, 2\]"),
    "empty": (lambda t: (t(0, 3), t(0, 2)), r"one shape, got \[0, 3\] and \[0, 2\]"),
    "strides of gate": (lambda t: (t(3, 2).t(), t(2, 3)), "gate must be contiguous, .* strides"),
    "strides of up": (lambda t: (t(2, 3), t(3, 2).t()), r"up must be contiguous, .* strides"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    module, (gate, up) = loader.load("swiglu"), make(t)
    with pytest.raises(RuntimeError, match=f"swiglu: .*{message}"):
        module.swiglu(gate, up)
    with pytest.raises(RuntimeError, match=f"swiglu: .*{message}"):
        module.swiglu_backward(gate, gate, up)


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.t, lambda g: g[:1]])
def test_a_gradient_unlike_gate_is_refused(device, change):
    x = torch.zeros(3, 3, device=device)
    with pytest.raises(RuntimeError, match="swiglu: .*grad must"):
        loader.load("swiglu").swiglu_backward(change(x), x, x)


def test_halves_of_one_tensor(device):
    """As a model has them: one matrix product makes both."""
    both = torch.randn(5, 16, device=device, requires_grad=True)
    swiglu(*both.chunk(2, -1)).sum().backward()
    own, both.grad = both.grad, None
    gate, up = both.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).sum().backward()
    torch.testing.assert_close(own, both.grad)
