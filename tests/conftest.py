"""Fixtures of all tests. Needs no installation: the repository's root is put on the path."""

import importlib.util
import os
import sys
import uuid
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # each has a core: more threads would wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it; its children read it too

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``. One process has the GPU to itself: some cases fill its memory."""
    return 0 if torch.cuda.is_available() else min(4, os.cpu_count() or 1)


@pytest.fixture
def device() -> str:
    """Where kernels run by default: the GPU, or the CPU machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Project:
    """A folder with a copy of loader.py and an operator ``scale``, as another project would have.

    The binding is plain C and the "kernel" runs on the host, so that building is quick and running
    needs no GPU. The kernel file holds one number, which ``scale.value()`` returns.
    """

    CPP = """
    #include <Python.h>
    #define JOIN_(a, b) a##b
    #define JOIN(a, b) JOIN_(a, b)
    #define TEXT_(a) #a
    #define TEXT(a) TEXT_(a)
    extern "C" int scale_launch();
    static PyObject* value(PyObject*, PyObject*) { return PyLong_FromLong(scale_launch()); }
    static PyMethodDef methods[] = {
        {"value", value, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1,
                                 methods, nullptr, nullptr, nullptr, nullptr};
    PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "loader.py").write_text((ROOT / "loader.py").read_text())
        (folder / "scale.cpp").write_text(self.CPP)
        self.kernel(1)

    def kernel(self, value: object, path: str = "scale.cu", before: str = "") -> Path:
        """Write a kernel file whose launcher returns ``value`` (any C++ expression)."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        body = f'{before}\n__global__ void kernel() {{}}\nextern "C" int scale_launch() '
        file.write_text(body + f"{{ return {value}; }}\n")
        return file

    def loader(self):
        """A fresh import of the project's loader, with nothing remembered."""
        name = f"loader_{uuid.uuid4().hex}"
        spec = importlib.util.spec_from_file_location(name, self.folder / "loader.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of compiled kernels."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "three_layers"


@pytest.fixture
def project(tmp_path, cache) -> Project:
    return Project(tmp_path / "a project")  # the space is on purpose
