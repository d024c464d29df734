"""What bench() says of its measurements, and when it refuses them. Timing itself needs a GPU."""

import types

import pytest
import torch

import lab
from lab import benchmark, child, counters, pictures, timing
from lab.benchmark import BenchReport, Row
from ops.common import Case, Cost

MACHINE = {"gpu": "NVIDIA H200", "driver": "driver 580", "torch": "torch 2.11", "cuda": "CUDA 13.0",
           "clock": "SM clock 1980 MHz", "tf32": "TF32 off", "date": "2026-11-30"}  # fmt: skip
CEILINGS = {"copy": 4.2e12, "read": 4.3e12, "matmul float32": 51e12}


def row(case="float32 (268435456,) contiguous", arm="1_naive", median=800e-6, **changes):
    size = 3 * 4 * int(case.split("(")[1].split(",")[0])
    values = dict(
        case=case, arm=arm, is_rung=arm[0].isdigit(), median=median, low=0.99 * median,
        high=1.02 * median, call=None, bytes=size, flops=size // 12, ceiling="copy",
        share=size / median / CEILINGS["copy"], error=3e-8,
    )  # fmt: skip
    return Row(**(values | changes))


def report():
    small = "float32 (4096,) contiguous"
    return BenchReport(
        "vector_add",
        MACHINE,
        CEILINGS,
        [
            row(),
            row(arm="2_grid_stride", median=780e-6),
            row(arm="3_vectorized", median=745e-6),
            row(arm="eager", median=738e-6),
            row(small, median=2e-6, share=None, call=9.5e-6),
            row(small, "3_vectorized", median=2.1e-6, share=None, call=9.6e-6),
            row(small, "eager", median=2.2e-6, share=None, call=6e-6),
        ],
    )


def test_the_table_has_rates_ceiling_and_ratio():
    large, small = map(str, report().tables())
    assert "1_naive        800.00  1.5  4027 GB/s         96%     0.92" in large
    assert "Ceiling: copy, 4200 GB/s, measured on the same NVIDIA H200." in large
    assert "µs a call" not in large
    assert "1_naive       2.00  1.5  25 GB/s  in cache       1.10        9.5" in small
    assert "replayed from a CUDA graph" in small
    assert "torch 2.11, CUDA 13.0, SM clock 1980 MHz, TF32 off" in str(report())


def test_every_picture_has_a_text_that_holds_its_figures():
    html = report()._repr_html_()
    assert html.count('<img alt="') == 2 and html.count("<table>") == 2
    ladder = pictures.ladder(report(), report().cases()[0])
    assert "1_naive 4027; 2_grid_stride 4130; 3_vectorized 4324; eager 4365" in ladder.alt
    assert "3_vectorized 23.41, 4324" in pictures.sweep(report()).alt
    rows = [row(f"float32 ({n}, {2048 // n}) contiguous", median=n * 1e-6) for n in (1, 8, 2)]
    by_row_length = BenchReport("softmax", MACHINE, CEILINGS, rows).sweep("row length")
    assert "by row length, smallest first: 1_naive 0.012, 0.012, 0.012" in by_row_length.alt
    assert "1_naive 0.0833 FLOP a byte, 0.336 TFLOP/s" in pictures.roofline(report()).alt
    assert len(ladder.png) < 40_000  # a notebook holds several


def believed(share):
    timing = type("Timing", (), {})()
    x = torch.randn(1000)
    median = 2 * x.nbytes / (share * CEILINGS["copy"])
    vars(timing).update(
        median=median, low=median, high=median, call=None, inputs=(x,), result=x + 1
    )
    return timing


@pytest.fixture
def op():
    """An operator module that adds 1."""
    from types import SimpleNamespace

    return SimpleNamespace(
        reference=lambda x: x.double() + 1,
        tolerance=lambda dtype: 1e-6,
        cost=lambda x: benchmark_cost(x),
    )


def benchmark_cost(x):
    from ops.common import Cost

    return Cost(2 * x.nbytes, x.numel())


@pytest.mark.parametrize(
    ("share", "beyond", "problem"),
    [(0.97, True, ""), (1.05, True, ""), (1.3, True, "130% of the copy ceiling"), (9.0, False, "")],
)
def test_a_figure_over_its_ceiling_is_an_error(op, share, beyond, problem, monkeypatch):
    monkeypatch.setattr(benchmark, "ceilings", lambda fresh: report().ceilings)
    case = type("Case", (), {"name": "float32 (1000,)", "slack": 1})
    got = benchmark._row(op, case, "1_x", believed(share), True, beyond, report())
    assert got.problem.startswith(problem) and bool(got.problem) == bool(problem)
    assert (got.share is None) == (not beyond)


def test_ceilings_from_a_busy_gpu_are_measured_again(op, monkeypatch):
    true = report().ceilings
    found = report()
    found.ceilings = {name: 0.8 * ceiling for name, ceiling in true.items()}
    found.rows[0].share = 1.0
    monkeypatch.setattr(benchmark, "ceilings", lambda fresh: true)
    case = type("Case", (), {"name": "float32 (1000,)", "slack": 1})
    got = benchmark._row(op, case, "1_x", believed(0.97), True, True, found)
    assert got.problem == "" and got.share == pytest.approx(0.97)
    assert found.rows[0].share == pytest.approx(0.8)


def test_a_result_that_is_wrong_after_timing_is_an_error(op):
    case = type("Case", (), {"name": "float32 (1000,)", "slack": 1})
    timing = believed(0.9)
    timing.result[7] = 0
    for is_rung, problem in ((True, "wrong after timing: 1 of 1,000"), (False, "")):
        got = benchmark._row(op, case, "1_x", timing, is_rung, True, report())
        assert got.problem.startswith(problem) and bool(got.problem) == bool(problem)


def test_bench_error_shows_the_problem_first():
    found = report()
    found.rows[1].problem = "130% of the copy ceiling"
    text = str(benchmark.BenchError(found))
    assert text.startswith("float32 (268435456,) contiguous, 2_grid_stride: 130% of the copy")
    assert "2_grid_stride  780.00  1.5  4130 GB/s  ERROR" in text


def test_the_slower_of_the_two_ceilings_is_chosen():
    from ops.common import Cost

    known = CEILINGS
    assert benchmark._ceiling(Cost(10**9, 10**6), torch.float32, False, known) == "copy"
    assert benchmark._ceiling(Cost(10**9, 10**6), torch.float32, True, known) == "read"
    assert benchmark._ceiling(Cost(10**9, 10**12), torch.float32, False, known) == "matmul float32"


def test_unknown_names_are_refused_with_those_that_exist(monkeypatch):
    monkeypatch.setattr("loader.load", lambda *args, **options: None)
    with pytest.raises(ValueError, match=r"no baselines \['cudnn'\]; there is: eager; compile"):
        lab.bench("vector_add", against=["cudnn"])
    with pytest.raises(ValueError, match=r"no cases \['float8'\]; there is: float32"):
        lab.bench("vector_add", cases=["float8"])


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = lab.bench("vector_add", [1, 3], isolate=False)
    assert isinstance(found, counters.Counters)
    assert "counts and never times" in str(found)
    assert list(found.totals) == ["1_naive", "3_vectorized"]
    naive, vectorized = found.totals.values()
    assert naive["global_bytes_moved"] == vectorized["global_bytes_moved"] >= 3 * 4 * 4099
    assert vectorized["global_requests"] < naive["global_requests"] / 3  # 16 bytes a lane, not 4
    assert "1_naive.cu:" in found.lines["1_naive"] and "<details>" in found._repr_html_()


def test_rungs_are_counted_on_a_case_that_all_of_them_accept():
    found = counters.run("softmax", [lab.overlay.find("softmax", rung) for rung in (1, 5)])
    assert found.needed < found.totals["5_registers"]["global_bytes_moved"] * 1.01
    assert found.totals["1_thread_row"]["global_bytes_moved"] > 8 * found.needed


def test_rungs_are_counted_on_inputs_of_ones_own():
    found = counters.count("vector_add", ["1_naive"], torch.randn(1024), torch.randn(1024))
    assert found.case == "float32 (1024,), float32 (1024,)" and found.needed == 3 * 4 * 1024
    assert found.totals["1_naive"]["global_bytes_moved"] == found.needed
    with pytest.raises(child.Failed, match="one dtype"):
        counters.count("vector_add", [1], torch.randn(4), torch.randn(4, dtype=torch.float64))


@pytest.mark.parametrize(("result", "sets"), [(0, 1024), (1 << 20, 240), (1 << 27, 3)])
def test_results_count_among_what_exceeds_the_cache(result, sets, monkeypatch):
    """A thin product has inputs of kilobytes; a thousand sets of its results fill the memory."""
    gpu = types.SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 37, 1 << 37))
    case = Case("thin", lambda device: (torch.zeros(256),), 256)
    inputs, beyond = timing.rotation(case, 12, lambda x: Cost(bytes=x.nbytes + result, flops=1))
    assert (len(inputs), beyond) == (sets, result > 0)
