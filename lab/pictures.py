"""The pictures, each with a text that says the same. Hatches and marks tell arms apart without
their colours.
"""

import base64
import html
import io
from dataclasses import dataclass

from matplotlib.figure import Figure

from lab.benchmark import BenchReport
from lab.checker import Report

MARKS = "osD^vP*X"


@dataclass
class Picture:
    """A PNG with its alternative text."""

    png: bytes
    alt: str

    def __repr__(self) -> str:
        return self.alt

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png).decode()
        return f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{data}">'


def picture(figure: Figure, alt: str) -> Picture:
    """``figure`` as a picture; ``alt`` says in words what it shows."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, bbox_inches="tight")
    return Picture(out.getvalue(), alt)


def ladder(report: BenchReport, case: str) -> Picture:
    """A bar for each arm of one case, up to the ceiling."""
    rows = report.having(case)
    matmul = rows[0].ceiling.startswith("matmul")
    scale, unit = (1e12, "TFLOP/s") if matmul else (1e9, "GB/s")
    top = report.ceilings[rows[0].ceiling] / scale
    figure = Figure(figsize=(7, 0.8 + 0.42 * len(rows)))
    axes = figure.subplots()
    for i, row in enumerate(rows):
        rate = row.rate() / scale
        work = row.rate() * row.median
        spread = [[rate - work / row.high / scale], [work / row.low / scale - rate]]
        face, hatch = ("0.55", "") if row.is_rung else ("white", "///")
        axes.barh(i, rate, xerr=spread, color=face, hatch=hatch, edgecolor="black", capsize=3)
        label = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(
            0.01 * top, i, f"{rate:.{1 if matmul else 0}f}", va="center", fontsize=9, bbox=label
        )
    axes.set_yticks(range(len(rows)), [row.arm for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(top, *(row.rate() / scale for row in rows)))
    if rows[0].share is not None:
        axes.axvline(top, color="black", linestyle="--", linewidth=1)
        axes.text(top, -0.65, f"{rows[0].ceiling} {top:.0f}", ha="center", fontsize=9)
    axes.set_xlabel(unit)
    axes.set_title(f"{report.op}, {case}", loc="left", fontsize=10, pad=18)
    axes.spines[["top", "right"]].set_visible(False)
    said = "; ".join(f"{row.arm} {row.rate() / scale:.4g}" for row in rows)
    return picture(figure, f"Bars of {unit} for {report.op} on {case}: {said}. Ceiling {top:.4g}.")


def sweep(report: BenchReport) -> Picture:
    """The rate of each arm over the size of the problem, a mark for each case."""
    matmul = report.rows[0].ceiling.startswith("matmul")
    scale, unit = (1e12, "TFLOP/s") if matmul else (1e9, "GB/s")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    arms = dict.fromkeys(row.arm for row in report.rows)
    dtype = report.cases()[0].split()[0]
    said = []
    for i, (mark, arm) in enumerate(zip(MARKS * len(arms), arms, strict=False)):
        rows = [r for r in report.rows if r.arm == arm and r.case.split()[0] == dtype]
        rows.sort(key=lambda row: row.bytes)
        style = "-" if any(row.is_rung for row in rows) else "--"
        points = [(row.bytes, row.rate() / scale) for row in rows]
        axes.plot(*zip(*points, strict=True), style, marker=mark, label=arm, color=f"C{i}",
                  markerfacecolor="white", linewidth=1)  # fmt: skip
        said.append(f"{arm} " + ", ".join(f"{rate:.4g}" for _, rate in points))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes that must move")
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(f"{report.op}, {dtype}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure, f"{unit} of {report.op} from the smallest case on: {'; '.join(said)}.")


def roofline(report: BenchReport) -> Picture:
    """Where each arm lies under the two roofs: memory (rising) and arithmetic (flat)."""
    dtype = report.cases()[0].split()[0]
    rows = [row for row in report.rows if row.case.split()[0] == dtype and row.flops]
    copy, top = report.ceilings["copy"], report.ceilings[f"matmul {dtype}"]
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    intensities = [row.flops / row.bytes for row in rows]
    left, right = min([*intensities, top / copy]) / 4, max([*intensities, top / copy]) * 4
    axes.plot(
        [left, top / copy, right], [copy * left / 1e12, top / 1e12, top / 1e12], color="black"
    )
    said = []
    arms = dict.fromkeys(row.arm for row in rows)
    for i, (mark, arm) in enumerate(zip(MARKS * len(arms), arms, strict=False)):
        mine = [row for row in rows if row.arm == arm]
        xs = [row.flops / row.bytes for row in mine]
        ys = [row.flops / row.median / 1e12 for row in mine]
        axes.plot(
            xs, ys, linestyle="", marker=mark, label=arm, color=f"C{i}", markerfacecolor="white"
        )
        said += [f"{arm} {x:.3g} FLOP a byte, {y:.3g} TFLOP/s" for x, y in zip(xs, ys, strict=True)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP a byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    axes.set_title(f"{report.op}, {dtype}: the roofs are copy and matmul", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure, f"Roofline of {report.op}: {'; '.join(said)}.")


def picture_of_errors(report: Report) -> Picture | None:
    """Where the first failing case with two dimensions is wrong: black is wrong."""
    failed = [r for r in report.having("failed") if r.wrong and r.wrong.picture is not None]
    if not failed:
        return None
    wrong = failed[0].wrong
    rows, columns = wrong.shape[-2:]
    figure = Figure(figsize=(4, 4))
    axes = figure.subplots()
    axes.imshow(
        wrong.picture, cmap="gray_r", vmin=0, vmax=1, extent=(0, columns, rows, 0),
        interpolation="nearest", aspect="auto",
    )  # fmt: skip
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    axes.set_title(f"{failed[0].case}\nblack: wrong", loc="left", fontsize=9)
    share = f"{wrong.count:,} of {wrong.total:,}"
    return picture(figure, f"Map of {failed[0].case}: {share} elements are wrong.")
