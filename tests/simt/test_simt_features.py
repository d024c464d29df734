"""Each feature of the language, in each mode of the machine."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from simt_build import names_in, results

FEATURES = Path(__file__).with_name("features.cu")
SILENT = Path(__file__).with_name("silent.cu")

MODES = {
    "fast": ("fast", {}),
    "checked": ("checked", {"SIMT_WATCHDOG": "5"}),  # spinning must not wait for the nudge
    "reversed": ("fast", {"SIMT_ORDER": "reverse"}),
    "shuffled": ("checked", {"SIMT_ORDER": "shuffle"}),
    "one_host_thread": ("fast", {"SIMT_THREADS": "1"}),
    "many_host_threads": ("fast", {"SIMT_THREADS": "9"}),
    "ucontext": ("ucontext", {}),
    "sanitized": ("sanitized", {}),
    "sanitized_checker": ("sanitized_checker", {}),
}


# Fibers that are left for good after a fault look like leaks to AddressSanitizer. And from g++ 13
# on it puts variables on a stack of its own, which it cannot do in a signal handler (the nudge)
# that interrupts it while it is making that stack.
ASAN_OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0"


@pytest.fixture(scope="module")
def outcome(program):
    """The results of all tests of a program in one mode: it runs once."""

    @functools.cache
    def of(source: str, mode: str) -> dict[str, str]:
        way, env = MODES[mode]
        return results(program(source, way), {**env, "ASAN_OPTIONS": ASAN_OPTIONS})

    return of


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", names_in(FEATURES))
def test_feature(outcome, name, mode):
    said, *printed = outcome("features.cu", mode)[name].split("\n")
    assert said == "ok", "\n".join([said, *printed])


def test_printf(outcome):
    # As on a GPU the text appears when the launch is over.
    assert "hello from thread 0" in " ".join(outcome("features.cu", "fast").values())


@pytest.mark.parametrize("mode", ["checked", "shuffled", "fast", "reversed", "sanitized_checker"])
@pytest.mark.parametrize("name", names_in(SILENT))
def test_correct_kernel_raises_no_alarm(outcome, name, mode):
    assert outcome("silent.cu", mode)[name] == "ok"
