"""Which files a rung's name stands for: those of the repository, or cells of a notebook.

A cell is written to a folder named by its own text, so two notebooks never overwrite each other's
rung, and running a notebook again finds everything compiled.
"""

import hashlib
import os
import types
from pathlib import Path
from typing import NamedTuple

import loader

_cells: dict[tuple[str, str, str], Path] = {}  # (op, rung, "kernel" or "binding") → file


class Files(NamedTuple):
    """What ``loader.load()`` needs to build a rung. ``name`` is what people call it."""

    name: str
    kernel: Path
    binding: Path | None  # None: bindings/<op>.cpp


def write(op: str, rung: str, layer: str, cell: str) -> Path:
    """Make ``cell``, the body of a ``%%kernel`` or ``%%binding`` cell, the rung ``rung`` of ``op``.

    Raises:
        ValueError: the name is that of a file of the repository, or not a name.
    """
    for stem in loader.rungs(op):
        if rung in (stem, *stem.split("_", 1)):
            raise ValueError(
                f"{rung!r} is the rung kernels/{op}/{stem}.cu, which a cell does not replace. "
                f"Choose another name: %%{layer} {op}/my_{stem.split('_', 1)[-1]}"
            )
    if not rung.isidentifier():
        raise ValueError(f"a rung made in a cell needs a name like my_rung, got {rung!r}")
    # The magic's own line becomes line 1, so every line number is the one that the cell shows.
    text = f"// %%{layer} {op}/{rung}\n{cell}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = rung + (".cu" if layer == "kernel" else ".cpp")
    path = loader.cache_folder() / "cells" / digest / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)
    os.utime(path.parent)  # in use, so not to be pruned
    _cells[op, rung, layer] = path
    return path


def find(op: str, rung: str | int | os.PathLike | None = None) -> Files:
    """The files of a rung: its name, number or idea, a ``.cu`` path, or the name of a cell."""
    kernel, binding = (_cells.get((op, str(rung), layer)) for layer in ("kernel", "binding"))
    if binding and not kernel:  # a cell that replaces layer 2 only
        kernel = loader.find_rung(op, None)
    elif not kernel:
        kernel = loader.find_rung(op, rung)
        return Files(kernel.stem, kernel, None)
    return Files(str(rung), kernel, binding)


def load(op: str, rung: str | int | os.PathLike | None = None, **options) -> types.ModuleType:
    """``loader.load()``, which also knows the rungs made in this notebook's cells."""
    files = find(op, rung)
    return loader.load(op, files.kernel, binding=files.binding, **options)


def label(path: Path) -> str:
    """What to call a file in a message: the cell that it came from, or its place in the kit."""
    for (op, rung, layer), cell in _cells.items():
        if cell == path:
            return f"%%{layer} {op}/{rung}"
    return str(path.relative_to(loader.ROOT)) if path.is_relative_to(loader.ROOT) else str(path)


def relabel(text: str) -> str:
    """``text`` with the scratch files of cells called by their cells' names."""
    for (op, rung, layer), cell in _cells.items():
        text = text.replace(str(cell), f"%%{layer} {op}/{rung}")
    return text
