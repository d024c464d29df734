"""How fast is a rung, next to the other rungs, to PyTorch, and to what this GPU can do?

How the times come about is said in ``timing.py``, the ceilings in ``ceilings.py``. A rate is the
operator's ``cost()``, the least that must be moved and done, over the time: work that a rung does
in vain does not count. After timing, every result is compared with the reference again.

TF32 is off, for PyTorch too, and cuDNN chooses its fastest algorithm.
"""

import datetime
import functools
import importlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import loader
from lab import child, counters
from lab.ceilings import MARGIN, ceilings
from lab.checker import as_tuple
from lab.compare import differences
from lab.counters import Counters
from lab.overlay import Files, find, relabel
from lab.table import Table
from lab.timing import Timing, rotation, side_by_side
from ops.common import Case

READ_ONLY = 0.1  # outputs under this share of the inputs: compare with the read ceiling


class BenchError(RuntimeError):
    """A figure cannot be believed: a wrong result, or faster than the GPU. ``report`` has all."""

    def __init__(self, report: "BenchReport"):
        super().__init__(f"{report.problems()}\n\n{report}")
        self.report = report


@dataclass
class Row:
    """One arm on one case. Times in seconds; ``call`` is that of an eager call, None if long."""

    case: str
    arm: str
    is_rung: bool
    median: float
    low: float
    high: float
    call: float | None
    bytes: int
    flops: int
    ceiling: str  # what bounds it: "copy", "read" or "matmul <dtype>"
    share: float | None  # of that ceiling; None where the data stay in the cache
    error: float  # ‖out − reference‖ / ‖reference‖
    problem: str = ""

    def rate(self) -> float:
        """Bytes a second, or FLOP a second where that is what bounds it."""
        return (self.flops if self.ceiling.startswith("matmul") else self.bytes) / self.median

    def rate_text(self) -> str:
        if self.ceiling.startswith("matmul"):
            return f"{self.rate() / 1e12:.1f} TFLOP/s"
        return f"{self.rate() / 1e9:.0f} GB/s"


@dataclass
class BenchReport:
    """What ``bench`` measured: ``rows``, the ``ceilings`` and the ``machine``."""

    op: str
    machine: dict[str, str]
    ceilings: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    measured_again: bool = False  # the ceilings

    def cases(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def having(self, case: str) -> list[Row]:
        return [row for row in self.rows if row.case == case]

    def problems(self) -> str:
        return "\n".join(f"{r.case}, {r.arm}: {r.problem}" for r in self.rows if r.problem)

    def tables(self) -> list[Table]:
        return [self._table(case) for case in self.cases()]

    def _table(self, case: str) -> Table:
        rows, called = self.having(case), any(row.call for row in self.having(case))
        eager = next((row.median for row in rows if row.arm == "eager"), None)
        columns = ["", "µs", "± %", "rate", "of ceiling", *(["x eager"] if eager else [])]
        columns += ["µs a call"] if called else []
        lines = []
        for row in rows:
            spread = (row.high - row.low) / 2 / row.median
            share = "in cache" if row.share is None else f"{row.share:.0%}"
            line = [row.arm, f"{row.median * 1e6:.2f}", f"{spread:.1%}".rstrip("%")]
            line += [row.rate_text(), "ERROR" if row.problem else share]
            line += [f"{eager / row.median:.2f}"] if eager else []
            line += [f"{row.call * 1e6:.1f}" if row.call else "–"] if called else []
            lines.append(line)
        name = rows[0].ceiling
        unit = "TFLOP/s" if name.startswith("matmul") else "GB/s"
        top = self.ceilings[name] / (1e12 if unit == "TFLOP/s" else 1e9)
        notes = [f"Ceiling: {name}, {top:.0f} {unit}, measured on the same {self.machine['gpu']}."]
        if called:
            notes.append(
                "µs: replayed from a CUDA graph; µs a call: from Python, one after another."
            )
        notes += [f"{row.arm}: {row.problem}" for row in rows if row.problem]
        return Table(f"{self.op}, {case}", columns, lines, notes)

    # The pictures; matplotlib takes half a second to import, so late.

    def ladder(self, case: str | None = None):
        """Bars: the arms on one case, the first for None."""
        from lab import pictures

        return pictures.ladder(self, case or self.cases()[0])

    def sweep(self, over: str = "bytes"):
        """Lines: the rate of each arm over the size, or over the ``"row length"``."""
        from lab import pictures

        return pictures.sweep(self, over)

    def roofline(
        self, intensity: dict[str, float] | None = None, memory: tuple[str, float] | None = None
    ):
        """Where each arm lies under the two roofs; arguments as in ``pictures.roofline``."""
        from lab import pictures

        return pictures.roofline(self, intensity, memory)

    def __str__(self) -> str:
        about = ", ".join(self.machine.values())
        return "\n\n".join([*map(str, self.tables()), f"({about})"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [table._repr_html_() for table in self.tables()]
        parts.append(self.ladder()._repr_html_())
        if len(self.cases()) > 1:
            parts.append(self.sweep()._repr_html_())
        return "".join([*parts, f"<small>{', '.join(self.machine.values())}</small>"])


def bench(
    op: str,
    rungs: Sequence[str | int | os.PathLike] | None = None,
    against: Sequence[str] = ("eager",),
    cases: Sequence[str] | str | None = None,
    *,
    limit: float = 300,
    isolate: bool = True,
) -> BenchReport | Counters:
    """Time rungs of an operator beside what PyTorch has.

    Args:
        op: the operator.
        rungs: names, numbers, ideas, or names of cells; all in ``kernels/`` for None.
        against: names from the operator's ``baselines()``, and ``"compile"``: ``torch.compile`` of
            its ``"eager"``.
        cases: names from the operator's ``bench_cases()``, ``"all"``, or None for the first.
        limit: seconds that preparing and timing one arm may take.
        isolate: run in a second process, where a rung that faults costs nothing.

    Returns:
        The measurements; where there is no GPU, the counters of the CPU machine: it never times.

    Raises:
        BenchError: a result is wrong after timing, or a figure is above its ceiling.
        child.Died: a kernel faulted or hung. This process is unharmed.
    """
    chosen = [find(op, rung) for rung in (loader.rungs(op) if rungs is None else rungs)]
    on_gpu = loader.default_backend() == "cuda"
    for files in chosen:  # do they compile?
        loader.load(op, files.kernel, binding=files.binding, check=not on_gpu)
    module = importlib.import_module(f"ops.{op}")
    known = [case.name for case in module.bench_cases()]
    wanted = known if cases == "all" else known[:1] if cases is None else [*cases]
    baselines = [*module.baselines(), "compile"]
    for names, there, what in ((wanted, known, "cases"), (against, baselines, "baselines")):
        if missing := [name for name in names if name not in there]:
            raise ValueError(f"{op} has no {what} {missing}; there is: {'; '.join(there)}")
    arguments = (op, chosen, list(against), wanted) if on_gpu else (op, chosen)
    function = run if on_gpu else counters.run
    if isolate:
        name = f"{function.__module__}:{function.__name__}"
        # Not after a check: on an H200 torch.add then took up to four times as long, and the rungs
        # did not. What in that process holds it up is not known.
        report = child.call(name, arguments, limit, unlike="lab.checker:run" if on_gpu else "")
    else:
        report = function(*arguments)
    if on_gpu and report.problems():
        error = BenchError(report)
        error.args = (relabel(str(error)),)
        raise error
    return report


def run(
    op: str,
    chosen: list[Files],
    against: list[str],
    wanted: list[str],
    progress: Callable[[str], None] = lambda step: None,
) -> BenchReport:
    """The measurements, in this process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = True, False
    progress("measuring what this GPU can do")
    report = BenchReport(op, machine(), ceilings())
    module = importlib.import_module(f"ops.{op}")
    functions = _functions(module, op, chosen, against)
    for case in module.bench_cases():
        if case.name not in wanted:
            continue
        if "compile" in against:
            torch._dynamo.reset()  # it compiles for eight shapes, and runs the next ones eagerly
        inputs, beyond_cache = rotation(case, len(functions), module.cost)
        usable = {n: f for n, f in functions.items() if _accepts(f, inputs[0])}
        timings = side_by_side(
            usable, inputs, lambda arm, name=case.name: progress(f"{name}, {arm}")
        )
        rungs = {files.name for files in chosen}
        for arm, timing in timings.items():
            report.rows.append(_row(module, case, arm, timing, arm in rungs, beyond_cache, report))
        del inputs, timings
        torch.cuda.empty_cache()
    return report


def _functions(module, op: str, chosen: list[Files], against: list[str]) -> dict[str, Callable]:
    functions = {}
    for files in chosen:
        kernel = loader.load(op, files.kernel, binding=files.binding)
        functions[files.name] = functools.partial(getattr(module, op), kernel=kernel)
    baselines = module.baselines()
    if "compile" in against:
        baselines["compile"] = torch.compile(baselines["eager"], dynamic=False)
    return functions | {name: baselines[name] for name in against}


def _accepts(function: Callable, inputs: tuple) -> bool:
    """False if a rung says that this case is outside its domain."""
    try:
        with torch.no_grad():
            function(*inputs)
    except RuntimeError as error:
        if "not supported by this rung" in str(error):
            return False
        raise
    return True


def _row(
    module, case: Case, arm: str, timing: Timing, is_rung: bool, beyond: bool, report: BenchReport
) -> Row:
    cost, tensors = module.cost(*timing.inputs), [x for x in timing.inputs if torch.is_tensor(x)]
    dtype = tensors[0].dtype
    outs = as_tuple(timing.result)
    expected = as_tuple(module.reference(*timing.inputs))
    compared = [
        differences(out, ref, case.slack * module.tolerance(dtype))
        for out, ref in zip(outs, expected, strict=True)
    ]
    wrong = next((wrong for _, wrong in compared if wrong), None)
    read = sum(x.numel() * x.element_size() for x in tensors)
    written = sum(x.numel() * x.element_size() for x in outs)
    name = _ceiling(cost, dtype, written < READ_ONLY * read, report.ceilings)
    work = cost.flops if name.startswith("matmul") else cost.bytes
    share = work / timing.median / report.ceilings[name]
    if beyond and share > MARGIN[name.split()[0]] and not report.measured_again:
        _measure_ceilings_again(report)
        share = work / timing.median / report.ceilings[name]
    problem = ""
    if wrong and is_rung:
        problem = f"wrong after timing: {wrong}"
    elif beyond and share > MARGIN[name.split()[0]]:
        problem = (
            f"{share:.0%} of the {name} ceiling: more than this GPU can do, so the time or the "
            "cost() is wrong"
        )
    return Row(
        case.name, arm, is_rung, timing.median, timing.low, timing.high, timing.call, cost.bytes,
        cost.flops, name, share if beyond else None, max(e for e, _ in compared), problem,
    )  # fmt: skip


def _measure_ceilings_again(report: BenchReport) -> None:
    """The GPU may have been busy when they were measured, and they are kept from then on."""
    before, report.ceilings, report.measured_again = report.ceilings, ceilings(fresh=True), True
    for row in report.rows:
        if row.share is not None:
            row.share *= before[row.ceiling] / report.ceilings[row.ceiling]


def _ceiling(cost, dtype: torch.dtype, read_only: bool, known: dict[str, float]) -> str:
    """The ceiling that takes longer to do the work under."""
    matmul = f"matmul {str(dtype).removeprefix('torch.')}"
    if matmul in known and cost.flops / known[matmul] > cost.bytes / known["copy"]:
        return matmul
    return "read" if read_only else "copy"


def machine() -> dict[str, str]:
    """What a figure depends on, beside the code."""
    asked = "--query-gpu=driver_version,clocks.sm,clocks.max.sm"
    command = ["nvidia-smi", asked, "--format=csv,noheader", f"--id={torch.cuda.current_device()}"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True).stdout
        driver, clock, top = printed.strip().split(", ")
    except (OSError, ValueError):  # not there, or it answers otherwise
        driver, clock, top = "unknown", "unknown", "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": f"driver {driver}",
        "torch": f"torch {torch.__version__}",
        "cuda": f"CUDA {torch.version.cuda}",
        "clock": f"SM clock {clock} of {top}",
        "tf32": "TF32 off",
        "date": datetime.date.today().isoformat(),
    }
