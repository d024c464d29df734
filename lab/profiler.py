"""Why is a rung as fast as it is? A handful of hardware counters, with a sentence on each."""

import csv
import importlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import loader
from lab import child
from lab.counters import Counters
from lab.overlay import Files, find
from lab.table import Table

COUNTERS = {  # Nsight Compute's name → what people call it, and what it tells
    "gpu__time_duration.sum": ("time", "under the profiler; bench() measures it undisturbed"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": (
        "memory throughput", "near 90 %: nothing but moving fewer bytes helps"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": (
        "arithmetic throughput", "near 90 %: the busiest unit of the SMs is the limit"),
    "l1tex__t_sector_hit_rate.pct": (
        "L1 hits", "data that threads of one SM share, or touch twice"),
    "lts__t_sector_hit_rate.pct": (
        "L2 hits", "data that did not come from memory; writes count as hits"),
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio": (
        "sectors a load", "32-byte pieces a warp's load touches: 4 for float, 16 for float4; more "
        "means scattered addresses"),
    "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio": (
        "sectors a store", "the same for stores"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": (
        "bank conflicts", "extra turns because lanes of a warp met in one bank of shared memory"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": (
        "occupancy", "share of the warps an SM can hold that were there; it hides waiting"),
    "launch__registers_per_thread": ("registers", "a thread; they limit occupancy"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": (
        "Tensor Cores", "share of cycles in which they worked"),
}  # fmt: skip


class ProfileError(RuntimeError):
    """Nsight Compute could not measure. The message says why, and what to do."""


@dataclass
class Profile:
    """What Nsight Compute counted: for each kernel, its name and {counter: (value, unit)}."""

    op: str
    rung: str
    case: str
    kernels: list[tuple[str, dict[str, tuple[str, str]]]]

    def tables(self) -> list[Table]:
        found = []
        for name, values in self.kernels:
            rows = []
            for key, (label, tells) in COUNTERS.items():
                value, unit = values.get(key, ("n/a", ""))
                if value != "n/a":
                    rows.append([label, f"{value} {unit}".strip(), tells])
            title = f"{self.op}/{self.rung}, {self.case}: {name}"
            found.append(Table(title, ["counter", "value", "what it tells"], rows))
        return found

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())


def profile(
    op: str,
    rung: str | int | os.PathLike | None = None,
    case: str | None = None,
    *,
    limit: float = 300,
) -> Profile | Counters:
    """Count what one call of a rung does, on the case of that name from ``bench_cases()``.

    Without a GPU or without ``ncu`` the CPU machine counts instead, on a small case.

    Raises:
        ProfileError: ``ncu`` is there and may not, or cannot, read the counters.
    """
    files = find(op, rung)
    program = _ncu()
    if not program or not torch.cuda.is_available():
        loader.load(op, files.kernel, "simt", binding=files.binding, check=True)
        return child.call("lab.counters:run", (op, [files]), limit)
    loader.load(op, files.kernel, binding=files.binding)
    names = [known.name for known in importlib.import_module(f"ops.{op}").bench_cases()]
    wanted = case or names[0]
    if wanted not in names:
        raise ValueError(f"{op} has no case {wanted!r}; there is: {'; '.join(names)}")
    command = [
        program, "--csv", "--metrics", ",".join(COUNTERS), "--profile-from-start", "off",
        "--target-processes", "all", "--clock-control", "none",
    ]  # fmt: skip
    _, printed = child.once(command, "lab.profiler:run", (op, files, wanted), limit)
    kernels = parse(printed)
    if not kernels:
        raise ProfileError(_why(printed))
    return Profile(op, files.name, wanted, kernels)


def run(op: str, files: Files, wanted: str) -> None:
    """In the profiled process: one call, with the profiler on."""
    module = importlib.import_module(f"ops.{op}")
    kernel = loader.load(op, files.kernel, binding=files.binding)
    inputs = next(case for case in module.bench_cases() if case.name == wanted).inputs("cuda")
    function = getattr(module, op)
    with torch.no_grad():
        function(*inputs, kernel=kernel)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        function(*inputs, kernel=kernel)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def parse(printed: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """The kernels in ``ncu --csv`` output, in order, and their counters."""
    lines = printed.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        _, counters = found.setdefault(row["ID"], (_short(row["Kernel Name"]), {}))
        counters[row["Metric Name"]] = row["Metric Value"], row["Metric Unit"]
    return list(found.values())


def _short(name: str) -> str:
    return name.split("(")[0].removeprefix("void ")


def _why(printed: str) -> str:
    if "ERR_NVGPUCTRPERM" in printed:
        return (
            "this user may not read the GPU's counters. An administrator can allow it (NVIDIA's "
            "page on ERR_NVGPUCTRPERM), or start Jupyter as root."
        )
    said: Sequence[str] = [line for line in printed.splitlines() if line.startswith("==")]
    return "ncu measured no kernel. It said:\n" + "\n".join([*said, *printed.splitlines()[-5:]])


def _ncu() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [shutil.which("ncu"), f"{home}/bin/ncu"]
    return next((place for place in places if place and Path(place).exists()), None)
