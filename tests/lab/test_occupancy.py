"""Occupancy by hand, and how a build is shown."""

from pathlib import Path

import pytest

import loader
from lab.magic import build_table
from lab.occupancy import occupancy
from lab.overlay import Files


@pytest.mark.parametrize(
    ("registers", "shared", "arch", "threads", "expected"),
    [
        (32, 0, "sm_90a", 256, 1.0),  # 64 warps of 1024 registers each are all 65536
        (33, 0, "sm_90a", 256, 0.75),  # rounded up to 40: 51 warps, 6 blocks of 8
        (255, 0, "sm_90a", 256, 0.125),  # 8 warps
        (32, 100 * 1024, "sm_90a", 256, 0.25),  # two blocks share 228 KB
        (32, 0, "sm_90a", 32, 0.5),  # 32 blocks at most, of one warp
        (32, 0, "sm_86", 1024, 32 / 48),
        (32, 0, "sm_999", 256, None),
    ],
)
def test_occupancy(registers, shared, arch, threads, expected):
    assert occupancy(registers, shared, arch, threads) == expected


def test_a_build_is_shown_with_what_each_kernel_takes():
    kernel = loader.Kernel("add<float>", "sm_90a", 40, 8, 4, 2048, 0)
    build = loader.Build(
        "vector_add", "mine", "cuda", 1.234, ("mine.cu",), ("vector_add.cpp", "worker.cpp"),
        (kernel,), Path("log"), Path("library"),
    )  # fmt: skip
    text = str(build_table(build, Files("mine", Path("cells/1/mine.cu"), None)))
    assert text.startswith(
        "vector_add/mine: 1.23 s, compiled mine.cu; from the cache: vector_add.cpp\n"
    )
    assert "add<float>         40             12          2048        75%" in text


def test_a_binding_is_shown_without_the_rung_it_was_linked_with():
    """Nobody wrote that rung here, so what it takes would only puzzle."""
    kernel = loader.Kernel("add<float>", "sm_90a", 40, 8, 4, 2048, 0)
    build = loader.Build(
        "vector_add", "2_fast", "cuda", 1.234, ("mine.cpp",), ("2_fast.cu",), (kernel,),
        Path("log"), Path("library"),
    )  # fmt: skip
    mine = Files("mine", Path("kernels/vector_add/2_fast.cu"), Path("cells/1/mine.cpp"))
    assert str(build_table(build, mine)) == (
        "vector_add/mine: 1.23 s, compiled mine.cpp; from the cache: 2_fast.cu"
    )
