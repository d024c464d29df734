"""softmax and its gradient: every rung against float64 where it is legal, and every refusal."""

import re

import pytest
import torch

import lab
import loader
import ops.softmax
import ops.softmax_backward
from ops.softmax import reference, softmax, tolerance

PARTIAL = {  # rungs that are legal on part of the domain, and why not on all of it
    ("softmax", "5_registers"),
    ("softmax", "6_clusters"),
    ("softmax", "7_short_rows"),
    ("softmax", "8_in_order"),
    ("softmax_backward", "2_registers"),
    ("softmax_backward", "3_short_rows"),
}


@pytest.mark.parametrize("rung", loader.rungs("softmax"))
def test_every_case(rung):
    report = lab.check("softmax", rung, isolate=False)
    assert bool(report.having("outside")) == (("softmax", rung) in PARTIAL)


@pytest.mark.parametrize("rung", loader.rungs("softmax_backward"))
def test_every_case_of_the_gradient(rung):
    report = lab.check("softmax_backward", rung, isolate=False)
    assert bool(report.having("outside")) == (("softmax_backward", rung) in PARTIAL)


REFUSALS = {
    "device": (lambda t: t(2, 3, device="meta"), "must be on .*, got meta"),
    "dtype": (lambda t: t(2, 3).long(), "float32, float64, float16 or bfloat16, got Long"),
    "scalar": (lambda t: t(), r"at least one dimension.*, got shape \[\]"),
    "strides": (lambda t: t(3, 2).t(), r"must be contiguous, got shape .* strides \[1, 2\]; pass "),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]
    x = make(lambda *size, device=device: torch.zeros(size, device=device))
    with pytest.raises(RuntimeError, match=f"softmax: .*{message}"):
        loader.load("softmax").softmax(x)
    with pytest.raises(
        RuntimeError, match=f"softmax_backward: .*{message.replace('at least', '')}"
    ):
        loader.load("softmax_backward").softmax_backward(x, x)


UNLIKE = {
    "device": (lambda x: x.to("meta"), "on one device, got .* and meta"),
    "dtype": (lambda x: x.half(), "one dtype, got Float and Half"),
    "shape": (lambda x: x[:1], r"one shape, got \[3, 3\] and \[1, 3\]"),
    "strides": (lambda x: x.t(), r"out must be contiguous, .* pass out\.contiguous"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_a_result_unlike_the_gradient_is_refused(device, what):
    change, message = UNLIKE[what]
    x = torch.zeros(3, 3, device=device)
    with pytest.raises(RuntimeError, match=f"softmax_backward: .*{message}"):
        loader.load("softmax_backward").softmax_backward(x, change(x))


@pytest.mark.parametrize("shape", [(3, 12), (2, 70000)])
def test_what_a_rung_refuses_is_said(device, shape):
    x = torch.zeros(*shape, device=device)[:, 1:].contiguous()
    with pytest.raises(RuntimeError, match=r"not supported by this rung .* head of its \.cu file"):
        loader.load("softmax", "5_registers").softmax(x)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_dimension_and_its_gradient(device, dim):
    x = torch.randn(4, 5, 6, device=device, requires_grad=True)
    out, want = softmax(x, dim), torch.softmax(x.double(), dim)
    assert torch.allclose(out.double(), want)
    weights = torch.randn_like(x)
    (got,) = torch.autograd.grad((out * weights).sum(), x)
    (wanted,) = torch.autograd.grad((want * weights).sum(), x)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_a_dimension_that_is_not_there(device):
    with pytest.raises(IndexError):
        softmax(torch.zeros(2, 3, device=device), 2)


@pytest.mark.parametrize("rung", loader.rungs("softmax"))
def test_values_beyond_the_range_of_exp(device, rung):
    """exp(1000) overflows and exp(-1000) is 0, in float64 too: only differences may be taken."""
    x = torch.tensor([[1000.0, 999.0, 0.0, -1000.0]], device=device)
    assert torch.allclose(softmax(x, kernel=loader.load("softmax", rung)).double(), reference(x))


@pytest.mark.parametrize("cols", [1, 256, 257])
def test_the_rung_that_is_chosen_takes_the_row(device, cols):
    x = torch.randn(3, cols, device=device)
    chosen, of_gradient = ("7_short_rows", "3_short_rows") if cols <= 256 else (
        "9_any_row", "4_any_row")  # fmt: skip
    assert ops.softmax.fastest(x) == chosen
    assert ops.softmax_backward.fastest(x) == of_gradient
    y = softmax(x)
    assert torch.equal(y, loader.load("softmax", chosen).softmax(x))
    dx = loader.load("softmax_backward", of_gradient).softmax_backward(x, y)
    assert torch.equal(ops.softmax_backward.softmax_backward(x, y), dx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_longest_row_that_counts_as_short(device, dtype):
    """It is within what those rungs take."""
    x = torch.randn(3, 1024 // dtype.itemsize, device=device).to(dtype)
    assert ops.softmax.fastest(x) == "7_short_rows"
    y, want = softmax(x), reference(x)
    assert (y.double() - want).norm() < tolerance(dtype) * want.norm()
    dx, want = ops.softmax_backward.softmax_backward(x, y), ops.softmax_backward.reference(x, y)
    assert (dx.double() - want).norm() < ops.softmax_backward.tolerance(dtype) * want.norm()


NO_CLUSTERS = {  # what a chip or a MIG slice may answer that has none of that size
    "none": (r"cudaOccupancyMaxActiveClusters\(.*\);", "clusters = 0;"),
    "an error": (r"cudaOccupancyMaxActiveClusters\(.*\);", "cudaSetDevice(-1);"),
    "unsupported": (r"cudaDeviceGetAttribute\(.*\);", ""),
}


@pytest.mark.parametrize("answer", NO_CLUSTERS)
def test_where_no_cluster_is_granted(device, tmp_path, answer):
    """The last rungs read the row twice; the rung about clusters says that it cannot."""

    def without(op, rung):
        text, count = re.subn(*NO_CLUSTERS[answer], loader.find_rung(op, rung).read_text())
        refused = "return config.numAttrs > 0 ? cudaErrorUnknown : cudaLaunchKernelEx("
        text, launches = re.subn(r"return cudaLaunchKernelEx\(", refused, text)
        assert count == launches == 1
        path = tmp_path / f"{op}_{rung}.cu"
        path.write_text(text)
        return loader.load(op, path)

    x, g = torch.randn(2, 2, 40_000, device=device)
    y = without("softmax", "9_any_row").softmax(x)
    assert (y.double() - reference(x)).norm() < tolerance(x.dtype) * reference(x).norm()
    dx = without("softmax_backward", "4_any_row").softmax_backward(g, y)
    want = ops.softmax_backward.reference(g, y)
    assert (dx.double() - want).norm() < ops.softmax_backward.tolerance(x.dtype) * want.norm()
    with pytest.raises(RuntimeError, match=r"not supported by this rung \(operation not supported"):
        without("softmax", "6_clusters").softmax(x)


def test_a_second_derivative_is_refused(device):
    x = torch.ones(2, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="is differentiable once; create_graph=True asks for"):
        torch.autograd.grad(softmax(x).sum(), x, create_graph=True)
