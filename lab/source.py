"""Show a rung's source, and what changed between two rungs."""

import difflib
import html
import os
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter, TerminalFormatter
from pygments.lexers import CppLexer
from pygments.lexers.c_like import CudaLexer

import loader
from lab.overlay import find, label

CONTEXT = 3  # unchanged lines around a change


@dataclass
class Source:
    """One file. Prints highlighted in a terminal and in a notebook, as plain text elsewhere."""

    title: str
    text: str
    cuda: bool = True

    def _lexer(self) -> CppLexer | CudaLexer:
        return CudaLexer() if self.cuda else CppLexer()

    def __str__(self) -> str:
        return f"{self.title}\n{_numbered(self.text)}"

    def __repr__(self) -> str:
        if not sys.stdout.isatty():
            return str(self)
        return (
            f"{self.title}\n{_numbered(highlight(self.text, self._lexer(), TerminalFormatter()))}"
        )

    def _repr_html_(self) -> str:
        # Styles inside the tags: a page that drops style sheets still shows the colours.
        formatter = HtmlFormatter(
            noclasses=True, linenos="inline", nobackground=True, cssstyles="overflow-x:auto",
            prestyles="white-space:pre;line-height:1.25;font-family:monospace",
        )  # fmt: skip
        return f"<b>{html.escape(self.title)}</b>{highlight(self.text, self._lexer(), formatter)}"


@dataclass
class Diff:
    """Two versions, line by line, with the words that differ marked."""

    title: str
    before: str
    after: str

    def lines(self) -> list[tuple[str, list[tuple[str, bool]]]]:
        """(sign, pieces): the sign is "-", "+", " ", or "…"; a piece is text and is it changed."""
        a, b = self.before.splitlines(), self.after.splitlines()
        found: list[tuple[str, list[tuple[str, bool]]]] = []
        groups = difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(CONTEXT)
        for group in groups:
            if found or group[0][1] > 0:
                found.append(("…", [(f"line {group[0][3] + 1}", False)]))
            for tag, a0, a1, b0, b1 in group:
                if tag == "equal":
                    found += [(" ", [(line, False)]) for line in b[b0:b1]]
                    continue
                old, new = _words("\n".join(a[a0:a1]), "\n".join(b[b0:b1]))
                found += [("-", line) for line in (_split(old) if a1 > a0 else [])]
                found += [("+", line) for line in (_split(new) if b1 > b0 else [])]
        return found or [("", [("(no difference)", False)])]

    def __str__(self) -> str:
        marks = {"-": ("[-", "-]"), "+": ("{+", "+}")}
        return self._text(lambda sign, piece: piece.join(marks[sign]))

    def __repr__(self) -> str:
        if not sys.stdout.isatty():
            return str(self)
        colours = {"-": ("\033[4;31m", "\033[0m"), "+": ("\033[1;32m", "\033[0m")}
        return self._text(lambda sign, piece: piece.join(colours[sign]))

    def _text(self, mark) -> str:
        lines = [self.title]
        for sign, pieces in self.lines():
            # A line that changed as a whole needs no marks inside.
            whole = all(changed or not text.strip() for text, changed in pieces)
            text = "".join(mark(sign, t) if changed and not whole else t for t, changed in pieces)
            lines.append(f"{sign} {text}".rstrip() if sign else text)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        styles = {"-": "background:#fdd;color:#000", "+": "background:#dfd;color:#000"}
        tags = {"-": "del", "+": "ins"}
        lines = []
        for sign, pieces in self.lines():
            whole = all(changed or not text.strip() for text, changed in pieces)
            text = ""
            for piece, changed in pieces:
                escaped = html.escape(piece)
                if changed and not whole:
                    escaped = f"<{tags[sign]}><b>{escaped}</b></{tags[sign]}>"
                text += escaped
            style = f' style="{styles[sign]}"' if sign in styles else ""
            lines.append(f"<span{style}>{sign} {text}</span>")
        body = "\n".join(lines)
        style = "white-space:pre;overflow-x:auto;font-family:monospace"
        return f'<b>{html.escape(self.title)}</b><pre style="{style}">{body}</pre>'


def show(op: str, rung: str | int | os.PathLike | None = None) -> Source:
    """The source of a rung (its name, number or idea, or a cell's), the last one for None.

    ``"binding"`` and ``"ops"`` show the operator's other two layers.
    """
    if rung == "ops":
        path = loader.ROOT / "ops" / f"{op}.py"
        return Source(label(path), path.read_text(), cuda=False)
    path = _path(op, rung)
    return Source(label(path), path.read_text(), cuda=path.suffix == ".cu")


def diff(op: str, a: str | int | os.PathLike, b: str | int | os.PathLike) -> Diff:
    """What rung ``b`` changes in rung ``a``, word by word."""
    first, second = _path(op, a), _path(op, b)
    return Diff(f"{label(first)} → {label(second)}", first.read_text(), second.read_text())


def _path(op: str, rung: str | int | os.PathLike | None) -> Path:
    if rung == "binding":
        return loader.find_binding(op)
    files = find(op, rung)
    replaced = rung is not None and str(rung) == files.name and files.binding
    return files.binding if replaced and files.kernel.stem != files.name else files.kernel


def _numbered(text: str) -> str:
    return "\n".join(f"{i:>4}  {line}" for i, line in enumerate(text.rstrip().split("\n"), 1))


def _words(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """The pieces of ``a`` and of ``b``, each with whether it differs."""
    x, y = (re.findall(r"\w+|[^\S\n]+|\W", text) for text in (a, b))
    blocks = difflib.SequenceMatcher(None, x, y, autojunk=False).get_matching_blocks()
    old: list[tuple[str, bool]] = []
    new: list[tuple[str, bool]] = []
    starts = [(0, 0, 0), *blocks]
    for (i, j, n), (k, m, _) in pairwise(starts):
        old += [("".join(x[i : i + n]), False), ("".join(x[i + n : k]), True)]
        new += [("".join(y[j : j + n]), False), ("".join(y[j + n : m]), True)]
    return [p for p in old if p[0]], [p for p in new if p[0]]


def _split(pieces: list[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
    """Pieces with line breaks in them, as lines of pieces."""
    lines: list[list[tuple[str, bool]]] = [[]]
    for text, changed in pieces:
        first, *others = text.split("\n")
        lines[-1].append((first, changed))
        lines += [[(other, changed)] for other in others]
    return [[piece for piece in line if piece[0]] for line in lines]
