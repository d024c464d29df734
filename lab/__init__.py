"""What a notebook does with a loaded operator: show, diff, check, bench, count, profile, recorded.

``%load_ext lab`` adds ``%%kernel`` and ``%%binding``.
"""

from lab.benchmark import BenchError, bench
from lab.checker import CheckError, check
from lab.counters import count
from lab.overlay import load
from lab.profiler import profile
from lab.recorded import recorded
from lab.source import diff, show

__all__ = [
    "BenchError", "CheckError", "bench", "check", "count", "diff", "load", "profile", "recorded",
    "show",
]  # fmt: skip


def load_ipython_extension(shell) -> None:
    """What ``%load_ext lab`` calls."""
    from lab import magic  # late: everything else works without IPython

    magic.load(shell)


def unload_ipython_extension(shell) -> None:
    """What ``%unload_ext lab`` calls."""
    from lab import magic

    magic.unload(shell)
