"""Every operator module has what lab reads from it (lab/README.md)."""

import importlib

import pytest
import torch

import loader
from lab.checker import as_tuple
from ops.common import Cost

SMALL = 5000  # elements


@pytest.fixture(params=loader.ops())
def op(request):
    return request.param, importlib.import_module(f"ops.{request.param}")


def test_an_operator_module_is_complete(op):
    name, module = op
    needed = ("reference", "cost", "tolerance", "cases", "bench_cases", "baselines", name)
    assert [n for n in needed if not callable(getattr(module, n, None))] == []
    assert next(iter(module.baselines())) == "eager" and "compile" not in module.baselines()


def test_case_names_are_unique_and_begin_with_the_dtype(op):
    _, module = op
    for cases in (module.cases(), module.bench_cases()):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names) > 0
        assert all(isinstance(getattr(torch, name.split()[0]), torch.dtype) for name in names)


def test_no_bench_case_is_misaligned_but_what_says_so(op):
    """cuBLAS was timed at an eighth of its speed, because of a bias that lay askew."""
    _, module = op
    for case in module.bench_cases():
        offsets = [
            x.storage_offset() * x.element_size()
            for x in case.inputs("meta")  # no memory: the largest have gigabytes
            if torch.is_tensor(x)
        ]
        assert any(n % 16 for n in offsets) == ("misaligned" in case.name), case.name


def test_reference_is_in_float64_and_agrees_with_pytorch(op):
    _, module = op
    eager = module.baselines()["eager"]
    small = [case for case in module.cases() if 0 < case.elements <= SMALL]
    assert small
    for case in small[:: max(1, len(small) // 20)]:
        inputs = case.inputs("cpu")
        dtype = next(x.dtype for x in inputs if torch.is_tensor(x))
        assert str(dtype) == f"torch.{case.name.split()[0]}", case.name
        biggest = max(x.numel() for x in inputs if torch.is_tensor(x))
        assert biggest <= case.elements, case.name
        assert isinstance(module.cost(*inputs), Cost) and module.cost(*inputs).bytes > 0
        assert 0 <= module.tolerance(dtype) < 0.1
        expected = as_tuple(module.reference(*inputs))
        try:
            results = as_tuple(eager(*inputs))
        except (RuntimeError, NotImplementedError):  # some of PyTorch's functions need a GPU
            continue
        for ref, out in zip(expected, results, strict=True):
            assert ref.dtype == torch.float64 and ref.shape == out.shape, case.name
            finite = ref.isfinite() & out.isfinite()
            error = (out - ref)[finite].norm() / ref[finite].norm().clamp_min(1e-9)
            # PyTorch rounds where it likes: this only tells a wrong formula from a right one.
            rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0
            assert error <= 30 * rounding + 20 * module.tolerance(dtype), case.name
