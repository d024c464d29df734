"""Run the notebooks and keep their outputs: ``python -m lab.notebooks [path ...]``.

What is committed are the outputs of a GPU run. Each refreshed notebook records which code its
outputs came from, so that a test notices when the two no longer belong together.
"""

import hashlib
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

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
    where = {"metadata": {"path": str(folder or path.parent)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    return notebook


def refresh(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    notebook = execute(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: a difference at every run
    notebook.metadata["outputs_of"] = digest(notebook)
    nbformat.write(notebook, path)


def main() -> None:
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        print(path.name, flush=True)
        refresh(path)


if __name__ == "__main__":
    main()
