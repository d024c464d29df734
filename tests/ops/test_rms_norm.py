"""rms_norm and its gradients: every rung against float64 where it is legal, every refusal."""

import pytest
import torch

import lab
import loader
from ops import common
from ops import rms_norm_backward as gradient
from ops.rms_norm import BLOCK, GENERAL, LONG, fastest, reference, rms_norm

PARTIAL = ("2_registers", "3_ahead", "4_keep_reads")


@pytest.mark.parametrize("rung", loader.rungs("rms_norm"))
def test_every_case(rung):
    report = lab.check("rms_norm", rung, isolate=False)
    assert bool(report.having("outside")) == (rung in PARTIAL)


@pytest.mark.parametrize(
    ("cols", "dtype", "wanted"),
    [
        (128, torch.float32, GENERAL),
        (132, torch.float32, BLOCK),
        (16384, torch.bfloat16, BLOCK),
        (32768, torch.bfloat16, BLOCK),
        (32776, torch.bfloat16, LONG),
        (4099, torch.float32, GENERAL),
    ],
)
def test_a_rung_for_every_row_length(device, cols, dtype, wanted):
    x, weight = torch.randn(3, cols).to(device, dtype), torch.randn(cols).to(device, dtype)
    assert fastest(x, weight) == wanted
    by_name = rms_norm(x, weight, kernel=loader.load("rms_norm", wanted))
    assert torch.equal(rms_norm(x, weight), by_name)


@pytest.mark.parametrize("slipped", [0, 1])
def test_one_input_between_the_boundaries_is_for_the_general_rung(device, slipped):
    x, weight = torch.randn(2 * 1024 + 1, device=device), torch.randn(1024 + 1, device=device)
    x = (x[:-1] if slipped else x[1:]).view(2, 1024)
    weight = weight[1:] if slipped else weight[:-1]
    assert fastest(x, weight) == GENERAL
    assert torch.allclose(rms_norm(x, weight).double(), reference(x, weight), atol=1e-5)


@pytest.mark.parametrize("rung", PARTIAL)
def test_what_a_rung_refuses_is_said(device, rung):
    x, weight = torch.zeros(2, 1025, device=device), torch.zeros(1025, device=device)
    with pytest.raises(RuntimeError, match=r"not supported by this rung .* head of its \.cu file"):
        rms_norm(x, weight, kernel=loader.load("rms_norm", rung))


@pytest.mark.parametrize("rung", loader.rungs("rms_norm_backward"))
def test_every_case_of_the_gradient(rung):
    report = lab.check("rms_norm_backward", rung, isolate=False)
    assert bool(report.having("outside")) == (rung != gradient.GENERAL)


def gradient_inputs(shape, device, dtype=torch.float32):
    grad, x = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    wide = x.double() if dtype == torch.float64 else x.float()
    rstd = (wide.square().mean(-1) + 1e-6).rsqrt()
    return grad, x, torch.randn(shape[-1], device=device).to(dtype), rstd


@pytest.mark.parametrize(
    "cols", [3, 256, 257, 512, 513, 4096, 8192, 8193, 65536, 65537, 131072, 131073]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_chooses_a_rung_that_takes_the_row(device, cols, dtype):
    inputs = gradient_inputs((3, cols), device, dtype)
    chosen = gradient.fastest(inputs[1])
    assert (chosen == gradient.SHORT) == (cols <= (256 if dtype == torch.float64 else 512))
    wanted = gradient.reference(*inputs)
    kernels = [None]
    if cols <= 8193:  # the CPU machine is small, and grants no cluster of 16 such blocks
        kernels.append(loader.load("rms_norm_backward", chosen))
    for kernel in kernels:
        got = gradient.rms_norm_backward(*inputs, kernel=kernel)
        for a, b in zip(got, wanted, strict=True):
            assert (a.double() - b).norm() <= gradient.tolerance(dtype) * b.norm()


def test_where_no_cluster_is_granted_the_row_is_read_again(device, tmp_path, monkeypatch):
    text = loader.find_rung("rms_norm_backward", gradient.CLUSTERS).read_text()
    query = "if (error == cudaSuccess && fitting == 0)"
    assert query in text
    none = tmp_path / "none_granted.cu"
    none.write_text(text.replace(query, "fitting = 0;\n    if (error == cudaSuccess)"))
    refusing = loader.load("rms_norm_backward", none)
    inputs = gradient_inputs((3, 20_000), device)
    with pytest.raises(RuntimeError, match=r"not supported by this rung .*; the head of its"):
        gradient.rms_norm_backward(*inputs, kernel=refusing)

    def last_rung(op, rung):
        return refusing if rung == gradient.CLUSTERS else loader.load(op, rung)

    monkeypatch.setattr(common, "last_rung", last_rung)
    for a, b in zip(gradient.rms_norm_backward(*inputs), gradient.reference(*inputs),
                    strict=True):  # fmt: skip
        assert (a - b).norm() < 1e-5 * b.norm()


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(3)), "x must be on .*, got meta"),
    "devices": (lambda t: (t(2, 3), t(3, device="meta")), "on one device, got .* and meta"),
    "dtype": (lambda t: (t(2, 3).long(), t(3).long()), "float32, float64, .* got Long"),
    "dtypes": (lambda t: (t(2, 3), t(3).half()), "one dtype, got Float and Half"),
    "scalar": (lambda t: (t(), t(1)), r"at least one dimension, got shape \[\]"),
    "length": (lambda t: (t(2, 3), t(2)), r"weight must have shape \[3\], got \[2\]"),
    "strides of x": (lambda t: (t(3, 2).t(), t(3)), r"x must be contiguous, .* x\.contiguous"),
    "strides of weight": (lambda t: (t(2, 3), t(6)[::2]), r"weight must be contiguous"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"rms_norm: .*{message}"):
        loader.load("rms_norm").rms_norm(*make(t), 1e-6)


REFUSALS_OF_GRADIENT = {
    "device": (dict(x=lambda t: t.to("meta")), "x must be on .*, got meta"),
    "devices": (dict(grad=lambda t: t.to("meta")), "x and grad must be on one device"),
    "dtype": (dict(x=lambda t: t.long()), "float32, float64, .* got Long"),
    "dtypes": (dict(weight=lambda t: t.half()), "with x of Float, weight must be Float, got Half"),
    "rows": (dict(rstd=lambda t: t[:1]), r"rstd must have shape \[3\], got \[1\]"),
    "shape": (dict(grad=lambda t: t[:1]), r"grad must have shape \[3, 3\], got \[1, 3\]"),
    "strides": (dict(grad=lambda t: t.t()), r"grad must be contiguous, .* pass grad\.contiguous"),
}


@pytest.mark.parametrize("what", REFUSALS_OF_GRADIENT)
def test_refusals_of_the_gradient(device, what):
    changes, message = REFUSALS_OF_GRADIENT[what]
    matrix, vector = torch.zeros(3, 3, device=device), torch.zeros(3, device=device)
    inputs = dict(grad=matrix, x=matrix, weight=vector, rstd=vector)
    for name, change in changes.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(RuntimeError, match=f"rms_norm_backward: .*{message}"):
        loader.load("rms_norm_backward").rms_norm_backward(**inputs)


def test_no_rows_have_a_weight_gradient_of_zero(device):
    x = torch.zeros(0, 3, device=device, requires_grad=True)
    weight = torch.ones(3, device=device, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert weight.grad.tolist() == [0, 0, 0] and x.grad.shape == (0, 3)


def test_a_second_derivative_is_refused(device):
    x = torch.randn(2, 3, device=device, requires_grad=True)
    out = rms_norm(x, torch.ones(3, device=device))
    with pytest.raises(RuntimeError, match="is differentiable once; create_graph=True asks for"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
