"""scan: every rung against float64, every refusal, and the order that it promises."""

import pytest
import torch

import lab
import loader
from ops.scan import scan

RUNGS = loader.rungs("scan")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    assert not lab.check("scan", rung, isolate=False).having("outside")


REFUSALS = {
    "device": (lambda t: t(2, 3, device="meta"), "x must be on .*, got meta"),
    "dtype": (lambda t: t(2).long(), "float32, float64, .* got Long"),
    "empty": (lambda t: t(0).long(), "float32, float64, .* got Long"),
    "scalar": (lambda t: t(), r"at least 1 dimension, got shape \[\]"),
    "strides": (lambda t: t(3, 2).t(), r"x must be contiguous, .*; pass x\.contiguous\(\)"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"scan: .*{message}"):
        loader.load("scan").scan(make(t))


@pytest.mark.parametrize("rung", RUNGS)
def test_counting_is_exact(device, rung):
    """Whole numbers below 2^24 have no rounding: any difference is a missing or doubled element."""
    x = torch.ones(3, 50_001, device=device)
    out = scan(x, kernel=loader.load("scan", rung))
    assert torch.equal(out, torch.arange(1.0, 50_002, device=device).expand(3, -1))
