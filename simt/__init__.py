"""The CPU machine: runs the unchanged ``kernels/*.cu`` without a GPU, and debugs them.

``loader.load(op, rung, backend="simt")`` uses two functions of this module: ``settings`` says how
to build a rung, ``attach`` completes what was built. Everything else is reached through the
``simt`` attribute that ``attach`` gives to the loaded module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("*.py", "*.map", "runtime/*", "shim/**/*.h", "include/**/*")

CHECKER = ("hooks.cpp", "memory.cpp", "races.cpp", "counters.cpp")  # only in a checked build


def settings(check: bool = False) -> dict:
    """How to build for the CPU machine, in the words of ``torch.utils.cpp_extension``.

    ``check`` chooses the debugger: the same kernels, every load and store watched.
    """
    cxx = next(filter(shutil.which, (os.environ.get("CXX") or "g++", "c++", "clang++")), "g++")
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    return {
        "kernel_compiler": [
            sys.executable, "-S", "-E", str(HERE / "cc.py"), f"--cxx={cxx}",
            *(["--check"] if check else []),
        ],
        "sources": [str(path) for path in sources if check or path.name not in CHECKER],
        "include_paths": [str(HERE / "shim")],
        "cflags": ["-g1", "-fvisibility=hidden"],
        "own_flags": ["-O2", *["-DSIMT_CHECK"] * check],  # for `sources`, not the binding
        "ldflags": [f"-Wl,--version-script={HERE / 'exports.map'}", "-lpthread", "-ldl"],
        "identity": _content(),
    }  # fmt: skip


@functools.cache
def _content() -> str:
    """Stands for everything in this folder that has an effect on what is built."""
    hasher = hashlib.sha256()
    for path in sorted({p for part in PARTS for p in HERE.glob(part) if p.is_file()}):
        hasher.update(f"{path.relative_to(HERE)} {path.stat().st_size} ".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:24]


def attach(module: types.ModuleType, check: bool = False) -> types.ModuleType:
    """Completes a module that was built with ``settings(check)``, and returns it."""
    from .machine import attach  # late: it needs torch, which `import simt` should not

    return attach(module, check)
