"""Builds the programs of this folder: a .cu file with a main(), linked with the CPU machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import simt  # noqa: E402

CXX = os.environ.get("CXX", "g++")  # CXX=clang++ pytest -n 0 tests/simt tries another compiler
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def toolkit_include() -> Path:
    """The folder with CUDA's headers: of pip's packages, or of an installed toolkit."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    headers = [h for place in places for h in place.glob("*/include/cuda_runtime_api.h")]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    for folder in [toolkit, *(h.parent for h in headers)]:
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    raise FileNotFoundError("CUDA's headers are needed: pip install -r requirements.txt")


def run(*command: str, env: dict[str, str] | None = None, timeout: float = 300) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    return done.stdout + done.stderr


class Builder:
    """One way to build: checked or not, and with more flags. Keeps the runtime's objects."""

    def __init__(
        self,
        folder: Path,
        check: bool = False,
        flags: tuple[str, ...] = (),
        kernel_flags: tuple[str, ...] | None = None,
        cxx: str = CXX,
    ) -> None:
        self.folder, self.check, self.flags, self.cxx = folder, check, list(flags), cxx
        self.kernel_flags = list(flags if kernel_flags is None else kernel_flags)
        self.settings = simt.settings(check)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(2) as pool:
            self.objects = list(pool.map(self._runtime_object, self.settings["sources"]))

    def _runtime_object(self, source: str) -> str:
        out = str(self.folder / Path(source).with_suffix(".o").name)
        run(
            self.cxx, "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror",
            *self.settings["cflags"], *self.settings["own_flags"], "-O1", *self.flags,
            "-isystem", str(toolkit_include()), "-c", source, "-o", out,
        )  # fmt: skip
        return out

    def object(self, source: Path, *flags: str) -> Path:
        out = self.folder / (source.stem + "_kernel.o")
        compiler = [
            f"--cxx={self.cxx}" if word.startswith("--cxx=") else word
            for word in self.settings["kernel_compiler"]
        ]
        run(
            *compiler, "-isystem", str(toolkit_include()), "-Wall", "-Wextra", "-Werror",
            *self.kernel_flags, *flags, "-c", str(source), "-o", str(out),
        )  # fmt: skip
        return out

    def program(self, source: Path, *flags: str) -> Path:
        out = self.folder / source.stem
        linked = [*self.flags, "-rdynamic", "-lpthread", "-ldl"]
        run(self.cxx, str(self.object(source, *flags)), *self.objects, *linked, "-o", str(out))
        return out


def results(
    program: Path, env: dict[str, str] | None = None, name: str | None = None
) -> dict[str, str]:
    """What each TEST of a program (or one of them) said: "ok", or what was wrong."""
    output = run(str(program), *([name] if name else []), env=env)
    parts = re.split(r"^== (\w+): ", output, flags=re.M)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def names_in(source: Path) -> list[str]:
    return re.findall(r"^TEST\((\w+)\)", source.read_text(), flags=re.M)
