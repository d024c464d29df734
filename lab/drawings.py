"""Drawings of what lies where, what moves where, and when: made from the formulas of a kernel.

Colours repeat what a number or a hatch says. Each has a text that says the same.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab.pictures import Picture, picture

LIGHT = ListedColormap([  # black numbers can be read on all of them
    "#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#e3cbb5", "#f7b6d2", "#dddddd",
    "#dbdb8d", "#9edae5", "#cfe0f3", "#fde0c0", "#cdeec5", "#fbd0cf", "#e0d6ea", "#f3e9df",
])  # fmt: skip
HATCHES = ("", "///", "...", "xxx", "\\\\\\")


def grids(
    panels: dict[str, Sequence[Sequence[int]]],
    alt: str,
    tile: tuple[int, int] = (0, 0),
    axes: tuple[str, str] = ("row", "column"),
    size: float = 0.34,
) -> Picture:
    """A number in each cell, say the thread that owns it or the bank it lies in; side by side.

    Args:
        panels: a title and rows of integers for each. A negative one stays empty.
        alt: what is to be seen, in a sentence.
        tile: heavier lines after so many rows and columns; 0 for none.
        axes: what runs down and what runs across.
        size: of a cell, in inches.
    """
    arrays = {title: np.asarray(values) for title, values in panels.items()}
    widths = [array.shape[1] for array in arrays.values()]
    height = max(array.shape[0] for array in arrays.values())
    figure = Figure(figsize=(size * sum(widths) + 0.7 * len(widths), size * height + 0.9))
    places = figure.subplots(1, len(arrays), width_ratios=widths, squeeze=False)[0]
    for place, (title, array) in zip(places, arrays.items(), strict=True):
        rows, columns = array.shape
        shown = np.ma.masked_where(array < 0, array % LIGHT.N)
        place.imshow(shown, cmap=LIGHT, vmin=0, vmax=LIGHT.N - 1)
        for (i, j), value in np.ndenumerate(array):
            if value >= 0:
                place.text(j, i, str(value), ha="center", va="center", fontsize=7)
        for step, count, line in (
            (tile[0], rows, place.axhline),
            (tile[1], columns, place.axvline),
        ):
            for at in range(0, count + 1, step or count):
                line(at - 0.5, color="black", linewidth=1.6 if step else 0.8)
        place.set_title(title, loc="left", fontsize=9)
        place.set_ylabel(axes[0], fontsize=8)
        place.set_xlabel(axes[1], fontsize=8)
        place.set_xticks(range(0, columns, max(1, columns // 8)))
        place.set_yticks(range(0, rows, max(1, rows // 8)))
        place.tick_params(labelsize=7, length=2)
    figure.tight_layout()
    return picture(figure, alt)


def product(
    m: int, n: int, k: int, tile: tuple[int, int, int], at: tuple[int, int, int]
) -> Picture:
    """C = A·B in tiles: what the block at ``at`` (tile row, tile column, step of K) works with.

    Hatched is what it reads in this step, grey what it reads in all, black the tile of C it makes.
    """
    (tm, tn, tk), (i, j, p), gap = tile, at, k // 4
    figure = Figure(figsize=(6, 6 * (m + k + gap) / (n + k + gap)))
    axes = figure.subplots()

    def box(x: float, y: float, width: float, height: float, **style: object) -> None:
        style = {"facecolor": "white", "edgecolor": "black"} | style
        axes.add_patch(Rectangle((x, y), width, height, **style))

    left, top = k + gap, k + gap  # of C; A lies left of it, B above
    for name, x, y, width, height in (
        ("A", 0, top, k, m), ("B", left, 0, n, k), ("C", left, top, n, m)
    ):  # fmt: skip
        box(x, y, width, height)
        axes.text(x - gap / 6, y - gap / 6, name, fontsize=13, ha="right", va="bottom")
    box(0, top + i * tm, k, tm, facecolor="0.88")
    box(left + j * tn, 0, tn, k, facecolor="0.88")
    box(p * tk, top + i * tm, tk, tm, facecolor="0.75", hatch="////")
    box(left + j * tn, p * tk, tn, tk, facecolor="0.75", hatch="////")
    box(left + j * tn, top + i * tm, tn, tm, facecolor="0.2")
    for row in range(tm, m, tm):
        axes.plot([left, left + n], [top + row] * 2, color="0.6", linewidth=0.6)
    for column in range(tn, n, tn):
        axes.plot([left + column] * 2, [top, top + m], color="0.6", linewidth=0.6)
    arrow = {"arrowstyle": "->", "linewidth": 1.2}
    middle_x, middle_y = left + (j + 0.5) * tn, top + (i + 0.5) * tm
    axes.annotate("", ((p + 2.4) * tk, middle_y), ((p + 1) * tk, middle_y), arrowprops=arrow)
    axes.annotate("", (middle_x, (p + 2.4) * tk), (middle_x, (p + 1) * tk), arrowprops=arrow)
    axes.text(0, top / 2, f"a step: {tm} x {tk} of A\nand {tk} x {tn} of B,\nfor {tm} x {tn} of C",
              fontsize=10, va="center")  # fmt: skip
    axes.set_xlim(-gap / 2, left + n + 1)
    axes.set_ylim(top + m + 1, -gap / 2)
    axes.set_aspect("equal")
    axes.axis("off")
    return picture(
        figure,
        f"C ({m} x {n}) with A ({m} x {k}) left of it and B ({k} x {n}) above. The block that "
        f"makes the {tm} x {tn} tile in row {i}, column {j} reads {tm} rows of A and {tn} columns "
        f"of B, in steps of {tk}: now step {p}.",
    )


def timeline(
    lanes: dict[str, Sequence[tuple[float, float, str]]], alt: str, title: str = ""
) -> Picture:
    """Who is busy when: for each lane (start, length, text); texts that begin alike look alike.

    A text that begins with "wait" is drawn as an empty, dashed box.
    """
    figure = Figure(figsize=(8, 0.9 + 0.45 * len(lanes)))
    axes = figure.subplots()
    kinds = dict.fromkeys(text.split()[0] for boxes in lanes.values() for _, _, text in boxes)
    kinds = [kind for kind in kinds if kind != "wait"]
    for y, boxes in enumerate(lanes.values()):
        for start, length, text in boxes:
            kind = text.split()[0]
            style = {"facecolor": "white", "linestyle": "--", "edgecolor": "0.6"}
            if kind != "wait":
                i = kinds.index(kind)
                style = {"facecolor": LIGHT(i), "hatch": HATCHES[i % len(HATCHES)]}
                style["edgecolor"] = "0.35"
            axes.add_patch(Rectangle((start, y - 0.36), length, 0.72, **style))
            label = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
            axes.text(start + length / 2, y, text, ha="center", va="center", fontsize=7, bbox=label)
    end = max(start + length for boxes in lanes.values() for start, length, _ in boxes)
    axes.set_xlim(0, 1.01 * end)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_xticks([])
    axes.set_xlabel("time →")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return picture(figure, alt)
