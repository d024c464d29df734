"""What check() finds. Operator and "kernels" are Python here, so that each can have a fault."""

import re
import sys
import types

import pytest
import torch

import lab
from lab.checker import CPU_ELEMENTS, CheckError, run
from lab.compare import differences
from ops.common import FLOATS, Case, Cost, tensor


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel):
        ctx.kernel = kernel
        return kernel.forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.kernel.backward(grad), None


def good_forward(x):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.mul(x, 3, out=out)


def good_backward(grad):
    return grad * 3


@pytest.fixture
def check(monkeypatch):
    """check(forward=…, backward=…): the report of an operator that should triple its input."""
    op = types.ModuleType("ops.triple")
    op.triple = lambda x, kernel=None: Scale.apply(x, kernel)
    op.reference = lambda x: x.double() * 3
    op.cost = lambda x: Cost(2 * x.numel() * x.element_size(), x.numel())
    op.tolerance = lambda dtype: torch.finfo(dtype).eps / 2
    op.DETERMINISTIC = True

    def case(shape, layout, dtype):
        name = f"{str(dtype).removeprefix('torch.')} {shape} {layout}"
        return Case(name, lambda device: (tensor(shape, dtype, device, layout),),
                    torch.Size(shape).numel())  # fmt: skip

    wanted = [((0,), "contiguous"), ((70, 33), "contiguous"), ((1000,), "misaligned")]
    wanted += [((8, 6), "strided"), ((100,), "nonfinite"), ((5, 4), "expanded")]
    op.cases = lambda: [case(*of, dtype) for dtype in FLOATS for of in wanted]
    monkeypatch.setitem(sys.modules, "ops.triple", op)

    def check(forward=good_forward, backward=good_backward, **changes):
        vars(op).update(changes)
        kernel = types.SimpleNamespace(forward=forward, backward=backward)
        monkeypatch.setattr("loader.load", lambda *args, **options: kernel)
        return run("triple", "1_test", "1_test.cu", None, "simt")

    check.case = case
    return check


def test_right_rung_passes_and_says_what_was_tried(check):
    report = check()
    assert report.ok, report.failure()
    assert len(report.having("passed")) == 24
    for what in ("every element written", "inputs unchanged", "the same bits twice", "gradcheck"):
        assert what in report.tried
    assert "triple/1_test passed on the CPU machine" in str(report)
    assert '<td style="text-align:left">bfloat16</td>' in report._repr_html_()


def last_column_wrong(x):
    out = good_forward(x)
    if x.dim() == 2:
        out[:, -1] += 1
    return out


def forgets_the_end(x):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.view(-1)[:-1] = (x * 3).reshape(-1)[:-1]
    return out


def changes_its_input(x):
    out = good_forward(x)
    if x.stride() == (12, 2):
        x[0, 0] = 7
    return out


def writes_beside_its_input(x):
    out = good_forward(x)
    if x.stride() == (12, 2):  # every second element: the others are not its own
        torch.as_strided(x, (1,), (1,), 1).fill_(7)
    return out


def has_a_race(x):
    has_a_race.calls += 1
    return good_forward(x) * (1 + torch.finfo(x.dtype).eps * (has_a_race.calls % 2))


has_a_race.calls = 0


def hides_nan(x):
    return torch.nan_to_num(good_forward(x), nan=0)


def one_wrong_among_many(x):
    out = good_forward(x)
    out.view(-1)[-1:] += 1.0  # 1e-3 of the norm at 2^20 elements: bfloat16 alone allows 4e-3
    return out


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (last_column_wrong, r"float32 \(70, 33\) contiguous: output is off"),
        (last_column_wrong, r"70 of 2,310 elements are wrong, the first at \[0, 32\]: got"),
        (last_column_wrong, r"\.#\n"),
        (forgets_the_end, r"the first at \[69, 32\]: got nan.*nobody writes"),
        (changes_its_input, r"\(8, 6\) strided: it changed input 0"),
        (writes_beside_its_input, r"\(8, 6\) strided: it changed input 0, or memory beside it"),
        (has_a_race, r"off by|different bits"),
        (hides_nan, r"\(100,\) nonfinite.*\n.*got 0, expected nan"),
        (lambda x: good_forward(x)[:1], r"output has shape \[1, 33\], expected \[70, 33\]"),
    ],
)
def test_faults_are_found(check, forward, message):
    report = check(forward)
    assert not report.ok
    assert re.search(message, report.failure()), report.failure()


def test_only_gradients_wrong(check):
    report = check(backward=lambda grad: grad * 2)
    assert "gradient is off by 3.3e-01" in report.failure()


@pytest.mark.parametrize(("off", "ok"), [(3e-6, True), (3e-5, False)])
def test_a_gradient_that_nearly_vanishes_is_judged_by_what_was_sent(check, off, ok):
    """Its terms cancelled to a ten-thousandth, and their rounding did not."""
    found = check(
        lambda x: x * 1e-4,
        lambda grad: grad * 1e-4 * (1 + off),
        reference=lambda x: x.double() * 1e-4,
        tolerance=lambda dtype: torch.finfo(dtype).eps,
        cases=lambda: [check.case((9,), "contiguous", torch.float32)],
    )
    assert found.ok == ok, found.failure()


def test_expanded_gradients_are_tried(check):
    def refuses_expanded(grad):
        if not grad.is_contiguous():
            raise RuntimeError("grad must be contiguous")
        return grad * 3

    assert "grad must be contiguous" in check(backward=refuses_expanded).failure()


def test_bits_that_differ(check):
    calls = []

    def drifts(x):
        calls.append(1)
        return good_forward(x) * (1 + 1e-7 * len(calls) % 2)

    def one(report):
        return report.having("failed")[0].message

    slack = dict(
        tolerance=lambda dtype: 1.0, cases=lambda: [check.case((9,), "contiguous", FLOATS[0])]
    )
    assert "different bits" in one(check(drifts, **slack))
    assert check(drifts, DETERMINISTIC=("2_other",), **slack).ok


def test_refusals_are_counted_and_never_pass(check):
    def even_rows_only(x):
        if x.dim() == 2 and x.shape[1] % 2:
            raise RuntimeError("triple: a row of 33 is not supported by this rung")
        return good_forward(x)

    report = check(even_rows_only)
    assert report.ok and len(report.having("outside")) == 4
    assert "4 cases lie outside this rung's domain" in str(report)

    def refuses(x):
        raise RuntimeError("triple: not supported by this rung")

    report = check(refuses)
    assert not report.ok and "refused every one of its 24 cases" in report.failure()


def test_a_case_too_big_for_this_machine_is_skipped_and_named(check):
    big = check.case((1 << 40,), "contiguous", torch.float32)
    report = check(cases=lambda: [big, check.case((3,), "contiguous", torch.float32)])
    assert report.ok and report.results[0].status == "skipped"
    assert f"skipped: over {CPU_ELEMENTS:,} elements, for a GPU" in str(report)


@pytest.mark.parametrize("message", ["an illegal memory access", "writes outside of `out`"])
def test_a_rung_that_was_caught_outside_is_not_run_unwatched(check, message):
    """It would end the process, and nobody would hear which line it was."""
    ran = []

    def strays(x):
        ran.append(x.numel())
        raise RuntimeError(f"triple: {message}")

    sizes = ((5000,), (9,), (5001,))  # the first is too large to be watched
    report = check(
        strays, cases=lambda: [check.case(n, "contiguous", torch.float32) for n in sizes]
    )
    assert ran == [5000, 9]
    assert "skipped: over 4,096 elements, unwatched, after a bad memory access" in str(report)


def test_check_raises_with_the_report(check, monkeypatch):
    check(last_column_wrong)  # leaves the faulty kernel in place
    monkeypatch.setattr(
        "lab.checker.find", lambda op, rung: lab.overlay.Files("1_test", "k.cu", None)
    )
    with pytest.raises(CheckError, match="triple/1_test is wrong for float32") as info:
        lab.check("triple", "1_test", backend="simt", isolate=False)
    assert info.value.report.results[1].wrong.count == 70


def test_large_cases_can_be_left_out(check, monkeypatch):
    check()
    monkeypatch.setattr(
        "lab.checker.find", lambda op, rung: lab.overlay.Files("1_test", "k.cu", None)
    )
    report = lab.check("triple", "1_test", backend="simt", isolate=False, largest=48)
    assert [result.case for result in report.results][:3] == [
        "float32 (0,) contiguous", "float32 (8, 6) strided", "float32 (5, 4) expanded",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_element_does_not_hide_in_the_norm(dtype):
    expected = torch.randn(1 << 20, dtype=torch.float64)
    out = expected.to(dtype, copy=True)
    tolerance = torch.finfo(dtype).eps / 2
    assert differences(out, expected, tolerance)[1] is None
    out[1234] += 1
    error, wrong = differences(out, expected, tolerance)
    assert wrong.index == (1234,) and wrong.count == 1
    if dtype is torch.bfloat16:
        assert error < tolerance  # the norm alone would have passed it


def test_errors_spread_thin_are_found_by_the_norm():
    expected = torch.randn(4096, dtype=torch.float64)
    error, wrong = differences(expected * 1.001, expected, 5e-4)
    assert error == pytest.approx(1e-3) and wrong.count > 0


def test_infinity_where_the_dtype_overflows():
    expected = torch.tensor([1.0, 1e6, float("inf"), float("nan")], dtype=torch.float64)
    assert differences(expected.half(), expected, 1e-3)[1] is None
    out = expected.half()
    out[1] = 65504
    assert differences(out, expected, 1e-3)[1].index == (1,)
