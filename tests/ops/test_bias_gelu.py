"""bias_gelu: every rung against float64, every refusal, and what gradients are asked for."""

import pytest
import torch
from torch.nn.functional import gelu

import lab
import loader
from ops.bias_gelu import bias_gelu

RUNGS = loader.rungs("bias_gelu")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    assert not lab.check("bias_gelu", rung, isolate=False).having("outside")


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(3)), "x must be on .*, got meta"),
    "devices": (lambda t: (t(2, 3), t(3, device="meta")), "on one device, got .* and meta"),
    "dtype": (lambda t: (t(2, 3).long(), t(3).long()), "float32, float64, .* got Long"),
    "dtypes": (lambda t: (t(2, 3), t(3).half()), "one dtype, got Float and Half"),
    "length": (lambda t: (t(2, 3), t(2)), r"got x \[2, 3\] and bias \[2\]"),
    "matrix": (lambda t: (t(2, 3), t(1, 3)), r"got x \[2, 3\] and bias \[1, 3\]"),
    "scalar": (lambda t: (t(), t(1)), r"got x \[\] and bias \[1\]"),
    "empty": (lambda t: (t(0, 3), t(2)), r"got x \[0, 3\] and bias \[2\]"),
    "strides of x": (lambda t: (t(3, 2).t(), t(3)), r"x must be contiguous, .* x\.contiguous"),
    "strides of bias": (
        lambda t: (t(2, 3), t(6)[::2]),
        r"bias must be contiguous, .* strides \[2\]",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    module, (x, bias) = loader.load("bias_gelu"), make(t)
    with pytest.raises(RuntimeError, match=f"bias_gelu: .*{message}"):
        module.bias_gelu(x, bias, False)
    with pytest.raises(RuntimeError, match=f"bias_gelu: .*{message}"):
        module.bias_gelu_backward(x, x, bias, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_values_left_of_zero_keep_their_digits(device, dtype):
    """1 − Φ is fitted relative to itself: a norm over all values would not show the small ones."""
    x = torch.linspace(-4, 4, 1000, device=device).to(dtype).view(-1, 1)
    out, wanted = bias_gelu(x, x.new_zeros(1)).double(), gelu(x.double())
    assert ((out - wanted).abs() <= (torch.finfo(dtype).eps / 2 + 5e-4) * wanted.abs()).all()


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.t, lambda g: g[:1]])
def test_a_gradient_unlike_x_is_refused(device, change):
    x, bias = torch.zeros(3, 3, device=device), torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match=r"bias_gelu: grad must be contiguous and like x"):
        loader.load("bias_gelu").bias_gelu_backward(change(x), x, bias, False)


def test_an_unknown_approximation_is_refused(device):
    with pytest.raises(ValueError, match='must be "none" or "tanh", got \'erf\''):
        bias_gelu(torch.zeros(2, 3, device=device), torch.zeros(3, device=device), "erf")


def test_no_rows_have_a_bias_gradient_of_zero(device):
    x = torch.zeros(0, 3, device=device, requires_grad=True)
    bias = torch.ones(3, device=device, requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    assert bias.grad.tolist() == [0, 0, 0] and x.grad.shape == (0, 3)


def test_a_second_derivative_is_refused(device):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    out = bias_gelu(x, torch.zeros(3, device=device))
    with pytest.raises(RuntimeError, match="is differentiable once; create_graph=True asks for"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
