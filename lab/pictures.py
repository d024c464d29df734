"""The pictures, each with a text that says the same. Hatches and marks tell arms apart without
their colours.
"""

import base64
import html
import io
import math
import re
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from lab.benchmark import BenchReport, Row
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
    drawn, out = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=90, bbox_inches="tight")
    # 256 colours do, and take a third of the bytes: a notebook is to stay under 500 KB.
    image = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    image.save(out, "png", optimize=True)
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


def sweep(report: BenchReport, over: str = "bytes") -> Picture:
    """The rate of each arm over the size of the problem, a mark for each case.

    ``over``: ``"bytes"``, or ``"row length"`` where the last dimension is what varies.
    """
    matmul = report.rows[0].ceiling.startswith("matmul")
    scale, unit = (1e12, "TFLOP/s") if matmul else (1e9, "GB/s")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    arms = dict.fromkeys(row.arm for row in report.rows)
    dtype = report.cases()[0].split()[0]

    def size(row: Row) -> int:  # of "float32 (32768, 4096) contiguous": 4096
        shape = re.search(r"\((.*?)\)", row.case)[1]
        return row.bytes if over == "bytes" else int(re.findall(r"\d+", shape)[-1])

    said = []
    for i, (mark, arm) in enumerate(zip(MARKS * len(arms), arms, strict=False)):
        rows = [r for r in report.rows if r.arm == arm and r.case.split()[0] == dtype]
        rows.sort(key=lambda row: size(row))
        style = "-" if any(row.is_rung for row in rows) else "--"
        points = [(size(row), row.rate() / scale) for row in rows]
        axes.plot(*zip(*points, strict=True), style, marker=mark, label=arm, color=f"C{i}",
                  markerfacecolor="white", linewidth=1)  # fmt: skip
        said.append(f"{arm} " + ", ".join(f"{rate:.4g}" for _, rate in points))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes that must move" if over == "bytes" else over)
    axes.set_ylabel(unit)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(f"{report.op}, {dtype}", loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure, f"{unit} of {report.op} by {over}, smallest first: {'; '.join(said)}.")


def roofline(
    report: BenchReport,
    intensity: dict[str, float] | None = None,
    memory: tuple[str, float] | None = None,
) -> Picture:
    """Where each arm lies under two roofs: a memory's (rising) and that of arithmetic (flat).

    Args:
        report: what was measured.
        intensity: FLOP a byte of the arms to draw, as counted; what ``cost()`` says, of all arms,
            for None.
        memory: the rising roof, its name and bytes a second; ``copy`` for None.
    """
    dtype = report.cases()[0].split()[0]
    rows = [row for row in report.rows if row.case.split()[0] == dtype and row.flops]
    if intensity is not None:
        rows = [row for row in rows if row.arm in intensity]
    name, bandwidth = memory or ("copy", report.ceilings["copy"])
    bandwidth, top = bandwidth / 1e12, report.ceilings[f"matmul {dtype}"] / 1e12
    ridge = top / bandwidth

    def place(row: Row) -> tuple[float, float]:
        x = intensity[row.arm] if intensity is not None else row.flops / row.bytes
        return x, row.flops / row.median / 1e12

    points = {row.arm: [place(r) for r in rows if r.arm == row.arm] for row in rows}
    xs = [ridge, *(x for mine in points.values() for x, _ in mine)]
    ys = [top, *(y for mine in points.values() for _, y in mine)]
    left, right = min(xs) / 3, max(xs) * 2
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    axes.plot([left, ridge, right], [bandwidth * left, top, top], color="black")
    axes.axvline(ridge, color="0.6", linestyle=":", linewidth=1)
    axes.text(left * 1.1, top * 1.08, f"matmul, {top:.3g} TFLOP/s", fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min([*ys, bandwidth * left]) / 1.5, max(ys) * 1.5)
    axes.text(ridge * 1.05, axes.get_ylim()[0] * 1.1, f"{ridge:.3g} FLOP a byte", fontsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    said = []
    for i, (mark, (arm, mine)) in enumerate(zip(MARKS * len(points), points.items(), strict=False)):
        axes.plot(*zip(*mine, strict=True), linestyle="", marker=mark, color=f"C{i}",
                  markerfacecolor="white", label=arm)  # fmt: skip
        said += [f"{arm} {x:.3g} FLOP a byte, {y:.3g} TFLOP/s" for x, y in mine]
    # Each arm's name stands beside the plot, at the height of its last point or as near as may be.
    names = sorted(points, key=lambda arm: points[arm][-1][1])
    low, high = (math.log(y) for y in axes.get_ylim())
    heights = [(math.log(points[arm][-1][1]) - low) / (high - low) for arm in names]
    for arm, height in zip(names, _spread(heights, 0.055), strict=True):
        axes.annotate(
            arm, points[arm][-1], (1.03, height), textcoords="axes fraction", fontsize=9,
            va="center", arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.8},
        )  # fmt: skip
    axes.set_xlabel(f"FLOP for each byte of {'device memory' if memory is None else name}")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"{report.op}, {dtype}: under the roofs of {name} ({bandwidth:.3g} TB/s) and matmul",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure, f"Roofline of {report.op} under {name} and matmul: {'; '.join(said)}.")


def _spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights between 0 and 1, moved apart until no two are nearer than ``gap``."""
    heights = list(heights)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    limit = 1.0
    for i in reversed(range(len(heights))):  # back down from the top
        heights[i] = min(heights[i], limit)
        limit = heights[i] - gap
    return heights


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
