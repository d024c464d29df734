"""Every planted bug is found, at its line, in words that help."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from simt_build import CXX, names_in, results

BUGS = Path(__file__).with_name("bugs.cu")
CLANG = "clang" in CXX  # which shows the elements of a float4, not one access of 16 bytes
SOURCE = BUGS.read_text().splitlines()
# No block has run, and the message itself says what is allowed.
REFUSED_LAUNCHES = ("too_many_threads", "empty_grid", "grid_y", "block_z", "no_opt_in")


def lines_of(name: str) -> list[int]:
    """The lines that are marked as those of a bug."""
    return [i for i, line in enumerate(SOURCE, 1) if re.search(rf"// <- {name}\b", line)]


def words_of(name: str) -> list[str]:
    line = next(line for line in SOURCE if line.startswith(f"TEST({name})"))
    words = [words.strip() for words in line.split("// finds: ")[1].split(" | ")]
    return [part for part in words if not (CLANG and "16 bytes" in part)]


@pytest.fixture(scope="module")
def found(program):
    def run(name: str | None, way: str) -> dict[str, str]:
        return results(program("bugs.cu", way), {"SIMT_WATCHDOG": "3"}, name)

    return functools.cache(run)


def test_there_are_enough():
    assert len(names_in(BUGS)) >= 30


@pytest.mark.parametrize("name", names_in(BUGS))
def test_bug_is_found(found, name):
    if CLANG and name == "misaligned_float4":
        pytest.skip("with clang the checker does not see that the access is a wide one")
    message = found(None, "checked")[name]
    for line in lines_of(name):
        assert f"bugs.cu:{line}" in message
    for words in words_of(name):
        assert words in message
    assert "block (" in message and "Next: " in message or name in REFUSED_LAUNCHES
    assert "launch of" in message


@pytest.mark.parametrize(
    "name",
    ["null_pointer", "two_barriers", "barrier_or_shuffle", "short_warp", "not_in_its_mask",
     "spin_forever", "waits_for_a_waiter", "endless_recursion", "failed_assert", "no_opt_in",
     "too_much_static"],
)  # fmt: skip
def test_what_the_fast_mode_finds_too(found, name):
    # One to a process: without the checker other bugs do corrupt memory.
    message = found(name, "fast")[name]
    assert message != "ok"
    if name not in ("null_pointer", "endless_recursion"):
        for line in lines_of(name):
            assert f"bugs.cu:{line}" in message


def test_division_by_zero_does_not_kill_the_process(found):
    message = found("division_by_zero", "fast")["division_by_zero"]
    assert "divides an integer by zero" in message
