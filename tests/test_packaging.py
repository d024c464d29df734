"""packaging/: an sdist, built and installed by pip into an empty folder, imported from there."""

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import torch

import loader
from ops import common
from ops import installed as builds
from ops.vector_add import vector_add
from tests.conftest import ROOT, needs_gpu

OPS = "vector_add", "transpose", "softmax_backward"
MODULES = (*OPS, "softmax_backward_3_short_rows")  # of that one, two rungs are in use


def run(*command: object, **variables: str) -> str:
    """A command in a clean environment: nothing of the repository on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["THREE_LAYERS_OPS"] = ",".join(OPS)
    if not torch.cuda.is_available():
        environment["TORCH_CUDA_ARCH_LIST"] = "9.0"
    done = subprocess.run(
        [str(part) for part in command], cwd="/", env=environment | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "packaging"  # sdist makes a folder beside setup.py, in each worker at once
    shutil.copytree(ROOT / "packaging", copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(sys.executable, copy / "setup.py", "-q", "egg_info", "--egg-base", folder,
        "sdist", "--dist-dir", folder)  # fmt: skip
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def site(sdist, tmp_path_factory) -> Path:
    """The folder into which pip installed it."""
    folder = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index",
        "--no-cache-dir", "--target", folder, sdist)  # fmt: skip
    return folder


def test_the_sdist_is_complete_and_holds_files_not_links(sdist):
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive.getmembers() if not m.isdir()}
    assert all(member.isfile() for member in members.values())
    wanted = [loader.find_rung(op, rung) for op in loader.ops() for rung in loader.rungs(op)]
    wanted += [loader.find_binding(op) for op in loader.ops()] + [ROOT / "loader.py"]
    assert {str(path.relative_to(ROOT)) for path in wanted} <= set(members)


SCRIPT = """
import json, three_layers, torch
from three_layers import transpose, vector_add
said = []
for call in (lambda x: vector_add.vector_add(x, x), transpose.transpose):
    try:
        call(torch.zeros(2, 2))
    except RuntimeError as error:
        said.append(str(error).partition("\\n")[0])
right = []
if torch.cuda.is_available():
    a, b = torch.randn(2, 1000, 33, device="cuda")
    right.append(torch.allclose(vector_add.vector_add(a, b), torch.add(a, b)))
    right.append(torch.equal(transpose.transpose(a), a.t()))
print(json.dumps([vector_add.__file__, three_layers.BUILT, said, right]))
"""


def test_it_runs_where_there_is_neither_the_repository_nor_a_compiler(site):
    output = run(sys.executable, "-c", SCRIPT, PYTHONPATH=str(site), PATH="/nowhere")
    file, built, said, right = json.loads(output.splitlines()[-1])
    assert Path(file).parent == site / "three_layers"
    assert set(built) == set(MODULES) and built["vector_add"]["torch"] == torch.__version__
    assert [message.partition(" on a CUDA device, got cpu")[1] != "" for message in said] == [1, 1]
    assert right == [True, True] * torch.cuda.is_available()


def test_modules_keep_their_launchers_to_themselves(site):
    for op in MODULES:
        (library,) = site.glob(f"three_layers/{op}.*.so")
        symbols = run("nm", "-D", "--defined-only", library)
        assert f"PyInit_{op}" in symbols
        assert symbols.count("PyInit_") == 1
        assert "_launch" not in symbols  # hidden: no other library can call it, or be called
        assert "SYMBOLIC" in run("readelf", "-d", library)


def test_the_wheel_is_for_one_torch(site):
    metadata = next(site.glob("three_layers-*.dist-info/METADATA")).read_text()
    assert f"Requires-Dist: torch=={torch.__version__.partition('+')[0]}\n" in metadata


@pytest.fixture
def package(site, monkeypatch):
    """The installed package, imported here, as on a machine that has a GPU."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(loader, "default_backend", lambda: "cuda")
    common.last_rung.cache_clear()
    yield importlib.import_module("three_layers")
    common.last_rung.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "three_layers"]:
        del sys.modules[name]


def test_ops_prefer_what_is_installed(site, package):
    module = common.last_rung("vector_add")
    assert Path(module.__file__).parent == site / "three_layers"
    built_here = loader.load("vector_add", backend="cuda")  # side by side with it
    for each in (module, built_here):
        with pytest.raises(RuntimeError, match="a must be on a CUDA device, got cpu"):
            each.vector_add(torch.zeros(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="a must be on a CUDA device, got cpu"):
        vector_add(torch.zeros(4), torch.zeros(4))
    assert builds.installed("vector_add", "1_naive") is None  # another rung than was packaged
    assert builds.installed("reduce_sum") is None  # not among those packaged


def test_each_rung_in_use_is_a_module_of_its_own(site, package):
    files = {Path(common.last_rung("softmax_backward", rung).__file__) for rung in
             ("3_short_rows", "4_any_row")}  # fmt: skip
    assert {path.name.partition(".")[0] for path in files} == set(MODULES[2:])
    assert {path.parent for path in files} == {site / "three_layers"}


@needs_gpu
def test_ops_run_what_is_installed(package):
    a = torch.randn(1000, device="cuda", requires_grad=True)
    out = vector_add(a, a)
    assert torch.allclose(out, torch.add(a, a))
    out.sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 2))


@pytest.mark.parametrize("op", loader.ops())
def test_every_rung_that_ops_may_choose_is_packaged(op):
    constants = vars(importlib.import_module(f"ops.{op}"))
    chosen = {value for name, value in constants.items() if name.isupper() and name != "ON_CPU"
              and isinstance(value, str) and value in loader.rungs(op)}  # fmt: skip
    listed = re.search(
        r"^RUNGS = (\{.*?^\})", (ROOT / "packaging/setup.py").read_text(), re.M | re.S
    )
    packaged = ast.literal_eval(listed[1]).get(op, loader.rungs(op)[-1:])
    assert chosen <= set(packaged) <= set(loader.rungs(op))
    source = inspect.getsource(importlib.import_module(f"ops.{op}"))
    if f'last_rung("{op}")' in source:
        assert loader.rungs(op)[-1] in packaged


def test_the_cpu_machine_is_not_replaced(package, monkeypatch):
    monkeypatch.setattr(loader, "default_backend", lambda: "simt")
    monkeypatch.setattr(loader, "load", lambda op, rung: "built here")
    assert common.last_rung("vector_add") == "built here"


def test_a_build_of_other_sources_is_not_used(package, monkeypatch, tmp_path):
    edited = tmp_path / "vector_add.cpp"
    edited.write_text(loader.find_binding("vector_add").read_text() + "// edited\n")
    monkeypatch.setattr(loader, "find_binding", lambda op: edited)
    with pytest.warns(UserWarning, match="another 3_vectorized.cu or vector_add.cpp than"):
        assert builds.installed("vector_add") is None
    monkeypatch.setattr(loader, "load", lambda op, rung: "built here")
    with pytest.warns(UserWarning, match="Install it again"):
        assert common.last_rung("vector_add") == "built here"
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        common.last_rung("vector_add")


def test_a_build_for_another_torch_is_not_used(package, monkeypatch):
    monkeypatch.setitem(package.BUILT["vector_add"], "torch", "2.0.0")
    with pytest.warns(UserWarning, match=rf"for torch 2.0.0, and this is {torch.__version__[:4]}"):
        assert builds.installed("vector_add") is None


def test_a_build_for_another_gpu_is_not_used(package, monkeypatch):
    monkeypatch.setitem(package.BUILT["vector_add"], "arch", ["sm_80", "sm_90a"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with pytest.warns(UserWarning, match="for sm_80, sm_90a, and this GPU is sm_120"):
        assert builds.installed("vector_add") is None


def test_a_hopper_rung_that_was_built_without_its_code_is_not_used(package, monkeypatch):
    kernel, binding = loader.find_rung("matmul_tc", "10_epilogue"), loader.find_binding("matmul_tc")
    text = kernel.read_bytes() + binding.read_bytes()
    built = {"rung": kernel.stem, "sources": hashlib.sha256(text).hexdigest(),
             "torch": torch.__version__, "arch": ["sm_80", "sm_90", "compute_90"]}  # fmt: skip
    monkeypatch.setitem(package.BUILT, f"matmul_tc_{kernel.stem}", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.warns(UserWarning, match="10_epilogue needs sm_90a"):
        assert builds.installed("matmul_tc", kernel.stem) is None


@pytest.mark.parametrize(
    ("gpu", "arch", "runs"),
    [
        ((8, 0), "sm_80", True), ((8, 9), "sm_80", True), ((8, 0), "sm_86", False),
        ((9, 0), "sm_80", False), ((9, 0), "compute_80", True), ((9, 0), "sm_90a", True),
        ((10, 0), "compute_90a", False), ((10, 0), "compute_90", True), ((12, 1), "sm_120", True),
    ],
)  # fmt: skip
def test_which_gpu_runs_what(gpu, arch, runs):
    assert builds.runs_on(gpu, arch) == runs


@pytest.mark.skipif(importlib.util.find_spec("three_layers") is not None, reason="is installed")
def test_without_the_package_the_loader_builds():
    assert builds.installed("vector_add") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers the question")
@pytest.mark.parametrize("setup", ["setup.py", "stable/setup.py"])
def test_what_to_build_for_must_be_said(setup, tmp_path):
    command = [sys.executable, ROOT / "packaging" / setup, "build_ext", "--build-lib", tmp_path]
    with pytest.raises(AssertionError, match="set TORCH_CUDA_ARCH_LIST"):
        run(*command, "--build-temp", tmp_path, TORCH_CUDA_ARCH_LIST="")


def test_packaging_does_not_hide_the_package_of_that_name():
    """The repository's root is on sys.path, and there is a well-known package ``packaging``."""
    assert not (ROOT / "packaging" / "__init__.py").exists()
    for link in ("kernels", "bindings", "loader.py", "stable/kernels", "stable/loader.py"):
        assert (ROOT / "packaging" / link).is_symlink(), f"{link} is a copy"


STABLE = """
import torch, three_layers_stable
try:
    three_layers_stable.vector_add(torch.zeros(4), torch.zeros(4))
except NotImplementedError as error:
    print(str(error).partition(". ")[0])
add = torch.ops.three_layers_stable.vector_add.default
try:  # as if these were on a GPU: the exception has to cross from this binary into torch
    add._op_dk(torch._C.DispatchKey.CUDA, torch.zeros(4), torch.zeros(4))
except RuntimeError as error:
    print(str(error).partition(": ")[2])
if torch.cuda.is_available():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        a, b = torch.randn(2, 1001, device="cuda").to(dtype)
        assert torch.equal(three_layers_stable.vector_add(a, b), torch.add(a, b)), dtype
        try:
            three_layers_stable.vector_add(a, b[1:])
            assert False
        except RuntimeError as error:
            assert "one shape" in str(error)
"""


def test_the_stable_abi_needs_no_cpp_of_torch(tmp_path):
    """What is undefined in it are plain C functions, so another version of torch has them too."""
    build = [ROOT / "packaging/stable/setup.py", "build", "--build-base", tmp_path]
    run(sys.executable, *build, LDFLAGS="-static-libstdc++ -static-libgcc")  # the worst case
    (library,) = tmp_path.glob("lib*/three_layers_stable/_C.abi3.so")
    undefined = run("nm", "-uC", library)
    assert "aoti_torch_get_current_cuda_stream" in undefined
    assert not re.findall(r".*\b(?:at|c10|torch|pybind11)::.*|.* Py\w+", undefined)
    said = run(sys.executable, "-c", STABLE, PYTHONPATH=str(library.parents[1]))
    assert "Could not run 'three_layers_stable::vector_add'" in said
    assert "must be on one CUDA device" in said
