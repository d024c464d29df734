"""Measure every figure that this project quotes, keep the measurements, and quote them.

    python -m lab.collect              measure all operators on this GPU, then quote
    python -m lab.collect softmax      only these, beside what was measured before
    python -m lab.collect --headline   only the cases that are quoted
    python -m lab.collect --quote      only quote again, from results/*.json; needs no GPU

Measurements go to ``results/<chip>.json``. Quoted are the ladder table of README.md, between its
markers, and the ``// Result :`` line of each kernel.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

import loader
from lab import child
from lab.benchmark import BenchError, BenchReport, Row, bench, machine
from lab.ceilings import ceilings

ROOT = loader.ROOT
RESULTS = ROOT / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
NOTHING = "// Result : not measured yet"
WIDTH = 100  # of a line in a kernel


def build(ops: Sequence[str]) -> None:
    """Build all rungs of ``ops``, several operators at a time; bench() reports what fails."""

    def one(op: str) -> None:
        command = [sys.executable, str(ROOT / "loader.py"), "build", op]
        subprocess.run(command, capture_output=True)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(one, ops))


def measure(op: str, results: dict, headline: bool) -> list[str]:
    """Bench one operator on its first case, or on the others, and put the rows into ``results``.

    Returns:
        What could not be measured, in words.
    """
    if not importlib.util.find_spec(f"ops.{op}"):
        return [f"{op}: there is no ops/{op}.py"]
    module = importlib.import_module(f"ops.{op}")
    if not hasattr(module, "bench_cases"):
        return [f"{op}: ops/{op}.py has no bench_cases()"]
    first, *others = [case.name for case in module.bench_cases()]
    mine = [row for row in results["rows"] if row["op"] == op]
    results["rows"] = [row for row in results["rows"] if row["op"] != op]
    kept = [row for row in mine if row["case"] in (others if headline else [first])]
    against = [*module.baselines(), "compile"] if headline else ["eager", "compile"]
    problems, new = [], []
    try:
        report = bench(op, against=against, cases=[first] if headline else others)
    except BenchError as error:
        report = error.report
        problems.append(f"{op}: {report.problems()}")
    except (child.Died, child.Failed, loader.CompileError) as error:
        report = None
        problems.append(f"{op}: {error}")
    if report:
        print(report, end="\n\n", flush=True)
        new = _rows(report)
    results["rows"] += new + kept if headline else kept + new
    return problems


def _rows(report: BenchReport) -> list[dict]:
    """The rows that can be believed, with four digits: more is noise."""
    found = []
    for row in (row for row in report.rows if not row.problem):
        values = {"op": report.op, **asdict(row)}
        del values["problem"]
        found.append({k: float(f"{v:.4g}") if type(v) is float else v for k, v in values.items()})
    return found


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def write(path: Path, results: dict) -> None:
    """A row a line, so that a diff shows what has changed."""
    rows = ",\n  ".join(json.dumps(row) for row in results["rows"])
    head = ",\n ".join(
        f"{json.dumps(k)}: {json.dumps(results[k])}" for k in ("machine", "ceilings")
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{{head},\n "rows": [\n  {rows}\n ]}}\n')


def ladder(results: dict) -> str:
    """The README's table: each rung on its operator's headline case."""
    about = results["machine"]
    lines = [
        f"{about['gpu']}, {about['torch']}, {about['cuda']}, {about['driver']}, TF32 off, "
        f"{about['date']}. *Of ceiling*: of a device-to-device copy, a read, or the vendor's "
        "matrix product, measured in the same run.",
        "",
        "| operator | rung | µs | rate | of ceiling | × eager | × torch.compile |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    rows = [_row(row) for row in results["rows"]]
    ops = [row["op"] for row in results["rows"]]
    for op in sorted(set(ops)):
        mine = [row for row, of in zip(rows, ops, strict=True) if of == op]
        here = [row for row in mine if row.case == mine[0].case]
        for i, row in enumerate(row for row in here if row.is_rung):
            name = f"{op}, {_short(row.case)}" if i == 0 else ""
            beside = [_ratio(here, arm, row) for arm in ("eager", "compile")]
            cells = [
                name,
                row.arm,
                f"{row.median * 1e6:.1f}",
                row.rate_text(),
                _share(row),
                *beside,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def result_line(op: str, rung: str, results: dict) -> str:
    """The ``// Result :`` line of a kernel: its first measured case."""
    rows = [_row(row) for row in results["rows"] if row["op"] == op]
    mine = next((row for row in rows if row.arm == rung), None)
    if mine is None:
        return NOTHING
    here = [row for row in rows if row.case == mine.case]
    said = [f"{_share(mine)} of {mine.ceiling.split()[0]}" if mine.share else mine.rate_text()]
    first = next(row for row in here if row.is_rung)
    if first.arm != rung:
        said.append(f"{_ratio(here, first.arm, mine)}x rung {first.arm.split('_')[0]}")
    if ratio := _ratio(here, "eager", mine):
        said.append(f"{ratio}x eager")
    about = results["machine"]
    where = [about["gpu"].removeprefix("NVIDIA "), _short(mine.case), about["cuda"]]
    line = f"// Result : {', '.join(said)}  ({', '.join(where)})"
    return line if len(line) <= WIDTH else line.replace(f", {about['cuda']})", ")")


def quote(results: dict) -> None:
    """Write the figures into the README and the kernels."""
    if README.exists() and BEGIN in (text := README.read_text()):
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        README.write_text(f"{before}{BEGIN}\n{ladder(results)}\n{END}{after}")
    for op, rung, path in _kernels():
        line = result_line(op, rung, results)
        if line != NOTHING:
            before, after = re.split(r"^// Result :.*$", path.read_text(), maxsplit=1, flags=re.M)
            path.write_text(before + line + after)


def unfounded() -> list[str]:
    """The quoted figures that no measurement in ``results/`` is behind."""
    measured = [read(path) for path in sorted(RESULTS.glob("*.json"))]
    found = []
    if README.exists() and BEGIN in (text := README.read_text()):
        quoted = text.split(BEGIN, 1)[1].split(END, 1)[0].strip()
        if quoted and quoted not in [ladder(results) for results in measured]:
            found.append("README.md: the ladder table")
    for op, rung, path in _kernels():
        line = re.search(r"^// Result :.*$", path.read_text(), re.M)
        allowed = [NOTHING, *(result_line(op, rung, results) for results in measured)]
        if not line or line[0] not in allowed:
            found.append(f"{path.relative_to(ROOT)}: {line[0] if line else 'no Result line'}")
    return found


def _kernels() -> list[tuple[str, str, Path]]:
    paths = sorted((ROOT / "kernels").glob("*/*.cu"))
    return [(path.parent.name, path.stem, path) for path in paths]


def _row(values: dict) -> Row:
    return Row(**{key: value for key, value in values.items() if key != "op"})


def _short(case: str) -> str:
    return case.removesuffix(" contiguous")


def _share(row: Row) -> str:
    return "in cache" if row.share is None else f"{row.share:.2f}"


def _ratio(rows: list[Row], arm: str, to: Row) -> str:
    other = next((row for row in rows if row.arm == arm), None)
    return f"{other.median / to.median:.2f}" if other else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure and quote every figure of this project.")
    parser.add_argument("ops", nargs="*", help="operators; all for none")
    parser.add_argument("--headline", action="store_true", help="only the cases that are quoted")
    parser.add_argument("--quote", action="store_true", help="do not measure")
    options = parser.parse_args(arguments)
    problems: list[str] = []
    if options.quote:
        files = sorted(RESULTS.glob("*.json"), key=lambda path: read(path)["machine"]["date"])
        if not files:
            print("there is nothing to quote: results/ is empty", file=sys.stderr)
            return 1
        results = read(files[-1])
    elif not torch.cuda.is_available():
        print("there is no GPU here to measure on; --quote needs none", file=sys.stderr)
        return 1
    else:
        chip = re.sub(r"\W+", "_", torch.cuda.get_device_name().removeprefix("NVIDIA ")).lower()
        path = RESULTS / f"{chip}.json"
        results = read(path) if path.exists() else {"rows": []}
        results["ceilings"] = ceilings(fresh=True)
        results["machine"] = machine()  # now that the clock is up
        ops = options.ops or loader.ops()
        build(ops)
        for headline in (True,) if options.headline else (True, False):
            for op in ops:
                problems += measure(op, results, headline)
                write(path, results)  # an interruption costs one operator
    quote(results)
    for problem in problems:
        print(f"NOT MEASURED  {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
