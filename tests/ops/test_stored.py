"""Views whose values are computed when they are read: a kernel would read what is in memory."""

import importlib

import pytest
import torch

import loader

OPS = loader.ops()
EVERYWHERE = {"matmul_tc": "1_wmma", "conv2d": "7_any_shape"}  # the last rung is inline PTX


def small_case(op):
    """An operator's module, and tensors of its smallest float case that has all of them."""
    module = importlib.import_module(f"ops.{op}")
    cases = [case for case in module.cases() if 0 < case.elements < 1 << 12]
    return module, min(cases, key=lambda case: case.elements).inputs


def negated(x):
    """``x``, as a view of −x."""
    return torch._neg_view(-x)


def zero(x):
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize("op", OPS)
def test_a_negated_view_gives_what_its_values_give(device, op):
    module, make = small_case(op)
    inputs = make(device)
    views = [negated(x) if torch.is_tensor(x) else x for x in inputs]
    got, want = getattr(module, op)(*views), getattr(module, op)(*inputs)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for a, b in pairs:
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", [negated, zero])
def test_a_binding_refuses_such_a_view(device, op, view, monkeypatch):
    module, make = small_case(op)
    inputs = make(device)
    monkeypatch.setattr(module, "stored", lambda x: x)
    kernel = loader.load(op, EVERYWHERE.get(op))
    tensors = [i for i, x in enumerate(inputs) if torch.is_tensor(x)]
    for i in tensors:
        views = [view(x) if i == j else x for j, x in enumerate(inputs)]
        with pytest.raises(RuntimeError, match=f"{op}: .*value.*pass .*clone"):
            getattr(module, op)(*views, kernel=kernel)
