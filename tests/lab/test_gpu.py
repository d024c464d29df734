"""The lab on a GPU. Figures are printed: run with -s to see them."""

import importlib.util
import statistics
import time

import pytest
import torch

import lab
from lab import child, collect, overlay, profiler, sanitizer, timing
from tests.conftest import ROOT, needs_gpu

pytestmark = needs_gpu
NAIVE = (ROOT / "kernels/vector_add/1_naive.cu").read_text()


def rung(name, before, after):
    """A cell with one thing changed."""
    assert before in NAIVE
    overlay.write("vector_add", name, "kernel", NAIVE.replace(before, after))


@pytest.mark.parametrize("name", ["1_naive", "2_grid_stride", "3_vectorized"])
def test_check_passes_in_ten_seconds(name):
    lab.load("vector_add", name)
    child.start()
    lab.check("vector_add", "1_naive")  # the child is ready
    start = time.perf_counter()
    report = lab.check("vector_add", name)
    took = time.perf_counter() - start
    print(f"\n{report}\nwith the way to the child: {took:.2f} s")
    assert took < 10
    assert {"a side stream", "gradcheck", "nothing past the end", "the same bits twice"} <= set(
        report.tried
    )
    assert len(report.having("passed")) >= 80


def test_a_launch_on_the_wrong_stream_is_found():
    rung("wrong_stream", ", BLOCK, 0, stream>>>", ", BLOCK>>>")
    with pytest.raises(lab.CheckError, match="on a side stream it did not wait for its inputs"):
        lab.check("vector_add", "wrong_stream")


def test_an_element_nobody_writes_is_found():
    rung("forgets", "if (i < n) {", "if (i < n - 1) {")
    with pytest.raises(lab.CheckError, match=r"first at .*got nan.*nobody writes"):
        lab.check("vector_add", "forgets")


def test_a_write_past_the_end_is_found_without_a_sanitizer():
    rung("one_more", "if (i < n) {", "if (i <= n) {")
    with pytest.raises(lab.CheckError, match="it wrote past the end of its result"):
        lab.check("vector_add", "one_more")


def test_an_illegal_address_costs_nothing():
    x = torch.ones(3, device="cuda")
    rung("wild", "out[i] = a[i] + b[i];", "out[i] = a[i + (int64_t{1} << 40)];")
    with pytest.raises(lab.CheckError, match="illegal memory access") as info:
        lab.check("vector_add", "wild")
    print(f"\n{info.value}")
    assert "Help: A thread read or wrote outside its tensors" in str(info.value)
    assert (x + 1).sum().item() == 6
    assert lab.check("vector_add", "1_naive").ok


def test_a_refused_launch_is_explained():
    rung("big_block", "constexpr int BLOCK = 256;", "constexpr int BLOCK = 2048;")
    with pytest.raises(lab.CheckError, match="the launch failed: invalid (argument|config)"):
        lab.check("vector_add", "big_block")


def test_an_endless_loop_costs_nothing():
    rung("endless", "if (i < n) {", "while (clock64() != 0) {}\n  if (i < n) {")
    lab.load("vector_add", "endless")
    start = time.perf_counter()
    with pytest.raises(child.Died, match=r"did not finish in 5 s and was stopped, in float32"):
        lab.check("vector_add", "endless", limit=5)
    assert lab.check("vector_add", "1_naive").ok
    print(f"\nan endless loop, and back: {time.perf_counter() - start:.1f} s")


def test_bench_agrees_with_itself():
    cases = ["float32 (268435456,) contiguous", "float32 (1048576,) contiguous"]
    first, second = (
        lab.bench("vector_add", against=["eager", "compile"], cases=cases) for _ in range(2)
    )
    print(f"\n{first}\n\n{second}")
    for a, b in zip(first.rows, second.rows, strict=True):
        print(f"{a.case}, {a.arm}: {a.median * 1e6:.2f} and {b.median * 1e6:.2f} µs")
    for a, b in zip(first.rows, second.rows, strict=True):
        # A rung that is itself unsteady, such as 1_naive at this size, says so in its spread.
        spread = max((row.high - row.low) / row.median for row in (a, b))
        assert b.median == pytest.approx(a.median, rel=max(0.02, spread)), (a.case, a.arm)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_every_case_is_compiled():
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        report = lab.bench("swiglu", [], ["compile"], cases="all", isolate=False)
    assert len(report.rows) > 2


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_bench_agrees_with_do_bench_on_large_copies():
    from triton.testing import do_bench

    x, y = torch.randn(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    ours = timing.side_by_side({"copy": lambda x: y.copy_(x)}, [(x,)])["copy"].median
    theirs = do_bench(lambda: y.copy_(x), return_mode="median") / 1e3
    small = [(torch.randn(4096, device="cuda"),) for _ in range(64)]
    ours_small = timing.side_by_side({"add": lambda x: x + 1}, small)["add"].median
    theirs_small = do_bench(lambda: small[0][0] + 1, return_mode="median") / 1e3
    print(f"\n1 GiB copy: {ours * 1e6:.1f} µs, do_bench {theirs * 1e6:.1f} µs")
    print(f"4096 elements + 1: {ours_small * 1e6:.2f} µs, do_bench {theirs_small * 1e6:.2f} µs")
    assert ours == pytest.approx(theirs, rel=0.03)


def test_profile_explains_a_rung():
    if not profiler._ncu():
        pytest.skip("needs ncu")
    found = lab.profile("vector_add", "1_naive")
    print(f"\n{found}")
    (_, counters), *_ = found.kernels
    dram = float(counters["dram__throughput.avg.pct_of_peak_sustained_elapsed"][0])
    assert 50 < dram <= 100
    loads = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
    assert float(counters[loads][0]) == pytest.approx(4)


def test_memcheck_names_the_line():
    try:
        sanitizer._program()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    rung("past_the_end", "if (i < n) {", "if (i <= n) {")
    line = 1 + next(i for i, t in enumerate(NAIVE.splitlines(), 1) if "a[i] + b[i]" in t)
    start = time.perf_counter()
    with pytest.raises(sanitizer.Finding, match="Invalid __global__") as info:
        lab.check("vector_add", "past_the_end", sanitize="memcheck")
    print(f"\n{info.value}\nmemcheck: {time.perf_counter() - start:.1f} s")
    assert f"past_the_end.cu:{line}" in str(info.value)


def test_memcheck_is_silent_on_a_right_kernel():
    try:
        sanitizer._program()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert lab.check("vector_add", "3_vectorized", sanitize="memcheck", largest=300).ok


def test_edit_to_verified_result():
    a = torch.randn(1000, device="cuda")
    times = []
    for i in range(5):
        start = time.perf_counter()
        rung(f"edit_{i}", "a[i] + b[i]", f"a[i] + b[i] + T({i}.0f)")
        out = lab.load("vector_add", f"edit_{i}").vector_add(a, a)
        assert torch.allclose(out, a + a + i)
        times.append(time.perf_counter() - start)
    print(f"\nedit to verified: median {statistics.median(times):.2f} s of {times}")


def test_collect_quotes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "RESULTS", tmp_path)
    monkeypatch.setattr(collect, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(f"{collect.BEGIN}\n{collect.END}\n")
    monkeypatch.setattr(collect, "_kernels", lambda: [])
    assert collect.main(["vector_add"]) == 0
    readme = (tmp_path / "README.md").read_text()
    print(f"\n{readme}")
    assert "| 3_vectorized |" in readme and collect.unfounded() == []
