"""layer_norm and its gradients: every rung against float64 where it is legal, every refusal."""

import importlib

import pytest
import torch

import lab
import loader
from ops import common
from ops import layer_norm_backward as gradient
from ops.layer_norm import BLOCK, GENERAL, LONG, SHORT, fastest, layer_norm, reference

FORWARD = ("3_warp_row", "4_vectorized", "5_clusters", "6_short_rows", "7_ahead",
           "8_in_order", "9_keep_reads")  # fmt: skip
PARTIAL = (*FORWARD, "3_one_read", "4_short_rows", "5_in_flight", "6_clusters", "7_any_address")
RUNGS = [(op, r) for op in ("layer_norm", "layer_norm_backward") for r in loader.rungs(op)]


@pytest.mark.parametrize(("op", "rung"), RUNGS)
def test_every_case(op, rung):
    report = lab.check(op, rung, isolate=False)
    assert bool(report.having("outside")) == (rung in PARTIAL)


@pytest.mark.parametrize(
    ("cols", "dtype", "residual", "wanted"),
    [
        (128, torch.float32, False, SHORT),
        (128, torch.float32, True, BLOCK),
        (132, torch.float32, False, BLOCK),
        (8192, torch.float32, False, BLOCK),
        (16384, torch.bfloat16, True, BLOCK),
        (16392, torch.bfloat16, True, LONG),
        (4, torch.float64, False, SHORT),
        (4099, torch.float32, False, GENERAL),
        (131073, torch.bfloat16, False, GENERAL),
    ],
)
def test_a_rung_for_every_row_length(device, cols, dtype, residual, wanted):
    x, more = (torch.randn(3, cols, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))
    inputs = (x, weight, bias, more) if residual else (x, weight, bias)
    assert fastest(*inputs) == wanted
    out = layer_norm(*inputs)
    by_name = layer_norm(*inputs, kernel=loader.load("layer_norm", wanted))
    assert all(map(torch.equal, out, by_name)) if residual else torch.equal(out, by_name)


@pytest.mark.parametrize("slipped", range(4))
def test_one_input_between_the_boundaries_is_for_the_general_rung(device, slipped):
    cols = 1024
    inputs = [
        torch.randn(n, device=device) for n in (2 * cols + 1, cols + 1, cols + 1, 2 * cols + 1)
    ]
    inputs = [t[1:] if i == slipped else t[:-1] for i, t in enumerate(inputs)]
    x, weight, bias, residual = (t.view(2, cols) if len(t) > cols else t for t in inputs)
    assert fastest(x, weight, bias, residual) == GENERAL
    got, want = layer_norm(x, weight, bias, residual), reference(x, weight, bias, residual)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5)


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(3), t(3), None), "x must be on .*, got meta"),
    "devices": (
        lambda t: (t(2, 3), t(3, device="meta"), t(3), None),
        "x and weight must be on one device, got .* and meta",
    ),
    "dtype": (lambda t: (t(2, 3).long(), t(3), t(3), None), "float32, float64, .* got Long"),
    "dtypes": (
        lambda t: (t(2, 3), t(3), t(3).half(), None),
        "x and bias must have one dtype, got Float and Half",
    ),
    "scalar": (lambda t: (t(), t(1), t(1), None), r"at least one dimension, got shape \[\]"),
    "weight": (lambda t: (t(2, 3), t(2), t(3), None), r"weight must have shape \[3\], got \[2\]"),
    "bias": (lambda t: (t(2, 3), t(3), t(1, 3), None), r"bias must have shape \[3\], got \[1, 3\]"),
    "residual": (
        lambda t: (t(2, 3), t(3), t(3), t(3)),
        r"residual must have shape \[2, 3\], got \[3\]",
    ),
    "strides of x": (
        lambda t: (t(3, 2).t(), t(3), t(3), None),
        r"x must be contiguous, got shape \[2, 3\] with strides \[1, 2\]; pass x\.contiguous",
    ),
    "strides of weight": (
        lambda t: (t(2, 3), t(6)[::2], t(3), None),
        r"weight must be contiguous, .* strides \[2\]",
    ),
    "strides of residual": (
        lambda t: (t(2, 3), t(3), t(3), t(3, 2).t()),
        r"residual must be contiguous, .* strides \[1, 2\]",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"layer_norm: .*{message}"):
        loader.load("layer_norm").layer_norm(*make(t), 1e-5)


REFUSALS_OF_GRADIENT = {
    "device": (dict(x=lambda t: t.to("meta")), "x must be on .*, got meta"),
    "devices": (dict(grad=lambda t: t.to("meta")), "x and grad must be on one device"),
    "dtype": (dict(x=lambda t: t.long()), "float32, float64, .* got Long"),
    "dtypes": (dict(weight=lambda t: t.half()), "with x of Float, weight must be Float, got Half"),
    "statistics": (dict(mean=lambda t: t.double()), "with x of Float, mean must be Float, got Dou"),
    "rows": (dict(rstd=lambda t: t[:1]), r"rstd must have shape \[3\], got \[1\]"),
    "shape": (dict(grad=lambda t: t[:1]), r"grad must have shape \[3, 3\], got \[1, 3\]"),
    "strides": (dict(grad=lambda t: t.t()), r"grad must be contiguous, .* pass grad\.contiguous"),
    "sum": (dict(grad_sum=lambda t: t.half()), "with x of Float, grad_sum must be Float, got Half"),
}


@pytest.mark.parametrize("what", REFUSALS_OF_GRADIENT)
def test_refusals_of_the_gradient(device, what):
    changes, message = REFUSALS_OF_GRADIENT[what]
    matrix, vector = torch.zeros(3, 3, device=device), torch.zeros(3, device=device)
    inputs = dict(grad=matrix, x=matrix, weight=vector, mean=vector, rstd=vector, grad_sum=matrix)
    for name, change in changes.items():
        inputs[name] = change(inputs[name])
    with pytest.raises(RuntimeError, match=f"layer_norm_backward: .*{message}"):
        loader.load("layer_norm_backward").layer_norm_backward(**inputs)


def gradient_inputs(shape, device, dtype=torch.float32):
    grad, x = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    wide = x.double() if dtype == torch.float64 else x.float()
    rstd = (wide.var(-1, correction=0) + 1e-5).rsqrt()
    return grad, x, torch.randn(shape[-1], device=device).to(dtype), wide.mean(-1), rstd


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
        kernels.append(loader.load("layer_norm_backward", chosen))
    for kernel in kernels:
        got = gradient.layer_norm_backward(*inputs, kernel=kernel)
        for a, b in zip(got, wanted, strict=True):
            assert (a.double() - b).norm() <= gradient.tolerance(dtype) * b.norm()


@pytest.mark.parametrize("which", range(3))
def test_the_gradient_of_rows_between_the_boundaries(device, which):
    """Of grad, x and weight one begins 2 bytes past a multiple of 16."""
    inputs = [*gradient_inputs((5, 1024), device, torch.bfloat16)]
    assert gradient.fastest(inputs[1], inputs[0], inputs[2]) == gradient.IN_FLIGHT
    moved = inputs[which].new_empty(inputs[which].numel() + 1)[1:].view_as(inputs[which])
    inputs[which] = moved.copy_(inputs[which])
    assert gradient.fastest(inputs[1], inputs[0], inputs[2]) == gradient.ANY_ADDRESS
    got, wanted = gradient.layer_norm_backward(*inputs), gradient.reference(*inputs)
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).norm() <= gradient.tolerance(torch.bfloat16) * b.norm()


def test_where_no_cluster_is_granted_the_row_is_read_again(device, tmp_path, monkeypatch):
    text = loader.find_rung("layer_norm_backward", gradient.CLUSTERS).read_text()
    query = "if (error == cudaSuccess && fitting == 0)"
    assert query in text
    none = tmp_path / "none_granted.cu"
    none.write_text(text.replace(query, "fitting = 0;\n    if (error == cudaSuccess)"))
    refusing = loader.load("layer_norm_backward", none)
    inputs = gradient_inputs((3, 20_000), device)
    with pytest.raises(RuntimeError, match=r"not supported by this rung .*; the head of its"):
        gradient.layer_norm_backward(*inputs, kernel=refusing)

    def last_rung(op, rung):
        return refusing if rung == gradient.CLUSTERS else loader.load(op, rung)

    monkeypatch.setattr(common, "last_rung", last_rung)
    for a, b in zip(gradient.layer_norm_backward(*inputs), gradient.reference(*inputs),
                    strict=True):  # fmt: skip
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("rung", FORWARD)
def test_what_a_rung_refuses_is_said(device, rung):
    x, weight = torch.zeros(2, 1025, device=device), torch.zeros(1025, device=device)
    with pytest.raises(RuntimeError, match=r"not supported by this rung .* head of its \.cu file"):
        layer_norm(x, weight, weight, kernel=loader.load("layer_norm", rung))


@pytest.mark.parametrize("rung", loader.rungs("layer_norm"))
@pytest.mark.parametrize("cols", [64, 1020, 1023, 4096, 40_000, 40_001])
def test_a_mean_far_from_zero(device, rung, cols):
    """mean(x²) − mean(x)² would be left with no digit at all here."""
    x = torch.randn(3, cols, device=device) + 3000
    ones, zeros = torch.ones(cols, device=device), torch.zeros(cols, device=device)
    try:
        out = layer_norm(x, ones, zeros, kernel=loader.load("layer_norm", rung))
    except RuntimeError as error:
        assert rung in PARTIAL and "not supported by this rung" in str(error)
        return
    assert (out.double() - reference(x, ones, zeros)).abs().max() < 2e-3


@pytest.mark.parametrize("used", ["out", "sum", "both"])
def test_gradients_through_the_residual(device, used):
    """The sum goes on past the norm in a transformer block: two gradients meet in x."""
    x, residual = (torch.randn(5, 40, device=device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(40, device=device, requires_grad=True) for _ in range(2))
    inputs = (x, weight, bias, residual)

    def loss(results):
        out, total = results
        terms = {"out": out.square().sum(), "sum": (total * 3).sum()}
        return sum(terms.values()) if used == "both" else terms[used]

    got = torch.autograd.grad(loss(layer_norm(*inputs)), inputs, allow_unused=True)
    want = torch.autograd.grad(loss(reference(*inputs)), inputs, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_no_rows_have_gradients_of_zero(device):
    x = torch.zeros(0, 3, device=device, requires_grad=True)
    weight, bias = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias).sum().backward()
    assert weight.grad.tolist() == bias.grad.tolist() == [0, 0, 0] and x.grad.shape == (0, 3)


def test_a_second_derivative_is_refused(device):
    x = torch.randn(2, 3, device=device, requires_grad=True)
    weight = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="is differentiable once; create_graph=True asks for"):
        torch.autograd.grad(layer_norm(x, weight, weight).sum(), x, create_graph=True)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_chip_that_does_not_know_the_size_of_cluster_reads_twice(device, tmp_path, op):
    module = importlib.import_module(f"ops.{op}")
    text = loader.find_rung(op, module.LONG).read_text()
    query = "error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config)"
    assert query in text
    unknown = tmp_path / "unknown_size.cu"
    unknown.write_text(text.replace(query, "error = cudaSetDevice(-1)"))  # fails, and is remembered
    inputs = [torch.randn(3, 20_000, device=device), torch.randn(20_000, device=device)]
    inputs += [torch.randn(20_000, device=device)] * (op == "layer_norm")
    out = getattr(module, op)(*inputs, kernel=loader.load(op, unknown))
    assert torch.allclose(out.double(), module.reference(*inputs), atol=1e-4)
