"""The machine under torch: bindings, tensors by name and exact extent, Ctrl-C, many at a time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from simt_build import ROOT

import loader

KERNEL = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

template <typename T>
__global__ void add(const T* a, const T* b, T* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i GUARD n) {
    out[i] = a[i] + b[i];  // line 10
  }
  EXTRA
}

template <typename T>
cudaError_t launch(const T* a, const T* b, T* out, int64_t n, cudaStream_t stream) {
  add<<<(n + 255) / 256, 256, 0, stream>>>(a, b, out, n);
  return cudaGetLastError();
}

#define LAUNCHER(suffix, T)                                                                    \\
  extern "C" cudaError_t vector_add_launch_##suffix(const T* a, const T* b, T* out, int64_t n, \\
                                                    cudaStream_t stream) {                     \\
    return launch(a, b, out, n, stream);                                                       \\
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
"""


def write(folder: Path, name: str, guard: str = "<", extra: str = "") -> Path:
    path = folder / f"{name}.cu"
    path.write_text(KERNEL.replace("GUARD", guard).replace("EXTRA", extra).lstrip("\n"))
    return path


def load(path: Path | str, check: bool = False):
    return loader.load("vector_add", path, backend="simt", check=check)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rungs")


@pytest.fixture(scope="module")
def off_by_one(folder):
    return load(write(folder, "off_by_one", "<="), check=True)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_right_results(folder, check, dtype):
    module = load(write(folder, "right"), check)
    for n in (0, 1, 255, 1000):
        a, b = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
        assert torch.equal(module.vector_add(a, b), a + b)


def test_fault_names_line_block_thread_and_tensor(off_by_one):
    with pytest.raises(RuntimeError) as error:
        off_by_one.vector_add(torch.zeros(1000), torch.zeros(1000))
    message = str(error.value)
    for words in ("off_by_one.cu:9", "block (3,0,0)", "thread (232,0,0)", "`a`", "element 1000",
                  "of 1000", "Next:"):  # fmt: skip
        assert words in message


def test_a_view_has_the_extent_of_the_view(off_by_one):
    a, b = torch.zeros(5000), torch.zeros(5000)
    with pytest.raises(RuntimeError, match=r"`a` \(tensor a\[1000\] float32\)"):
        off_by_one.vector_add(a[1000:2000], b[:1000])


def test_the_result_is_known_too(folder):
    module = load(write(folder, "past_out", extra="if (i == 0) out[n] = 0;"), check=True)
    with pytest.raises(RuntimeError, match=r"writes 4 bytes .* outside of `out` \(tensor the res"):
        module.vector_add(torch.zeros(1024), torch.zeros(1024))


def test_tensors_of_earlier_calls_are_forgotten(folder):
    module = load(write(folder, "right"), check=True)
    for _ in range(3):
        a = torch.ones(4096)
        assert torch.equal(module.vector_add(a, a), a + a)


def test_the_process_lives_on_after_a_fault(off_by_one):
    for _ in range(3):
        with pytest.raises(RuntimeError, match="outside of"):
            off_by_one.vector_add(torch.zeros(1000), torch.zeros(1000))
    a = torch.ones(4)  # other devices are refused as before
    with pytest.raises(RuntimeError, match="must be on"):
        off_by_one.vector_add(a.to("meta"), a)


def test_versions_live_side_by_side(folder):
    ones = torch.ones(8)
    modules = []
    for i in range(3):
        path = write(folder, "edited", extra=f"if (i < n) out[i] += (T){i}.f;")
        modules.append(load(path))
    for i, module in enumerate(modules):
        assert torch.equal(module.vector_add(ones, ones), ones * (2 + i))


def test_printf_appears_in_python(folder, capsys):
    module = load(write(folder, "prints", extra='if (i == 3) printf("i is %d\\n", (int)i);'))
    module.vector_add(torch.ones(8), torch.ones(8))
    assert capsys.readouterr().out == "i is 3\n"


def test_compile_error_points_into_the_kernel(folder):
    path = write(folder, "wrong", extra="undeclared = 1;")
    with pytest.raises(loader.CompileError, match=r"wrong\.cu:11:\d+: error"):
        load(path)


def test_inline_ptx_is_refused_by_name(folder):
    path = write(folder, "ptx", extra='asm volatile("membar.gl;");')
    with pytest.raises(loader.CompileError, match=r"(?s)ptx\.cu:11:.*inline PTX.*__SIMT_CPU__"):
        load(path)


def run_python(code: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


@pytest.mark.parametrize("check", [False, True])
def test_ctrl_c_ends_a_kernel_and_the_process_lives(folder, check):
    # each waits for what it has written itself: a race would end the kernel before Ctrl-C does
    wait = "if (i < n) { volatile char* v = (char*)(out + i); while (v[0] == v[0]) {} }"
    path = write(folder, "waiting", extra=wait)
    load(path, check)  # built here, so that the time below is the kernel's
    done = run_python(
        f"""
        import os, subprocess, time, torch, loader
        m = loader.load("vector_add", {str(path)!r}, backend="simt", check={check})
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -INT {{os.getpid()}}"])
        start = time.time()
        try:
            m.vector_add(torch.ones(64), torch.ones(64))
        except KeyboardInterrupt:
            print("interrupted", time.time() - start < 10)
        good = loader.load("vector_add", 1, backend="simt")
        print(good.vector_add(torch.ones(2), torch.ones(2)).tolist())
        try:
            time.sleep(0.01)
            print("no second interrupt")
        except KeyboardInterrupt:
            print("second interrupt")
        """
    )
    assert done.stdout.split("\n")[:3] == ["interrupted True", "[2.0, 2.0]", "no second interrupt"]


def test_the_watchdog_ends_an_endless_kernel(folder, monkeypatch):
    monkeypatch.setenv("SIMT_WATCHDOG", "0.5")
    path = write(folder, "endless", extra="volatile char* v = (char*)out; while (v[0] == v[0]) {}")
    with pytest.raises(RuntimeError, match=r"(?s)no block has finished.*endless\.cu:11"):
        load(path).vector_add(torch.ones(64), torch.ones(64))


def test_a_crash_in_fast_mode_becomes_an_exception(folder):
    path = write(folder, "crash", extra="if (i == 5) *(T*)nullptr = out[0];")
    with pytest.raises(RuntimeError, match=r"(?s)crash\.cu:11.*check=True"):
        load(path).vector_add(torch.ones(64), torch.ones(64))


def test_an_error_that_the_binding_ignores_is_raised(folder):
    source = write(folder, "ignored", extra="if (i == 5) __trap();")
    source.write_text(source.read_text().replace("return cudaGetLastError()", "return cudaSuccess"))
    with pytest.raises(RuntimeError, match="__trap.*ignored.cu:11"):
        load(source).vector_add(torch.ones(64), torch.ones(64))


def test_import_simt_needs_no_torch():
    done = run_python("import sys, simt; simt.settings(True); print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


# ---- counters ----


@pytest.fixture(scope="module")
def counted(folder):
    module = load(write(folder, "right"), check=True)
    module.simt.reset()
    module.vector_add(torch.zeros(1024), torch.zeros(1024))
    return module


def test_counters_of_coalesced_accesses(counted):
    load_counter, store = counted.simt.counters()
    assert (load_counter.kind, store.kind) == ("load", "store")
    assert load_counter.line == store.line == 9
    assert load_counter.requests == 64 and store.requests == 32
    assert load_counter.units == load_counter.ideal == 64 * 4
    assert load_counter.active_lanes == 32
    assert counted.simt.totals()["global_bytes_moved"] == 3 * 4096


def test_table_and_listing(counted):
    assert "right.cu:9" in counted.simt.table()
    assert "12288 bytes moved" in counted.simt.table()
    line = next(line for line in counted.simt.listing().splitlines() if "line 10" in line)
    assert line.startswith("    9  ")
    assert line.endswith("global load 4 sectors; global store 4 sectors")
    assert "<pre" in counted.simt.listing()._repr_html_()
    assert repr(counted.simt) == counted.simt.table()


def test_reset(folder):
    module = load(write(folder, "right"), check=True)
    module.vector_add(torch.zeros(64), torch.zeros(64))
    module.simt.reset()
    assert module.simt.counters() == []


def test_strided_accesses_and_bank_conflicts(folder):
    extra = """
    __shared__ float s[32 * 32];
    if (i < 32) { s[i * 32] = float(i); s[i * 33 % 1024] = 1.f; }
    if (i < 16) out[0 * i] = a[i * 8 % n];"""
    path = write(folder, "strided", extra=extra.replace("\n", " ").replace("0 * i", "i"))
    module = load(path, check=True)
    module.vector_add(torch.zeros(128), torch.zeros(128))
    shared = [c for c in module.simt.counters() if c.space == "shared"]
    assert [c.worst for c in shared] == [32]  # s[i * 32]; s[i * 33] has no conflict
    assert sum(c.units for c in shared) == 32 + 1 and sum(c.ideal for c in shared) == 2
    strided = [c for c in module.simt.counters() if c.line == 11 and c.space == "global"]
    assert strided[0].units == 16 and strided[0].ideal == 2 and strided[0].active_lanes == 16


def test_barriers_are_counted(folder):
    module = load(write(folder, "meets", extra="__syncthreads();"), check=True)
    module.vector_add(torch.zeros(600), torch.zeros(600))
    barrier = next(c for c in module.simt.counters() if c.kind == "barrier")
    assert (barrier.line, barrier.requests) == (11, 3)  # once in each block
    assert module.simt.totals()["barriers"] == 3
    assert any("3 barriers" in line for line in module.simt.listing().splitlines())


def test_a_pair_of_halves_is_one_access(folder):
    path = write(
        folder, "pairs", extra="__half2* p = (__half2*)out; if (i < 32) p[i] = h2exp(p[i]);"
    )
    module = load(path, check=True)
    module.vector_add(torch.zeros(64), torch.zeros(64))
    pairs = [c for c in module.simt.counters() if c.line == 11]
    assert [(c.requests, c.active_lanes, c.units) for c in pairs] == [(1, 32, 4), (1, 32, 4)]


def test_fast_module_says_how_to_count(folder):
    with pytest.raises(RuntimeError, match="check=True"):
        load(write(folder, "right")).simt.counters()


def test_a_binding_is_compiled_once_for_both_modes(folder):
    path = write(folder, "both")
    load(path)
    assert load(path, check=True).build.compiled == ("both.cu",)
