"""Every notebook runs from end to end, and holds what it should."""

import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from lab.notebooks import FOLDER, digest, execute
from tests.conftest import ROOT

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def outputs(cell) -> str:
    """All text that a cell put out."""
    texts = []
    for output in cell.get("outputs", ()):
        texts.append(output.get("text", ""))
        texts.append(output.get("data", {}).get("text/plain", ""))
        texts += output.get("traceback", ())
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(texts))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(re.findall(r"^# ", "\n".join(text), re.MULTILINE)) == 1
    assert len(notebook.cells) <= 27
    assert path.stat().st_size < 500_000
    for cell in notebook.cells:
        for line in cell.source.splitlines():
            assert len(line) <= 82, line
    assert all(name for name, _ in re.findall(r"!\[(.*?)\]\((.*?)\)", "\n".join(text)))


def test_outputs_belong_to_the_code(path):
    notebook = nbformat.read(path, as_version=4)
    if "outputs_of" not in notebook.metadata:
        pytest.skip("not run on a GPU yet: python -m lab.notebooks")
    assert notebook.metadata["outputs_of"] == digest(notebook), (
        f"{path.name} was edited after it was run: python -m lab.notebooks {path}"
    )


def test_runs_and_leaves_the_repository_as_it_was(path):
    def status() -> str:
        command = ["git", "status", "--porcelain"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout

    before = status()
    execute(path)
    assert status() == before


def test_01_shows_what_it_promises(tmp_path):
    """From another working folder, as VS Code and scripts start notebooks."""
    (tmp_path / "01.ipynb").write_text((FOLDER / "01_vector_add.ipynb").read_text())
    notebook = execute(tmp_path / "01.ipynb", ROOT)
    found = {cell.source: outputs(cell) for cell in notebook.cells if cell.cell_type == "code"}
    everything = "\n".join(found.values())
    for words in (
        "equal to a + b: True",
        "gradcheck: True",
        "add_gelu.cu did not compile",
        "blokIdx.x} * blockDim.x",
        "pass a.contiguous()",
        "compiled ('add_gelu.cu',)",
    ):
        assert words in everything, words
    assert not list(tmp_path.glob("*.cu"))
