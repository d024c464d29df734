"""Run the notebooks and keep their outputs: ``python -m lab.notebooks [path ...]``.

What is committed are the outputs of a GPU run. Each refreshed notebook records which code its
outputs came from, so that a test notices when the two no longer belong together.
"""

import hashlib
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

PROGRESS = r"^(?:building \S+: .*|\S+ is being built by somebody else; waiting), \d+ s\n"
FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the notebook's code, whatever its outputs are."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def execute(path: Path, folder: Path | None = None) -> nbformat.NotebookNode:
    """Run every cell, as JupyterLab's Run All does, in ``folder`` (the notebook's own for None).

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that is not tagged raises-exception.
    """
    notebook = nbformat.read(path, as_version=4)
    _client(notebook, folder or path.parent).execute()
    return notebook


def execute_with_solutions(path: Path) -> nbformat.NotebookNode:
    """As ``execute``, and then each solution and its checker, in the same kernel.

    A cell tagged ``exercise`` is where the reader writes, the next one tagged ``checker`` judges
    it, and the n-th code block under a *Solution* replaces the n-th exercise.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed that must not, or a solution.
        ValueError: the numbers of exercises, checkers and solutions differ.
    """
    notebook = nbformat.read(path, as_version=4)
    checkers = [cell for cell in notebook.cells if "checker" in tags(cell)]
    exercises = [cell for cell in notebook.cells if "exercise" in tags(cell)]
    answers = solutions(notebook)
    if not len(checkers) == len(exercises) == len(answers):
        raise ValueError(
            f"{path.name} has {len(exercises)} exercises, {len(checkers)} checkers and "
            f"{len(answers)} solutions"
        )
    client = _client(notebook, path.parent)
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        for answer, checker in zip(answers, checkers, strict=True):
            for source in (answer, checker.source):  # a new cell has no tag that lets it fail
                client.execute_cell(nbformat.v4.new_code_cell(source), -1)
    return notebook


def solutions(notebook: nbformat.NotebookNode) -> list[str]:
    """The code blocks under each ``<summary>Solution</summary>``, in order."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    hidden = re.findall(r"<summary>Solution</summary>(.*?)</details>", text, re.DOTALL)
    blocks = [re.search(r"^```\w+\n(.*?)^```", part, re.DOTALL | re.MULTILINE) for part in hidden]
    return [block[1] for block in blocks if block]


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _client(notebook: nbformat.NotebookNode, folder: Path) -> NotebookClient:
    where = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where)


def refresh(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    notebook = execute(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: a difference at every run
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _without_progress(output))]
    notebook.metadata["outputs_of"] = digest(notebook)
    text = nbformat.writes(notebook)
    for folder, name in ((FOLDER.parent, "."), (Path.home(), "~")):  # tracebacks are full of them
        text = text.replace(f"{folder}/", f"{name}/")
    path.write_text(text + "\n")


def _without_progress(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """An output without the loader's signs of life, which depend on what was built before."""
    if output.get("name") == "stderr":
        output.text = re.sub(PROGRESS, "", output.text, flags=re.MULTILINE)
        return output if output.text else None
    return output


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        print(path.name, flush=True)
        refresh(path)


if __name__ == "__main__":
    main()
