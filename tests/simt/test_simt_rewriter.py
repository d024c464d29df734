"""The rewriter: hostile formatting, line numbers, refusals at the learner's line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simt_build import ROOT, Builder, names_in, results, toolkit_include

sys.path.insert(0, str(ROOT / "simt"))
from rewrite import RewriteError, rewrite  # noqa: E402

HOSTILE = Path(__file__).with_name("hostile.cu")


@pytest.fixture(scope="module", params=["as it is", "CRLF", "BOM"])
def hostile(request, builder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    text = HOSTILE.read_text()
    if request.param == "CRLF":
        text = text.replace("\n", "\r\n")
    if request.param == "BOM":
        text = "\ufeff" + text
    source = folder / "hostile.cu"
    source.write_bytes(text.encode())
    (folder / "harness.h").write_text(HOSTILE.with_name("harness.h").read_text())
    return results(builder("fast").program(source))


@pytest.mark.parametrize("name", names_in(HOSTILE))
def test_hostile_formatting(hostile, name):
    assert hostile[name] == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "k<<<1,\n 2>>>\n (x,\n y);\nint after;",
        "#define L(k) k<<<1, \\\n 2>>>(x)\nint after;",
        "void f() {\n__shared__ float a[2],\n b[3];\nint after; }",
        "void f() {\nextern __shared__ float\n a[];\nint after; }",
        "k<T, \n 3><<<a, /* \n */ b>>>(x);\nint after;",
        "// k<<<1, 2>>>(x) \\\n still a comment\nint after;",
    ],
)
def test_lines_keep_their_numbers(text):
    lines = rewrite(text, "x.cu").splitlines()[1:]  # behind the #line directive
    assert len(lines) == len(text.splitlines())
    assert [i for i, line in enumerate(lines) if "int after;" in line] == [
        i for i, line in enumerate(text.splitlines()) if "int after;" in line
    ]


@pytest.mark.parametrize(
    "text",
    [
        "int a = b < c; int d = e >> f; x <<= 3; y >>= 2; template <class T, class U> struct S;",
        "std::vector<std::vector<std::vector<int>>> v; cout << 1 << 2;",
        'auto s = R"(k<<<1, 1>>>(x))"; // __shared__ int x;',
        'auto t = u8R"xy(asm("nop") )x" )xy";',
        "const char* c = \"\\\"<<<\"; char d = '\\''; int e = 1'000'000;",
        "it's an apostrophe in /* a ' comment */ and '<' a character",
    ],
)
def test_text_that_is_left_alone(text):
    assert rewrite(text, "x.cu") == f'#line 1 "x.cu"\n{text}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n\nk<<<1, 2;", "x.cu:3: error: this <<< has no >>>"),
        ("k<<<1, 2>>>;", "x.cu:1: error: a launch needs its arguments"),
        ("\n+ <<<1, 2>>>(x);", "x.cu:2: error: what is launched here?"),
        ("k<<<(1, 2>>>(x);", "is never closed"),
        ("\n__shared__ ;", "x.cu:2: error: this __shared__ declaration"),
    ],
)
def test_errors_of_the_rewriter(text, words):
    with pytest.raises(RewriteError, match="x.cu") as error:
        rewrite(text, "x.cu")
    assert words in str(error.value)


def compile_text(folder: Path, text: str, *flags: str) -> subprocess.CompletedProcess:
    source = folder / "kernel.cu"
    source.write_text(text)
    return subprocess.run(
        [sys.executable, "-S", "-E", str(ROOT / "simt" / "cc.py"), "-isystem",
         str(toolkit_include()), *flags, "-MMD", "-MF", str(folder / "deps.d"), "-c", str(source),
         "-o", str(folder / "kernel.o")],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('asm volatile("mov.u32 %0, %laneid;" : "=r"(x));', "inline PTX cannot run"),
        ("cooperative_groups::this_grid().sync();", "grid-wide synchronisation"),
        ("x = tex2D<float>(0, 0, 0);", "textures and surfaces"),
        ("CUtensorMap map;", "TMA descriptors"),
        ("cudaLaunchKernel((void*)0, 1, 1, 0, 0, 0);", "needs the kernel's types"),
        ("cudaGraph_t graph;", "CUDA graphs"),
        ("x = __shfl(x, 31);", "write __shfl_sync, whose first argument is the mask"),
        ("x = __shfl_down(x, 1);", "write __shfl_down_sync"),
        ("x = __shfl_up(x, 1) + __shfl_xor(x, 1);", "write __shfl_up_sync"),
        ("x = __ballot(x);", "write __ballot_sync"),
        ("x = __any(x);", "write __any_sync"),
        ("x = __all(x);", "write __all_sync"),
        ("float big[100000]; big[x] = 1; x = big[x + 1];", "frame size"),
        ("short s; atomicAdd(&s, 1);", "atomicAdd does not exist for this type on a GPU"),
    ],
)
def test_refusals_name_the_line(tmp_path, code, words):
    done = compile_text(
        tmp_path,
        f"#include <cooperative_groups.h>\n__global__ void k(int* p) {{\n  int x = *p;\n  {code}\n"
        "  *p = x;\n}\n",
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert done.stderr.count("error: ") == 1  # and nothing that only follows from it
    line = 6 if words == "frame size" else 4  # of a whole function, at its end
    assert f"kernel.cu:{line}:" in done.stderr


def test_refused_words_may_stand_where_the_cpu_does_not_look(tmp_path):
    done = compile_text(
        tmp_path,
        "#ifndef __SIMT_CPU__\n#include <cuda/barrier>\n"
        '__device__ void f() { asm("nop"); cooperative_groups::this_grid().sync(); }\n#endif\n'
        "__global__ void k(int* p) { *p = 1; }\n",
    )
    assert done.returncode == 0, done.stderr


def test_refused_header_is_named(tmp_path):
    done = compile_text(tmp_path, "\n#include <cuda/barrier>\n")
    assert done.returncode != 0
    assert "kernel.cu:2" in done.stderr
    assert "#ifndef __SIMT_CPU__" in done.stderr


def test_compiler_errors_point_into_the_file(tmp_path):
    done = compile_text(tmp_path, "__global__ void k(int* p) {\n  *p = undeclared;\n}\n")
    assert done.returncode == 1
    assert f"{tmp_path}/kernel.cu:2:8: error:" in done.stderr


def test_a_warning_in_a_template_does_not_show_the_machine(tmp_path):
    done = compile_text(
        tmp_path,
        "template <class T>\n__global__ void k(T* p, int unused) { int forgotten; *p = 1; }\n"
        "void f(float* x, double* y) {\n  k<<<1, 1>>>(x, 1);\n  k<<<1, 1>>>(y, 1);\n}\n",
        "-Wall",
        "-Wextra",
    )
    assert done.returncode == 0, done.stderr
    assert "kernel.cu:2:43: warning: unused variable" in done.stderr
    assert "unused parameter" not in done.stderr
    assert done.stderr.count("required from") <= 6


def test_dependencies_name_the_files_of_the_learner(tmp_path):
    (tmp_path / "own.h").write_text("__device__ inline int own() { return 1; }\n")
    done = compile_text(tmp_path, '#include "own.h"\n__global__ void k(int* p) { *p = own(); }\n')
    assert done.returncode == 0, done.stderr
    deps = (tmp_path / "deps.d").read_text()
    assert f"{tmp_path}/kernel.cu" in deps
    assert f"{tmp_path}/own.h" in deps
    assert "rewritten" not in deps


def test_launches_in_own_headers_are_rewritten(tmp_path, builder: Builder):
    (tmp_path / "launch.cuh").write_text(
        "__global__ void k(int* p) { *p = 1; }\ninline void launch(int* p) { k<<<1, 1>>>(p); }\n"
    )
    done = compile_text(tmp_path, '#include "launch.cuh"\nvoid f(int* p) { launch(p); }\n')
    assert done.returncode == 0, done.stderr
