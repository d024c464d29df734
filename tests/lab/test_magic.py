"""Cells that are rungs, as a notebook runs them."""

import re
import subprocess
import uuid

import nbformat
import pytest
from nbclient import NotebookClient

import loader
from lab import overlay
from tests.conftest import ROOT

NAIVE = (ROOT / "kernels/vector_add/1_naive.cu").read_text()
BINDING = (ROOT / "bindings/vector_add.cpp").read_text()


@pytest.fixture
def fresh():
    """A comment that makes a source one that was never compiled before."""
    return f"\n// {uuid.uuid4()}\n"


def run(tmp_path, *cells, allow_errors=False):
    """Execute cells in a fresh kernel that starts in a folder of its own; the executed cells."""
    setup = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch, lab\n%load_ext lab"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in (setup, *cells)]
    )
    client = NotebookClient(notebook, timeout=600, allow_errors=allow_errors, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}})  # fmt: skip
    client.execute()
    return notebook.cells[1:]


def text(cell):
    """What a cell shows, as a terminal would, without the progress of a build."""
    found = []
    for out in cell.outputs:
        if out.output_type == "stream":
            found += [out.text] if out.name == "stdout" else []
        elif out.output_type == "error":
            found.append("\n".join(out.traceback))
        else:
            found.append(out.data["text/plain"])
    return "\n".join(found)


def test_a_cell_is_a_rung(tmp_path, fresh):
    negative = NAIVE.replace("a[i] + b[i]", "a[i] - b[i]")
    cells = run(
        tmp_path,
        f"%%kernel vector_add/mine\n{negative}{fresh}",
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "a = torch.randn(1000, device=device)\n"
        "lab.load('vector_add', 'mine').vector_add(a, a).abs().max().item()",
        "lab.diff('vector_add', '1_naive', 'mine')",
        f"%%binding vector_add/mine\n{BINDING}{fresh}",
        "lab.load('vector_add', 'mine').vector_add(a, a).abs().max().item()",
        "lab.show('vector_add', 'mine')",
    )
    built, value, diff, binding, again, shown = map(text, cells)
    assert re.search(r"vector_add/mine: \d+\.\d\d s, compiled .*mine\.cu", built)
    assert value == "0.0" and again == "0.0"
    assert "[-+-]" in diff and "{+-+}" in diff
    assert re.search(r"compiled mine\.cpp; from the cache: mine\.cu", binding)
    assert shown.startswith("%%kernel vector_add/mine\n   1  // %%kernel vector_add/mine\n")
    shown = [out.get("data", {}).get("text/html", "") for out in cells[0].outputs]
    assert any("vector_add/mine: " in html and html.startswith("<") for html in shown)
    status = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True)
    assert "mine" not in status.stdout and not list(tmp_path.iterdir())


def test_an_error_is_shown_at_its_place_in_the_cell_and_stops_the_notebook(tmp_path):
    broken = NAIVE.replace("out[i] = a[i] + b[i];", "out[i] = a[i] + c[i];")
    cell = f"%%kernel vector_add/broken\n{broken}"
    number = next(i for i, line in enumerate(cell.splitlines(), 1) if "c[i]" in line)
    failed, after = run(tmp_path, cell, "1 + 1", allow_errors=True)
    said = text(failed)
    assert failed.outputs[-1].ename == "CompileError"
    assert "%%kernel vector_add/broken did not compile." in said
    assert f"%%kernel vector_add/broken, line {number}: " in said
    assert re.search(rf"{number} \|     out\[i\] = a\[i\] \+ c\[i\];\n +\| +\^", said)
    assert "Help: This name is not declared" in said
    assert len(said.splitlines()) < 12 and "Traceback" not in said and "overlay.py" not in said
    with pytest.raises(Exception, match="CompileError"):  # Run All stops here
        run(tmp_path, cell, "1 + 1")


def test_a_broken_binding_is_explained_too(tmp_path):
    broken = BINDING.replace("return out;", "return out")
    (cell,) = run(tmp_path, f"%%binding vector_add/broken\n{broken}", allow_errors=True)
    assert re.search(r"%%binding vector_add/broken, line \d+: expected", text(cell))
    assert "Help: A semicolon is missing" in text(cell)


def test_a_crash_leaves_the_notebook_running(tmp_path):
    wild = NAIVE.replace("out[i] = a[i] + b[i];", "*(T*)(i + 64) = a[i];")
    cells = run(
        tmp_path,
        f"%%kernel vector_add/wild\n{wild}",
        "lab.check('vector_add', 'wild')",
        "lab.check('vector_add', '1_naive').ok",
        allow_errors=True,
    )
    error = cells[1].outputs[-1]
    assert error.output_type == "error" and error.ename in ("Died", "CheckError"), text(cells[1])
    assert len(text(cells[1]).splitlines()) < 40 and "child.py" not in text(cells[1])
    assert text(cells[2]) == "True"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%%kernel vector_add", "needs an operator and a name"),
        ("%%kernel vector_add/1_naive", "which a cell does not replace"),
        ("%%kernel vector_add/naive", "Choose another name"),
        ("%%kernel vector_ad/mine", "Did you mean 'vector_add'"),
        ("%%kernel vector_add/../x", "needs a name like my_rung"),
    ],
)
def test_a_wrong_name_says_what_to_write(line, message):
    from IPython.core.error import UsageError

    from lab import magic

    with pytest.raises((UsageError, ValueError, LookupError), match=message):
        magic.kernel(line.removeprefix("%%kernel "), NAIVE)


def test_the_same_cell_is_the_same_file_and_another_is_another():
    first = overlay.write("vector_add", "mine", "kernel", "int x;\n")
    assert overlay.write("vector_add", "mine", "kernel", "int x;\n") == first
    assert overlay.write("vector_add", "mine", "kernel", "int y;\n") != first
    assert first.read_text() == "// %%kernel vector_add/mine\nint x;\n"
    assert first.is_relative_to(loader.cache_folder())
    assert overlay.relabel(f"{overlay.find('vector_add', 'mine').kernel}:3: no") == (
        "%%kernel vector_add/mine:3: no"
    )
