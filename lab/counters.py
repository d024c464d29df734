"""What a rung does, counted on the CPU machine, where no time would mean anything."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import loader
from lab.overlay import Files
from ops.common import Case

LARGEST = 1 << 16  # elements of the case that is counted: every access is watched


@dataclass
class Counters:
    """The counters of each rung on one case: ``data[rung]``, and ``tables[rung]`` for people."""

    op: str
    case: str
    data: dict[str, object]
    tables: dict[str, str]

    def __str__(self) -> str:
        head = f"{self.op}, {self.case}, on the CPU machine, which counts and never times:"
        return "\n\n".join([head, *(f"{rung}\n{table}" for rung, table in self.tables.items())])

    __repr__ = __str__


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
        found.data[files.name] = kernel.simt.counters()
        found.tables[files.name] = str(kernel.simt.table())
    return found


def _case(cases: list[Case]) -> Case:
    contiguous = [case for case in cases if "contiguous" in case.name] or cases
    return max((c for c in contiguous if c.elements <= LARGEST), key=lambda case: case.elements)
