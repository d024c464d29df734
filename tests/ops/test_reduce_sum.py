"""reduce_sum: every rung against float64, every refusal."""

import pytest
import torch

import lab
import loader
from ops.reduce_sum import reduce_sum

RUNGS = loader.rungs("reduce_sum")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    report = lab.check("reduce_sum", rung, isolate=False)
    assert bool(report.having("outside")) == (rung != RUNGS[-1])


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"),), "x must be on .*, got meta"),
    "dtype": (lambda t: (t(2).long(),), "float32, float64, .* got Long"),
    "empty": (lambda t: (t(0).long(),), "float32, float64, .* got Long"),
    "dim": (lambda t: (t(2, 3), 2), "a dimension of x, which has 2, got 2"),
    "negative dim": (lambda t: (t(2, 3), -3), "a dimension of x, which has 2, got -3"),
    "dim of a scalar": (lambda t: (t(), 0), "a dimension of x, which has 0, got 0"),
    "strides": (lambda t: (t(3, 2).t(),), r"x must be contiguous, .*; pass x\.contiguous\(\)"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    with pytest.raises(RuntimeError, match=f"reduce_sum: .*{message}"):
        loader.load("reduce_sum").reduce_sum(*make(t))


@pytest.mark.parametrize("rung", RUNGS[:-1])
def test_a_rung_refuses_a_dimension_it_cannot_sum(device, rung):
    with pytest.raises(RuntimeError, match="not supported by this rung; .* pass dim=None"):
        loader.load("reduce_sum", rung).reduce_sum(torch.ones(3, 4, device=device), 0)


def test_a_sum_of_nothing_is_zero(device):
    assert reduce_sum(torch.ones(0, 3, device=device)).item() == 0
    assert reduce_sum(torch.ones(2, 0, 3, device=device), 1).tolist() == [[0, 0, 0]] * 2


def test_small_summands_are_not_lost(device):
    """Their sum is 2^24 + 2^16, and 2^24 + 1 is 2^24 in float32."""
    x = torch.ones((1 << 16) + 1, device=device)
    x[0] = 1 << 24
    for rung in RUNGS:
        total = reduce_sum(x, kernel=loader.load("reduce_sum", rung)).item()
        assert abs(total - (1 << 24) - (1 << 16)) <= 256, rung
