"""Show what a compiler says where a learner can use it: cell, line, caret, and what it means."""

import re
from pathlib import Path
from typing import NamedTuple

import loader
from lab.hints import hint, rank
from lab.overlay import label, relabel

SHOWN = 5  # what comes later mostly follows from the first

PATTERNS = [  # nvcc's, g++'s, and those that name no line of the source
    r"(?P<file>\S.*)\((?P<line>\d+)\): (?:\w+ )?(?P<kind>error|warning)(?: #[\w-]+)?: (?P<text>.*)",
    r"(?P<file>[^\s:][^:]*):(?P<line>\d+)(?::(?P<column>\d+))?: "
    r"(?:fatal )?(?P<kind>error|warning): (?P<text>.*)",
    r"(?:At end of source: |ptxas (?:\S*, line \d+; )?)(?P<kind>error|fatal)\s*: (?P<text>.*)",
]


class Message(NamedTuple):
    """``file`` is None where the compiler names none. ``column`` counts from 0; -1: unknown."""

    kind: str  # "error" or "warning"
    file: Path | None
    line: int
    column: int
    text: str
    source: str

    def __str__(self) -> str:
        where = f"{label(self.file)}, line {self.line}: " if self.file else ""
        lines = [f"{where}{self.text}"]
        if self.source.strip():
            lines.append(f"{self.line:>5} | {self.source}")
            if self.column >= 0:
                lines.append(f"      | {' ' * self.column}^")
        if help := hint(self.text):
            lines.append(f"  Help: {help}")
        return "\n".join(lines)


def messages(output: str) -> list[Message]:
    """What nvcc, ptxas or g++ complained about, in order.

    One message a line of the source, the one with the most particular help: of the others, most
    follow from it.
    """
    found: dict[tuple, Message] = {}
    lines = output.splitlines()
    for i, printed in enumerate(lines):
        match = next(filter(None, (re.match(pattern, printed) for pattern in PATTERNS)), None)
        if not match:
            continue
        said = match.groupdict()
        kind = "warning" if said["kind"] == "warning" else "error"
        if "file" not in said:
            message = Message(kind, None, 0, -1, said["text"], "")
        else:
            file, number = Path(said["file"]), int(said["line"])
            source = _line(file, number)
            column = int(said.get("column") or 0) - 1
            if column < 0 and i + 2 < len(lines) and lines[i + 2].strip() == "^":
                column = _column(source, lines[i + 1], lines[i + 2].index("^"))
            message = Message(kind, file, number, column, said["text"], source)
        before = found.setdefault((message.file, message.line), message)
        if rank(message.text) < rank(before.text):
            found[message.file, message.line] = message
    return list(found.values())


def explain(error: loader.CompileError) -> str:
    """The errors for people: each with its source line, a caret, and a sentence of help."""
    found = [message for message in messages(error.output) if message.kind == "error"]
    if not found:
        return relabel(str(error))
    what = ", ".join(label(path) for path in error.sources)
    more = f"{len(found) - SHOWN} more errors; " if len(found) > SHOWN else ""
    parts = [f"{what} did not compile.", *map(str, found[:SHOWN])]
    return "\n\n".join([*parts, f"({more}whole output: {error.log})"])


def warnings(build: loader.Build) -> list[str]:
    """The warnings of a build that mean a mistake, explained."""
    found = messages(build.log.read_text(errors="replace"))
    return [str(m) for m in found if m.kind == "warning" and hint(m.text)]


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
