"""show() and diff(), as text and as HTML."""

import re

import pytest

import lab
from lab import overlay
from lab.source import Diff


def test_show_has_every_line_with_its_number():
    shown = lab.show("vector_add", 1)
    lines = shown.text.splitlines()
    assert shown.title == "kernels/vector_add/1_naive.cu"
    assert str(shown).splitlines()[1] == f"   1  {lines[0]}"
    assert str(shown).splitlines()[-1] == f"{len(lines):>4}  {lines[-1]}"
    html = shown._repr_html_()
    assert 'style="color' in html and "<style" not in html and "__global__" in html


def test_the_other_layers_can_be_shown():
    assert "PYBIND11_MODULE" in lab.show("vector_add", "binding").text
    assert "def reference" in lab.show("vector_add", "ops").text
    with pytest.raises(LookupError, match="Did you mean '1_naive'"):
        lab.show("vector_add", "1_naiv")


BEFORE = "int x = 1;\nfloat y = a[i] + b[i];\nreturn;\n"
AFTER = "int x = 1;\nfloat y = a[i] * b[i] + c;\nint z;\nreturn;\n"


def test_diff_marks_the_words_that_changed():
    text = str(Diff("a → b", BEFORE, AFTER))
    assert text.splitlines() == [
        "a → b",
        "  int x = 1;",
        "- float y = a[i] [-+-] b[i];",
        "+ float y = a[i] {+*+} b[i]{+ + c+};",
        "+ int z;",
        "  return;",
    ]


def test_diff_in_html_says_with_signs_and_tags_what_it_colours():
    html = Diff("a → b", BEFORE, AFTER)._repr_html_()
    assert re.search(r"<span[^>]*>- float y = a\[i\] <del><b>\+</b></del> b\[i\];</span>", html)
    assert "<ins><b>*</b></ins>" in html and "+ int z;</span>" in html


def test_diff_of_two_rungs_and_of_a_cell():
    ladder = str(lab.diff("vector_add", 1, 2))
    assert ladder.startswith("kernels/vector_add/1_naive.cu → kernels/vector_add/2_grid_stride.cu")
    source = lab.show("vector_add", 1).text.replace("BLOCK = 256", "BLOCK = 128")
    overlay.write("vector_add", "mine", "kernel", source)
    mine = str(lab.diff("vector_add", 1, "mine"))
    assert "- constexpr int BLOCK = [-256-];" in mine and "+ constexpr int BLOCK = {+128+};" in mine


def test_a_diff_of_equals_says_so():
    assert str(Diff("a → a", BEFORE, BEFORE)) == "a → a\n(no difference)"
