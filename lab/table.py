"""A small table that prints well in a terminal and in a notebook."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

NUMERIC = frozenset("0123456789.+-–%x×±,eE ")


@dataclass
class Table:
    """``title``, ``columns``, ``rows`` of text, and ``notes`` printed below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)

    def _is_numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column]]
        return bool(cells) and all(NUMERIC.issuperset(cell) for cell in cells)

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        right = [self._is_numeric(i) for i in range(len(self.columns))]

        def text(line: Sequence[str]) -> str:
            cells = zip(line, widths, right, strict=True)
            return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in cells).rstrip()

        body = [text(self.columns), "  ".join("-" * w for w in widths), *map(text, self.rows)]
        return "\n".join([self.title, *(body if self.rows else []), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        right = [self._is_numeric(i) for i in range(len(self.columns))]

        def cells(tag: str, line: Sequence[str]) -> str:
            ends = [f' style="text-align:{"right" if r else "left"}"' for r in right]
            pairs = zip(line, ends, strict=True)
            return "".join(f"<{tag}{end}>{html.escape(text)}</{tag}>" for text, end in pairs)

        title = html.escape(self.title)
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        if not self.rows:
            return f"<div>{title}</div>{notes}"
        head = f"<thead><tr>{cells('th', self.columns)}</tr></thead>"
        rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        return (
            f'<table><caption style="text-align:left;white-space:nowrap">{title}</caption>'
            f"{head}<tbody>{rows}</tbody></table>{notes}"
        )
