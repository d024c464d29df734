"""The borders between the layers, and the form of the files, hold for every operator."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loader
from tests.conftest import ROOT

RUNGS = [loader.find_rung(op, rung) for op in loader.ops() for rung in loader.rungs(op)]
BINDINGS = sorted((ROOT / "bindings").glob("*.cpp"))


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", RUNGS, ids=name)
def test_layer_1_knows_no_torch_and_tells_its_story(path):
    text = path.read_text()
    for header in re.findall(r"#include *[<\"](.+?)[>\"]", text):
        assert not re.match(r"torch|ATen|c10|pybind11|Python", header), header
        assert (ROOT / "kernels" / header).suffix != ".cuh", f"{header}: a rung stands alone"
    story = re.match(
        rf"// {re.escape(path.name)}: .+\n(?://.*\n)*?// Before : .+\n(?://.*\n)*?// Idea   : .+\n"
        r"(?://.*\n)*?// Cost   : .+\n(?://.*\n)*?// Result : .+\n(?://.*\n)*?// Try    : .+\n",
        text,
    )
    assert story, "the header is: name and idea, Before, Idea, Cost, Result, Try"
    assert re.search(r"Legal *:", story[0])
    assert len(text.splitlines()) <= 400


@pytest.mark.parametrize("path", BINDINGS, ids=name)
def test_layer_2_starts_no_kernel(path):
    text = path.read_text()
    assert "<<<" not in text
    assert "torch/extension.h" not in text, "it costs 15 seconds a build"
    assert "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)" in text
    assert "CUDAGuard" in text and "getCurrentCUDAStream" in text
    assert len(text.splitlines()) <= 150


@pytest.mark.parametrize("op", loader.ops())
def test_an_operator_is_complete(op):
    assert (ROOT / "bindings" / f"{op}.cpp").exists()
    module = importlib.import_module(f"ops.{op}")
    for wanted in (op, "reference", "cost", "tolerance", "cases", "bench_cases", "baselines"):
        assert callable(getattr(module, wanted)), wanted
        assert getattr(module, wanted).__doc__, wanted
    names = [case.name for case in module.cases()]
    assert len(names) == len(set(names))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert re.search(rf"\b{op}\b", tests)


def launchers(text: str) -> dict[str, list[str]]:
    """The parameter types of each ``cudaError_t <name>_launch…(…)`` that is written out."""
    text = re.sub(r"//[^\n]*|\\\n", "", text)
    text = re.sub(r"##\w+", "__", text)  # launchers that a macro writes, one for each dtype
    found = {}
    for launcher, arguments in re.findall(r"cudaError_t\s+(\w+_launch\w*)\s*\(([^()]*)\)", text):
        types = [re.sub(r"\s*\b\w+$", "", a.strip()) for a in arguments.split(",")]
        found[launcher] = [re.sub(r"\s+", " ", t).replace(" *", "*") for t in types]
    return found


@pytest.mark.parametrize("op", loader.ops())
def test_declarations_and_definitions_are_the_same(op):
    """With extern "C" the linker compares names only: other parameters would be read as garbage."""
    declared = launchers((ROOT / "bindings" / f"{op}.cpp").read_text())
    assert declared
    for path in (loader.find_rung(op, rung) for rung in loader.rungs(op)):
        for launcher, types in launchers(path.read_text()).items():
            assert types == declared.get(launcher, types), f"{name(path)}: {launcher}"


def test_loader_stands_alone():
    text = (ROOT / "loader.py").read_text()
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= set(sys.stdlib_module_names) | {"torch"}


def test_the_project_says_nothing_of_where_it_was_built():
    words = r"(?<!torch)[.]library\b|/(work|farm|root)/"
    command = ["git", "grep", "-nP", words, "--", ".", ":!tests"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == ""


@pytest.mark.skipif(not shutil.which("clang-format", path=str(Path(sys.executable).parent)),
                    reason="needs pip install clang-format")  # fmt: skip
def test_cpp_is_formatted():
    command = [str(Path(sys.executable).with_name("clang-format")), "--dry-run", "--Werror"]
    listed = ["git", "ls-files", "*.cu", "*.cpp", "*.h", ":!tests/simt"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = subprocess.run([*command, *files.split()], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
