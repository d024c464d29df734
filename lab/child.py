"""Run suspect code in a second process, so that what it breaks is not the notebook.

An illegal address ends all GPU work of its process, an endless loop never returns, and on the CPU
a stray pointer kills. ``call()`` keeps one child waiting with PyTorch imported, so that a check
starts at once; a child that was harmed is replaced.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from lab.hints import RUNTIME, hint

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, "-c", "import sys; from lab.child import main; main(sys.argv[1:])"]
START_LIMIT = 300  # seconds to import torch; a busy laptop can take its time
OUTPUT_LIMIT = 5000  # characters of a kernel's printf to show
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Died(RuntimeError):
    """The second process faulted, hung or was killed. The message says which, and when."""


class Failed(RuntimeError):
    """The code in the second process raised an exception, whose text this is."""


class _Child:
    def __init__(self) -> None:
        self.pipe, other = Pipe()
        self.output = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        with open(self.output.name, "ab") as output:
            # A session of its own: Jupyter's interrupt is for the notebook, which ends the child.
            self.process = subprocess.Popen(
                [*PYTHON, str(other.fileno())],
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, env=_environment(),
            )  # fmt: skip
        other.close()
        self.sources = _sources()
        self.ready = False
        self.served: set[str] = set()  # functions

    def usable(self) -> bool:
        return self.process.poll() is None and self.sources == _sources()

    def building(self) -> bool:
        """Does it wait for a compiler? That takes as long as it takes, and ends."""
        with contextlib.suppress(OSError):  # a process that has just ended
            for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
                for pid in children.read_text().split():
                    if Path(f"/proc/{pid}/comm").read_text() == "ninja\n":
                        return True
        return False

    def end(self) -> int:
        """Make sure that it is gone; its exit status."""
        self.pipe.close()
        self.process.kill()
        return self.process.wait()

    def printed(self) -> str:
        """What it has printed since the last time."""
        return self.output.read()


_child: _Child | None = None


def start() -> _Child:
    """The waiting child, started if there is none. Returns at once: it gets ready meanwhile."""
    global _child
    if _child is None or not _child.usable():
        stop()
        _child = _Child()
    return _child


@atexit.register
def stop() -> None:
    """End the waiting child, if there is one."""
    global _child
    if _child is not None:
        _child.end()
    _child = None


def call(function: str, arguments: Sequence, limit: float, unlike: str = ""):
    """``function(*arguments, progress=…)`` in the child; its result.

    Args:
        function: ``"module:name"``. It calls ``progress(step)`` as it goes.
        arguments: what ``pickle`` can carry.
        limit: seconds that one step may take, beside what is compiled in it.
        unlike: a function that this process must not have run before.

    Raises:
        Died: the process did not survive, or a step took too long.
        Failed: the function raised.
    """
    child, step, failure = start(), "", ""
    if unlike in child.served:
        stop()
        child = start()
    child.served.add(function)
    try:
        if not child.ready:
            child.ready = child.pipe.poll(START_LIMIT) and child.pipe.recv()
        child.pipe.send((function, arguments))
        while True:
            if not child.pipe.poll(limit):
                if child.building():
                    continue
                failure = f"did not finish in {limit:g} s and was stopped"
                break
            kind, value, harmed = child.pipe.recv()
            if kind == "step":
                step = value
                continue
            _show(child.printed())
            if harmed:
                stop()
                start()
            if kind == "failed":
                raise Failed(value)
            return value
    except (EOFError, OSError):  # it is gone, or about to be: its own status tells why
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(5)
    except KeyboardInterrupt:
        stop()
        raise
    status = child.end()
    printed = child.printed()
    stop()
    start()
    raise Died(_obituary(failure or _cause(status), step, printed))


def _cause(status: int) -> str:
    if status >= 0:
        return f"ended by itself, with exit status {status}"
    name = signal.Signals(-status).name
    why = {
        "SIGSEGV": ": it used memory that is not its own",
        "SIGBUS": ": it used memory that is not its own",
        "SIGABRT": ": it corrupted memory, or a library gave up",
        "SIGFPE": ": an integer was divided by zero",
        "SIGKILL": ": probably the machine had no memory left",
    }.get(name, "")
    return f"was killed by signal {-status} ({name}){why}"


def _obituary(failure: str, step: str, printed: str) -> str:
    where = f", in {step}" if step else ""
    last = "\n".join(printed.strip().splitlines()[-5:])
    help = f"\nHelp: {hint(failure, RUNTIME)}" if hint(failure, RUNTIME) else ""
    return (
        f"the kernel {failure}{where}.{help}\nIt ran in a second process: this one is unharmed, "
        "correct the kernel and go on." + (f"\nIts last words: {last}" if last else "")
    )


def _show(printed: str) -> None:
    """Pass on what a kernel printed."""
    if len(printed) > OUTPUT_LIMIT:
        printed = f"{printed[:OUTPUT_LIMIT]}\n… {len(printed) - OUTPUT_LIMIT:,} more characters\n"
    print(printed, end="")


def once(tool: Sequence[str], function: str, arguments: Sequence, limit: float, **variables: str):
    """``function(*arguments)`` in a process of its own, started by ``tool`` (say, a profiler).

    Returns its result, or None if it left none, and all that was printed. ``limit`` is for the
    whole, in seconds; ``variables`` go into the environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder, "request"), Path(folder, "reply")
        request.write_bytes(pickle.dumps((function, arguments)))
        command = [*tool, *PYTHON, str(request), str(reply)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True, env=_environment(**variables),
        )  # fmt: skip
        try:
            printed = process.communicate(timeout=limit)[0]
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGKILL)
            printed = process.communicate()[0]
            if isinstance(error, KeyboardInterrupt):
                raise
            failure = f"did not finish in {limit:g} s under {Path(tool[0]).name} and was stopped"
            raise Died(_obituary(failure, "", printed)) from None
        return (pickle.loads(reply.read_bytes()) if reply.exists() else None), printed


def poisoned() -> bool:
    """Has a fault ended all GPU work of this process?"""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def _sources() -> list[tuple[str, int]]:
    """The Python that a child imports: when it changes, a child is out of date."""
    files = [*ROOT.glob("ops/*.py"), *ROOT.glob("lab/*.py"), ROOT / "loader.py"]
    return [(str(path), path.stat().st_mtime_ns) for path in sorted(files)]


def _call(function: str, arguments: Sequence, **options):
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _serve(pipe: Connection) -> None:
    """In the child: answer requests until the notebook is gone, or this process is harmed."""
    # A loop that never ends must not outlive a notebook that was killed.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    importlib.import_module("lab.checker")
    if torch.cuda.is_available():
        torch.cuda.init()
    pipe.send(True)
    harmed = False
    while not harmed:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            value = _call(
                function, arguments, progress=lambda step: pipe.send(("step", step, False))
            )
            kind = "done"
        except Exception as error:
            kind, value = "failed", f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C++ has printed
        harmed = poisoned()
        pipe.send((kind, value, harmed))
    signal.pause()  # until the notebook ends this process: destructors would call CUDA


def main(arguments: Sequence[str]) -> None:
    if len(arguments) == 1:
        _serve(Connection(int(arguments[0])))
    else:
        request, reply = map(Path, arguments)
        reply.write_bytes(pickle.dumps(_call(*pickle.loads(request.read_bytes()))))
