"""Every hint against what the compilers really say. One compilation covers many mistakes."""

import re
import subprocess

import pytest

import loader
from lab.diagnose import messages
from lab.hints import COMPILER, RUNTIME, hint

# Each line is one mistake, and ends with a part of the help that it should get.
TYPES = """
#include <cuda_runtime.h>
__global__ void ok(float* a) { a[0] = 1; }
__global__ void a1(float* a) { a[threadIDx.x] = 0; }  // CUDA spells
__global__ void a2(float* a) { a[threadIdx.X] = 0; }  // in lower case
__global__ float a3(float* a) { return a[0]; }  // returns nothing
void a4(float* a) { ok(a); }  // <<<blocks, threads_per_block>>>
__global__ void a5(float* a, int n) { __shared__ float s[n]; a[1] = s[0]; }  // compile-time
__global__ void a6(float* a) { __shared__ float s[2] = {0, 0}; a[0] = s[0]; }  // uninitialised
__global__ void a7(const float* a) { a[0] = 1.0f; }  // It is const here
__global__ void a9(float* a) { __half h = a[0]; }  // cuda_fp16.h
__global__ void b1(float* a) { __nv_bfloat16 h = a[0]; }  // cuda_bf16.h
__global__ void b2(float* a) { printf("%f", a[0]); }  // cstdio
__global__ void b4(float* a) { short s = 0; atomicAdd(&s, 1); }  // no such atomic
void b5(float* a) { auto f = [] __device__(float x) { return x; }; }  // device lambda
__global__ void b6(float4* a) { a[0] = a[1] + a[2]; }  // .x .y .z .w
void b7(float* a, cudaStream_t s) { ok<<<1, 1, s>>>(a); }  // put 0 before the stream
__global__ void b8(int* a) { float* b = a; }  // The types differ
void b9(float* a) { ok<<<1, 1>>>(a, a); }  // parameter list
struct S { __global__ void c1(float* a); };  // outside any class
__global__ void c2(void* a) { a[0] = 1; }  // its type
__global__ void c3(float* a) { a[0] = a[1] % 2; }  // fmodf
__global__ void c4(float* a) { a[0] = undefined_name; }  // typing error
"""
CALLS = """
#include <algorithm>
__global__ void ok(float* a) { a[0] = 1; }
float table[4];
__global__ void d1(float* a) { a[0] = std::max(a[0], a[1]); }  // without std::
__global__ void d2(float* a) { ok<<<1, 1>>>(a); }  // only host code launches
__global__ void d3(float* a) { throw 1; }  // no exceptions
__global__ void d4(float* a) { a[0] = table[1]; }  // pass the value
__global__ void d5(float* a) { a[0] = 1; __syncthreads; }  // called with ()
__global__ void a8(float* a) { a[0] = __shfl_down(a[0], 1); }  // __shfl_down_sync
__device__ float d6(float a) { a = 1; }  // on every path
"""
HOST = """
int helper(int x) { return x; }
__global__ void e1(float* a) { a[0] = helper(3); }  // marked __device__
"""
LAUNCH = (
    "__global__ void k(int* a) {}\nvoid f(int* a) { k<<<1, 1>>(a); }  // three angle brackets\n"
)
TEMPLATE = """
template <typename T> __global__ void k(T* a) { extern __shared__ T s[]; a[1] = s[0]; }  // one name
template __global__ void k<float>(float*);
template __global__ void k<double>(double*);
"""
SEMICOLON = "__global__ void k(int* a) {\n  int i = 1\n  a[i] = 1;  // semicolon\n}\n"
BRACE = "__global__ void k(int* a) {\n  if (a[0]) {\n    a[0] = 1;\n}\n"
HEADER = "#include <cuda_fp32.h>  // no such header\n"
SHARED = "__global__ void k(int* a) { __shared__ int s[99999]; s[a[0]] = 1; a[1] = s[a[2]]; }\n"
PTX = '__global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
GCC = """#include <cuda_runtime_api.h>
void f(const float* a, float* out) {
  a[0] = 1;  // It is const here
  out[0] = threadidx;  // CUDA spells
  float* p = out[0];  // The types differ
  f(a);  // parameter list
  int64_t i = 0;  // cstdint
  out[1] = 2  // semicolon
}
namespace at { struct Tensor {}; }
void g(const at::Tensor& a) {
  a * 2;  // ATen/TensorOperators.h
}
"""


def compile(tmp_path, source, name="mine.cu", arch="sm_90a"):
    """The messages of a compiler, and the file."""
    file = tmp_path / name
    file.write_text(source)
    command = ["g++", "-c", "-I", str(loader.cuda_home() / "include")]
    if name.endswith(".cu"):
        command = [str(loader.cuda_home() / "bin" / "nvcc"), f"-arch={arch}", "-c"]
    command += [str(file), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    return messages(done.stdout + done.stderr)


try:
    loader.cuda_home()
except loader.ToolchainError as error:
    pytestmark = pytest.mark.skip(reason=f"needs nvcc: {error}")
seen = set()  # the hints that a real compiler called for


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TYPES, "mine.cu"), (CALLS, "mine.cu"), (HOST, "mine.cu"),
        (LAUNCH, "mine.cu"), (TEMPLATE, "mine.cu"), (SEMICOLON, "mine.cu"), (HEADER, "mine.cu"),
        (GCC, "mine.cpp"),
    ],
    ids=["types", "calls", "host", "launch", "template", "semicolon", "header", "gcc"],
)  # fmt: skip
def test_each_mistake_gets_its_help(tmp_path, source, name):
    found = compile(tmp_path, source, name)
    for number, line in enumerate(source.splitlines(), 1):
        if wanted := re.search(r"  // (.*)", line):
            here = [m for m in found if m.line == number]
            hints = [hint(m.text) for m in here]
            assert any(wanted[1] in text for text in hints), (line, here)
            assert all(m.source == line for m in here)
            seen.update(hints)


def test_messages_that_name_no_line(tmp_path):
    (found,) = [m for m in compile(tmp_path, BRACE) if not m.file]
    assert "never closed" in hint(found.text)
    for source, arch, wanted in ((SHARED, "sm_90a", "smaller"), (PTX, "sm_80", "9.0a")):
        found = compile(tmp_path, source, arch=arch)
        hints = [hint(m.text) for m in found]
        assert any(wanted in text for text in hints), found
        seen.update(hints)
    seen.add(hint('expected a "}"'))


def test_the_caret_is_under_the_mistake(tmp_path):
    found = compile(tmp_path, TYPES)
    by_line = {m.line: m for m in found}
    first = by_line[4]
    assert first.source[first.column :].startswith("threadIDx")
    assert str(first).splitlines()[2].index("^") == str(first).splitlines()[1].index("threadIDx")


def test_one_message_a_line_the_one_with_help(tmp_path):
    found = compile(tmp_path, "__global__ void k(__half* a) { a[0] = 1; }\n")
    assert [m.text for m in found] == ['identifier "__half" is undefined']


def test_every_hint_was_called_for():
    if len(seen) < 20:
        pytest.skip("runs after the tests above")
    missing = [text for _, text in COMPILER if text not in seen]
    assert not missing


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in RUNTIME])
def test_runtime_hints(pattern):
    said = {
        "illegal": "CUDA error: an illegal memory access was encountered",
        "misaligned": "CUDA error: misaligned address",
        "invalid": "the launch failed: invalid configuration argument",
        "too many": "the launch failed: too many resources requested for launch",
        "unspecified": "CUDA error: unspecified launch failure",
        "launch timed": "the kernel did not finish in 30 s and was stopped",
        "no kernel": "CUDA error: no kernel image is available for execution on the device",
    }
    text = next(text for start, text in said.items() if pattern.startswith(start))
    assert hint(text, RUNTIME) == dict(RUNTIME)[pattern]
