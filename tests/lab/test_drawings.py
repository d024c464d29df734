"""The drawings show what they are given, and say it in words."""

import io

import numpy as np
from matplotlib import figure as figures
from PIL import Image

from lab import drawings
from lab.pictures import _spread, roofline
from tests.lab.test_benchmark import report


def texts(monkeypatch, draw) -> list[str]:
    """All that ``draw()`` writes into its picture."""
    drawn = []
    savefig = figures.Figure.savefig

    def keep(figure, *args, **kwargs):
        drawn.append(figure)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(figures.Figure, "savefig", keep)
    picture = draw()
    assert picture.png.startswith(b"\x89PNG") and picture.alt in picture._repr_html_()
    return [t.get_text() for axes in drawn[-1].axes for t in axes.texts]


def test_a_grid_numbers_its_cells_and_leaves_negative_ones_empty(monkeypatch):
    cells = [[0, 31], [-1, 5]]
    assert texts(monkeypatch, lambda: drawings.grids({"a": cells}, "two rows")) == ["0", "31", "5"]


def test_black_numbers_can_be_read_on_every_colour():
    for red, green, blue, _ in drawings.LIGHT(range(drawings.LIGHT.N)):
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.4


def test_a_product_says_what_a_block_reads(monkeypatch):
    def draw():
        picture = drawings.product(128, 128, 96, (32, 64, 16), (1, 1, 2))
        assert "32 x 64 tile in row 1, column 1 reads 32 rows of A and 64 columns" in picture.alt
        return picture

    assert texts(monkeypatch, draw)[:3] == ["A", "B", "C"]


def test_a_timeline_writes_into_its_boxes(monkeypatch):
    lanes = {"memory": [(0, 2, "load 0")], "arithmetic": [(0, 2, "wait"), (2, 1, "multiply 0")]}
    said = texts(monkeypatch, lambda: drawings.timeline(lanes, "one after the other"))
    assert said == ["load 0", "wait", "multiply 0"]


def test_a_roofline_of_another_memory_shows_the_counted_arms_only():
    found = roofline(report(), {"1_naive": 0.5}, ("shared memory", 33e12)).alt
    assert "under shared memory" in found and "1_naive 0.5 FLOP a byte" in found
    assert "eager" not in found


def test_labels_move_apart_and_stay_inside():
    heights = _spread([0.1, 0.11, 0.95, 0.96, 0.97], 0.05)
    assert all(b - a > 0.0499 for a, b in zip(heights, heights[1:], strict=False))
    assert heights[0] == 0.1 and heights[-1] == 1.0


def test_colours_survive_the_palette():
    picture = drawings.grids({"a": [[2]]}, "one green cell")
    colours = np.asarray(Image.open(io.BytesIO(picture.png)).convert("RGB")).reshape(-1, 3)
    green = np.array([0x98, 0xDF, 0x8A])
    assert (abs(colours.astype(int) - green).max(axis=1) <= 3).sum() > 100
