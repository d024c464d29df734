"""The ways in which the test programs are built, each once in a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from simt_build import SANITIZE, Builder


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Builder]:
    folder = tmp_path_factory.mktemp("simt")

    @functools.cache
    def make(way: str) -> Builder:
        where = folder / way
        if way == "sanitized":
            # The sanitizers watch the kernels too, which are compiled with them, not for the
            # checker.
            return Builder(where, flags=tuple(SANITIZE))
        if way == "sanitized_checker":
            # The checker is itself what a sanitizer would put into a kernel: only the runtime.
            return Builder(where, check=True, flags=tuple(SANITIZE), kernel_flags=())
        if way == "ucontext":
            return Builder(where, flags=("-DSIMT_UCONTEXT",))
        return Builder(where, check=way == "checked")

    return make


@pytest.fixture(scope="session")
def program(builder: Callable[[str], Builder]) -> Callable[[str, str], Path]:
    """A program of this folder, built in one of the ways."""

    @functools.cache
    def make(name: str, way: str) -> Path:
        return builder(way).program(Path(__file__).with_name(name))

    return make
