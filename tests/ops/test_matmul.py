"""matmul: every rung against float64 where it is legal, every refusal, both gradients."""

import pytest
import torch

import lab
import loader
from ops.common import tensor
from ops.matmul import matmul, reference, tolerance

RUNGS = loader.rungs("matmul")
ROW_MAJOR_ONLY = ("6_vectorized", "7_warp_tiles", "8_double_buffer")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    report = lab.check("matmul", rung, isolate=False)
    assert bool(report.having("outside")) == (rung in ROW_MAJOR_ONLY)


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(3, 4)), "a (must be on .*, got|is on) meta"),
    "devices": (
        lambda t: (t(2, 3), t(3, 4, device="meta")),
        "(on one device, got .* and|is on) meta",
    ),
    "dtype": (lambda t: (t(2, 3).double(), t(3, 4).double()), "float32, got Double and Double"),
    "dtypes": (lambda t: (t(2, 3), t(3, 4).half()), "float32, got Float and Half"),
    "dimensions": (lambda t: (t(2, 2, 3), t(3, 4)), r"2 dimensions, got shapes \[2, 2, 3\] and"),
    "shapes": (lambda t: (t(2, 3), t(4, 5)), r"as many columns .*, got \[2, 3\] and \[4, 5\]"),
    "empty": (lambda t: (t(0, 3), t(4, 5)), r"as many columns .*, got \[0, 3\] and \[4, 5\]"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"matmul: .*{message}"):
        loader.load("matmul").matmul(*make(t))


@pytest.mark.parametrize("rung", ROW_MAJOR_ONLY)
@pytest.mark.parametrize("layout", ["transposed", "misaligned", "strided"])
def test_a_rung_refuses_what_it_cannot_read(device, rung, layout):
    kernel = loader.load("matmul", rung)
    a = tensor((8, 8), torch.float32, device)
    b = tensor((8, 8), torch.float32, device, layout)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(RuntimeError, match="not supported by this rung, which wants row-major"):
            kernel.matmul(x, y)


def test_a_row_of_one_column_may_have_any_stride(device):
    """torch leaves the stride of a dimension of length 1 undefined."""
    a = torch.randn(5, 1, device=device).as_strided((5, 1), (1, 77))
    b = torch.randn(1, 8, device=device).as_strided((1, 8), (99, 1))
    for rung in RUNGS[:5] + RUNGS[-1:]:
        out = matmul(a, b, kernel=loader.load("matmul", rung))
        assert torch.equal(out, a * b), rung


def test_gradients_of_a_composition(device):
    """Through two products, one of them of transposed matrices, against autograd in float64."""
    x = torch.randn(9, 20, device=device, requires_grad=True)
    w = torch.randn(12, 20, device=device, requires_grad=True)
    out = matmul(matmul(x, w.t()), w).sum()
    ref = reference(reference(x, w.t()), w).sum()
    for got, want in zip(
        torch.autograd.grad(out, (x, w)), torch.autograd.grad(ref, (x, w)), strict=True
    ):
        assert (got.double() - want).norm() <= tolerance(torch.float32) * want.norm()


@pytest.mark.parametrize("rung", RUNGS)
def test_the_error_is_that_of_torch(device, rung):
    """On a GPU that is cuBLAS. Products rounded to TF32 would be off by a thousand times more.

    cuBLAS may share the 512 terms out among up to 16 blocks, and add up their sums. The rounding of
    a running sum grows as the square root of its length: a quarter of ours.
    """
    a, b = torch.randn(68, 512, device=device), torch.randn(512, 132, device=device)
    exact = reference(a, b)
    own, torchs = (
        (out - exact).norm() / exact.norm()
        for out in (matmul(a, b, loader.load("matmul", rung)), a @ b)
    )
    assert own <= 4 * torchs


def test_the_second_derivative(device):
    """Of squares, so that it is not zero; a backward that is a bare kernel would give none."""
    a, b = (torch.randn(n, m, device=device, dtype=torch.float32, requires_grad=True)
            for n, m in ((5, 7), (7, 3)))  # fmt: skip

    def mixed(product, a, b):
        (first,) = torch.autograd.grad(product(a, b).square().sum(), a, create_graph=True)
        return torch.autograd.grad(first.sum(), b)[0]

    want = mixed(
        torch.matmul, a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    )
    got = mixed(matmul, a, b)
    assert (got - want).norm() < 4 * tolerance(torch.float32) * want.norm()
