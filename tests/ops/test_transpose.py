"""transpose: every rung bit by bit, every refusal."""

import pytest
import torch

import lab
import loader
from ops.common import tensor
from ops.transpose import transpose

RUNGS = loader.rungs("transpose")
PACKS_ONLY = ("5_vectorized", "6_swizzle")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    report = lab.check("transpose", rung, isolate=False)
    on_gpu = report.backend == "cuda"  # where shapes are tried that no grid of rungs 1 to 4 covers
    assert bool(report.having("outside")) == (rung in PACKS_ONLY or on_gpu and rung != RUNGS[-1])


REFUSALS = {
    "device": (lambda t: t(2, 3, device="meta"), "x must be on .*, got meta"),
    "dtype": (
        lambda t: t(2, 3).to(torch.complex128),
        "1, 2, 4 or 8 bytes, got ComplexDouble with 16",
    ),
    "empty": (lambda t: t(0, 3).to(torch.complex128), "1, 2, 4 or 8 bytes, got ComplexDouble"),
    "dimensions": (lambda t: t(3), r"at least 2 dimensions, got shape \[3\]"),
    "conjugate": (lambda t: t(2, 3).to(torch.complex64).conj(), r"pass x\.clone\(\)"),
    "strides": (lambda t: t(3, 2).t(), r"x must be contiguous, .*; pass x\.contiguous\(\)"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"transpose: .*{message}"):
        loader.load("transpose").transpose(make(t))


@pytest.mark.parametrize("rung", PACKS_ONLY)
@pytest.mark.parametrize("shape, layout", [((16, 17), "contiguous"), ((16, 16), "misaligned")])
def test_a_rung_refuses_what_fits_no_pack(device, rung, shape, layout):
    x = tensor(shape, torch.float16, device, layout)
    with pytest.raises(RuntimeError, match="not supported by this rung: see Legal"):
        loader.load("transpose", rung).transpose(x)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float8_e5m2, torch.complex64]
)
def test_other_dtypes(device, dtype):
    x = (torch.randn(2, 24, 40, device=device) * 3).to(dtype)
    out = transpose(x)
    assert out.dtype == dtype
    assert torch.equal(out.view(torch.uint8), x.mT.contiguous().view(torch.uint8))
