"""What a rung does, counted on the CPU machine, where no time would mean anything."""

import html
import importlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import loader
from lab import child
from lab.checker import OUTSIDE
from lab.overlay import Files, find
from lab.table import Table

LARGEST = 1 << 16  # elements of the case that is counted: every access is watched
LIMIT = 300  # seconds


@dataclass
class Counters:
    """What each rung did on one case: ``totals[rung]``, and line by line in ``lines[rung]``."""

    op: str
    case: str
    needed: int  # bytes, by the operator's cost()
    totals: dict[str, dict[str, int]]
    lines: dict[str, str]

    def table(self) -> Table:
        """A row for each rung."""
        columns = [
            "",
            "requests",
            "bytes moved",
            "at best",
            "shared wavefronts",
            "at best",
            "barriers",
        ]
        keys = ["global_requests", "global_bytes_moved", "global_bytes_ideal", "shared_wavefronts",
                "shared_wavefronts_ideal", "barriers"]  # fmt: skip
        rows = [[rung, *(f"{t[key]:,}" for key in keys)] for rung, t in self.totals.items()]
        notes = [
            f"{self.needed:,} bytes must move. Requests: of a warp to global memory. At best: if "
            "all that it asks for lay together.",
            "From the CPU machine, which counts and never times.",
        ]
        return Table(f"{self.op}, {self.case}", columns, rows, notes)

    def __str__(self) -> str:
        parts = [f"{rung}, line by line\n{text}" for rung, text in self.lines.items()]
        return "\n\n".join([str(self.table()), *parts])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [
            f"<details><summary>{html.escape(rung)}, line by line</summary>"
            f'<pre style="line-height:1.25">{html.escape(text)}</pre></details>'
            for rung, text in self.lines.items()
        ]
        return "".join([self.table()._repr_html_(), *parts])


def count(op: str, rungs: Sequence[str | int | os.PathLike], *inputs) -> Counters:
    """Count what rungs do on ``inputs``, on the CPU machine, also where there is a GPU.

    Args:
        op: the operator.
        rungs: names, numbers, ideas, or names of cells.
        inputs: the operator's arguments: small tensors of the CPU, as every access is watched.

    Raises:
        child.Failed: the operator or a rung refuses these inputs.
        child.Died: a kernel faulted or hung. This process is unharmed.
    """
    chosen = [find(op, rung) for rung in rungs]
    for files in chosen:  # do they compile?
        loader.load(op, files.kernel, "simt", binding=files.binding, check=True)
    # Not as tensors, which PyTorch would send as memory that both processes share.
    return child.call("lab.counters:run", (op, chosen, pickle.dumps(inputs)), LIMIT)


def run(
    op: str,
    chosen: list[Files],
    pickled: bytes | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Counters:
    """Run each rung once, watched; for None, on the largest case that is quickly watched."""
    module = importlib.import_module(f"ops.{op}")
    if pickled:
        inputs = pickle.loads(pickled)
        tensors = [x for x in inputs if torch.is_tensor(x)]
        name = ", ".join(f"{str(x.dtype)[6:]} {tuple(x.shape)}" for x in tensors)
        return _run(module, op, chosen, name, inputs, progress)
    cases = [case for case in module.cases() if 0 < case.elements <= LARGEST]
    cases.sort(key=lambda case: ("contiguous" in case.name, case.elements), reverse=True)
    for case in cases:
        try:
            return _run(module, op, chosen, case.name, case.inputs("cpu"), progress)
        except RuntimeError as error:
            if OUTSIDE not in str(error):
                raise
    raise ValueError(f"{op}: there is no small case that all of these rungs accept")


def _run(module, op: str, chosen: list[Files], name: str, inputs: tuple, progress) -> Counters:
    found = Counters(op, name, module.cost(*inputs).bytes, {}, {})
    for files in chosen:
        progress(f"{name}, {files.name}")
        kernel = loader.load(op, files.kernel, "simt", binding=files.binding, check=True)
        kernel.simt.reset()
        with torch.no_grad():
            getattr(module, op)(*inputs, kernel=kernel)
        found.totals[files.name] = kernel.simt.totals()
        found.lines[files.name] = str(kernel.simt.table())
    return found
