"""What a rung does, counted on the CPU machine, where no time would mean anything."""

import html
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import loader
from lab.overlay import Files
from lab.table import Table
from ops.common import Case

LARGEST = 1 << 16  # elements of the case that is counted: every access is watched


@dataclass
class Counters:
    """What each rung did on one case: ``totals[rung]``, and line by line in ``lines[rung]``."""

    op: str
    case: str
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
        title = f"{self.op}, {self.case}, on the CPU machine, which counts and never times"
        note = (
            "Requests: of a warp to global memory. At best: if all that it asks for lay together."
        )
        return Table(title, columns, rows, [note])

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


def count(
    op: str, chosen: list[Files], progress: Callable[[str], None] = lambda step: None
) -> Counters:
    """Run each rung once, watched, on the largest case that the CPU machine can watch quickly."""
    module = importlib.import_module(f"ops.{op}")
    case = _case(module.cases())
    inputs = case.inputs("cpu")
    found = Counters(op, case.name, {}, {})
    for files in chosen:
        progress(f"{case.name}, {files.name}")
        kernel = loader.load(op, files.kernel, "simt", binding=files.binding, check=True)
        kernel.simt.reset()
        with torch.no_grad():
            getattr(module, op)(*inputs, kernel=kernel)
        found.totals[files.name] = kernel.simt.totals()
        found.lines[files.name] = str(kernel.simt.table())
    return found


def _case(cases: list[Case]) -> Case:
    contiguous = [case for case in cases if "contiguous" in case.name] or cases
    return max((c for c in contiguous if c.elements <= LARGEST), key=lambda case: case.elements)
