"""A bad kernel costs nothing but its own process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab import child

SUSPECTS = "tests.lab.suspects"


@pytest.fixture(autouse=True, scope="module")
def no_child_left():
    yield
    child.stop()


def call(name, *arguments, limit=30):
    return child.call(f"{SUSPECTS}:{name}", arguments, limit)


def test_results_come_back_and_prints_are_passed_on(capsys):
    assert call("answer", 41)[0] == 42
    assert capsys.readouterr().out == "a kernel's printf\n"


def test_a_healthy_child_serves_again_and_quickly():
    _, first = call("answer", 1)
    start = time.perf_counter()
    assert call("answer", 1) == (2, first)
    assert time.perf_counter() - start < 1
    assert first != os.getpid()


def test_what_must_not_have_run_before_gets_a_new_child():
    _, first = call("answer", 1)
    other = child.call(f"{SUSPECTS}:answer", (1,), 30, unlike=f"{SUSPECTS}:never")[1]
    fresh = child.call(f"{SUSPECTS}:answer", (1,), 30, unlike=f"{SUSPECTS}:answer")[1]
    assert first == other != fresh == call("answer", 1)[1]


def test_an_exception_comes_back_as_its_text():
    with pytest.raises(child.Failed, match="ValueError: not that"):
        call("raises")


def test_a_build_may_take_longer_than_a_kernel(tmp_path):
    call("answer", 1)
    for name in ("ninja", "other"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 2\n")
        (tmp_path / name).chmod(0o755)
    assert call("builds", str(tmp_path / "ninja"), limit=0.5) == "built"
    with pytest.raises(child.Died, match="did not finish in 0.5 s"):
        call("builds", str(tmp_path / "other"), limit=0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("segfaults", r"killed by signal 11 \(SIGSEGV\): it used memory that is not.*in case 7\."),
        ("hangs", r"did not finish in 0.5 s and was stopped, in case 8\."),
        ("aborts", r"killed by signal 6 \(SIGABRT\)"),
        ("exits", r"ended by itself, with exit status 3"),
    ],
)
def test_what_happened_is_said_and_the_next_call_works(name, message):
    call("answer", 1)
    with pytest.raises(child.Died, match=message) as info:
        call(name, limit=0.5 if name == "hangs" else 30)
    assert "this one is unharmed" in str(info.value)
    assert call("answer", 1)[0] == 2


def test_an_interrupt_ends_the_child(monkeypatch):
    victim = call("answer", 1)[1]
    poll = child._child.pipe.poll

    def interrupted(limit):
        poll(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(child._child.pipe, "poll", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        call("hangs")
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)


def test_the_child_dies_with_a_notebook_that_is_killed():
    script = (
        "from lab import child; import time\n"
        f"print(child.call('{SUSPECTS}:answer', (1,), 60)[1], flush=True); time.sleep(60)"
    )
    notebook = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=child._environment()
    )
    notebook.stdout.readline()  # its child's print
    victim = int(notebook.stdout.readline())
    notebook.send_signal(signal.SIGKILL)
    notebook.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if ") Z " in Path(f"/proc/{victim}/stat").read_text():  # dead, and nobody waits for it
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its notebook")


def test_edited_python_gets_a_new_child(monkeypatch):
    first = call("answer", 1)[1]
    monkeypatch.setattr(child, "_sources", lambda: [("ops/edited.py", 1)])
    assert call("answer", 1)[1] != first


def test_once_runs_under_a_tool():
    assert child.once(["env"], f"{SUSPECTS}:once", (21,), 60) == (42, "working\n")
    with pytest.raises(child.Died, match="did not finish in 0.5 s under env"):
        child.once(["env"], f"{SUSPECTS}:once_hangs", (), 0.5)
