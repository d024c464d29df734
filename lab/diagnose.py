"""Show a compiler's errors where a learner can use them: cell, line, caret, and what it means."""

import re
from pathlib import Path
from typing import NamedTuple

import loader
from lab.hints import hint
from lab.overlay import label, relabel

SHOWN = 5  # errors after the first few follow from them

NVCC = re.compile(r"(?P<file>\S.*)\((?P<line>\d+)\): (?:\w+ )?error(?: #[\w-]+)?: (?P<text>.*)")
GCC = re.compile(
    r"(?P<file>[^\s:][^:]*):(?P<line>\d+)(?::(?P<column>\d+))?: (?:fatal )?error: (?P<text>.*)"
)
NOWHERE = re.compile(
    r"(?:At end of source: error|ptxas \S*, line \d+; error\s*|ptxas (?:error|fatal)\s*): "
    r"(?P<text>.*)"
)


class Error(NamedTuple):
    """``file`` is None where the compiler names none. ``column`` counts from 0; -1: unknown."""

    file: Path | None
    line: int
    column: int
    text: str
    source: str


def errors(output: str) -> list[Error]:
    """The errors in what nvcc or g++ printed, in order, one a line and cause."""
    found: dict[tuple, Error] = {}
    lines = output.splitlines()
    for i, printed in enumerate(lines):
        if match := NVCC.match(printed) or GCC.match(printed):
            file, number = Path(match["file"]), int(match["line"])
            source = _line(file, number)
            column = int(match.groupdict().get("column") or 0) - 1
            if column < 0 and i + 2 < len(lines) and lines[i + 2].strip() == "^":
                column = _column(source, lines[i + 1], lines[i + 2].index("^"))
            error = Error(file, number, column, match["text"], source)
        elif match := NOWHERE.match(printed):
            error = Error(None, 0, -1, match["text"], "")
        else:
            continue
        found.setdefault((error.file, error.line, hint(error.text) or error.text), error)
    return list(found.values())


def explain(error: loader.CompileError) -> str:
    """The message for people: each error with its source line, a caret, and a sentence of help."""
    found = errors(error.output)
    if not found:
        return relabel(str(error))
    parts = []
    for e in found[:SHOWN]:
        where = f"{label(e.file)}, line {e.line}: " if e.file else ""
        lines = [f"{where}{e.text}"]
        if e.source.strip():
            lines.append(f"{e.line:>5} | {e.source}")
            if e.column >= 0:
                lines.append(f"      | {' ' * e.column}^")
        if help := hint(e.text):
            lines.append(f"  Help: {help}")
        parts.append("\n".join(lines))
    more = f"{len(found) - SHOWN} more errors; " if len(found) > SHOWN else ""
    what = ", ".join(label(path) for path in error.sources)
    return "\n\n".join([f"{what} did not compile.", *parts, f"({more}whole output: {error.log})"])


def _line(file: Path, number: int) -> str:
    try:
        return file.read_text(errors="replace").splitlines()[number - 1].expandtabs(8)
    except (OSError, IndexError):
        return ""


def _column(source: str, shown: str, caret: int) -> int:
    """Where in ``source`` the caret under ``shown`` points.

    nvcc shows the line with its macros expanded and indented anew: look for what the caret is at.
    """
    rest = shown[caret:].rstrip()
    while rest:
        if rest in source:
            return source.rindex(rest)
        rest = rest[: max(rest.rfind(" "), rest.rfind("("), rest.rfind(";"), 0)]
    return -1
