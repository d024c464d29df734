"""Every notebook runs from end to end, and holds what it should."""

import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from lab.notebooks import FOLDER, digest, execute, execute_with_solutions, refresh, tags
from tests.conftest import ROOT

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PROMISES = {  # words that the outputs must hold
    "00_your_machine": (
        "equal to a + b: True",
        "ToolchainError: CXX=g++-99 is no program on PATH",
        "vector_add: the launch failed",
    ),
    "01_vector_add": (
        "equal to a + b: True",
        "gradcheck: True",
        "add_gelu.cu did not compile",
        "blokIdx.x} * blockDim.x",
        "pass a.contiguous()",
        "compiled ('add_gelu.cu',)",
    ),
    "02_aten": (
        "has no member named ‘tolist’",
        "float64 by a cast          [0.0, 1.875, 0.0]",
        "expected scalar type Float but found Double",
        "dangling  [nan, nan, nan, nan]",
        "not implemented for 'Long'",
    ),
    "03_jit": (
        "-DTORCH_EXTENSION_NAME=plain_add_v1",
        "Instruction 'setmaxnreg.dec' not supported on .target 'sm_90'",
        "64 B of stack",
    ),
    "04_contiguity": (
        "4,032 of 4,096 elements are wrong",
        "a must be contiguous, got shape [64, 64] with strides [1, 64]",
        "trusts: WRONG",
        "misaligned address",
    ),
    "05_streams": (
        "careful:  1 + 1 = 2.0\ncareless: 1 + 1 = 0.0",
        "without an event: 1 + 1 = 0.0\nwith an event:    1 + 1 = 2.0",
        "Mismatched elements: 1000 / 1000",
    ),
    "06_errors": (
        "No element was written",
        "FAILS 2 launch on bad data",
        "hello from thread 3",
        "1 + 1, hurried: 0.0",
        "elements of the neighbour that changed: 24",
        "the input was overwritten: True",
        "one_sided.cu does not define",
        "outside of `out` (tensor out[1000] float32)",
        "race in __shared__ tile",
    ),
    "10_elementwise": (
        "swiglu: the launch failed: misaligned address",
        "swiglu    backward: 11.0 n composed, 5.0 n",
        "requests: 144 and 1152",
        "16 bytes a lane where that is possible",
    ),
    "11_sum": (
        "conflict between blocks in `sums`",
        "16 → 4",
        "same bits promised: True",
        "16 atomic additions for 16 blocks",
    ),
    "12_softmax": (
        "race in __shared__ found",
        "4096 ones added up in bfloat16: 256.0",
        "gradcheck: True",
        "right, in two reads and no barrier",
    ),
    "13_layer_norm": (
        "rung 1: 6.0 trips, 4 barriers a row",
        "layer_norm/shortcut is wrong for float32 (6, 50) offset",
        "gradcheck: passed",
        "the losses are at most",
    ),
    "14_transpose": (
        "moved: 4.50 times what must be",
        "race in __shared__ tile",
        "padding 2:   6144 wavefronts, turns for a column: 2",
    ),
    "15_scan": (
        "8 steps, 1793 additions",
        "race in __shared__ sums",
        "gradcheck: passed",
    ),
    "20_matmul": (
        "race in __shared__ a_tile",
        "rung 2 → rung 3: 13 times fewer bytes",
        "{'6_vectorized': 2, '7_warp_tiles': 1}",
        "right, but 2.06 wavefronts for a warp's multiply-add",
    ),
    "21_tensor_cores": (
        "2_mma_sync.cu, line 47: asm: inline PTX cannot run on the CPU machine",
        "256, swizzled            1 turns",
        "bands of 16       16 strips of A,  9 of B:    71 MB",
        "right, but it asks for 73,728 bytes, and rung 1 for 73,728",
    ),
}


def outputs(cell) -> str:
    """All text that a cell put out, without blank lines; last what the loader says of builds."""
    texts = []
    for output in sorted(cell.get("outputs", ()), key=lambda o: o.get("name") == "stderr"):
        texts.append(output.get("text", ""))
        texts.append(output.get("data", {}).get("text/plain", ""))
        texts += output.get("traceback", ())
    return re.sub(r"\n+", "\n", re.sub(r"\x1b\[[\d;]*m", "", "\n".join(texts)))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(re.findall(r"^# ", "\n".join(text), re.MULTILINE)) == 1
    assert len(notebook.cells) <= 28
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
    """What is meant to fail fails; an exercise's checker refuses the start, not the solution."""

    def status() -> str:
        command = ["git", "status", "--porcelain"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout

    before = status()
    notebook = execute_with_solutions(path)
    assert status() == before
    for cell in notebook.cells:
        if "raises-exception" in tags(cell):
            assert failed(cell), f"this cell should fail:\n{cell.source}"
    for words in PROMISES.get(path.stem, ()):
        assert words in "\n".join(map(outputs, notebook.cells)), words


def test_the_course_lists_every_notebook():
    text = (FOLDER / "README.md").read_text()
    assert not [path.name for path in NOTEBOOKS if f"]({path.name})" not in text]


def test_each_statement_has_a_section_that_shows_it():
    text = (FOLDER / "README.md").read_text()
    rows = text.split("| statement | shown in |\n")[1].splitlines()[1:]
    assert len(rows) > 20
    for row in rows:
        name = ""
        for part in row.split("|")[2].strip().split("; "):
            links = re.findall(r"\]\((.*?)\)", part)
            name = links[-1] if links else name
            section = part.rpartition("): ")[2]
            if section != part or not links:  # else the whole notebook shows it
                assert section in sections(FOLDER / name), (name, section)


def sections(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^##+ (.*)$", text, re.MULTILINE)


def test_00_lists_every_notebook():
    text = (FOLDER / "00_your_machine.ipynb").read_text()
    assert not [path.name for path in NOTEBOOKS[1:] if f"({path.name})" not in text]


def test_outputs_do_not_tell_where_the_repository_was(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACES", f"{ROOT}/simt/machine.py {Path.home()}/.cache")
    cell = nbformat.v4.new_code_cell("import os\n\nprint(os.environ['PLACES'])")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "one.ipynb")
    refresh(tmp_path / "one.ipynb")
    ran = nbformat.read(tmp_path / "one.ipynb", as_version=4)
    assert outputs(ran.cells[0]).strip() == "./simt/machine.py ~/.cache"
    assert ran.metadata["outputs_of"] == digest(ran)


def test_outputs_do_not_tell_how_long_a_build_took(tmp_path):
    said = "building add/1: compiling add.cpp, 2 s\\nkept\\n"
    cell = nbformat.v4.new_code_cell(f"import sys\nprint('{said}', end='', file=sys.stderr)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "one.ipynb")
    refresh(tmp_path / "one.ipynb")
    assert outputs(nbformat.read(tmp_path / "one.ipynb", as_version=4).cells[0]).strip() == "kept"


def failed(cell) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


def test_runs_from_another_folder(tmp_path):
    """As VS Code and scripts start notebooks."""
    notebook = nbformat.read(FOLDER / "01_vector_add.ipynb", as_version=4)
    notebook.cells = notebook.cells[:2]
    nbformat.write(notebook, tmp_path / "01.ipynb")
    ran = execute(tmp_path / "01.ipynb", ROOT)
    assert "backend" in outputs(ran.cells[1])


@pytest.mark.parametrize("solution, good", [("answer = 42", True), ("answer = 41", False)])
def test_a_solution_is_judged(tmp_path, solution, good):
    new = nbformat.v4
    text = f"<details><summary>Solution</summary>\n\n```python\n{solution}\n```\n\n</details>"
    cells = [
        new.new_code_cell("answer = 1", metadata={"tags": ["exercise"]}),
        new.new_code_cell(
            "assert answer == 42", metadata={"tags": ["checker", "raises-exception"]}
        ),
        new.new_markdown_cell(text),
    ]
    nbformat.write(new.new_notebook(cells=cells), tmp_path / "one.ipynb")
    if good:
        assert failed(execute_with_solutions(tmp_path / "one.ipynb").cells[1])
    else:
        with pytest.raises(CellExecutionError):
            execute_with_solutions(tmp_path / "one.ipynb")
