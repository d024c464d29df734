"""The counters of a checked module, for people: as data, as a table, as annotated source.

They count what the hardware would do for the launches so far. For global memory the unit is the
sector of 32 bytes; for shared memory the wavefront, one pass over the 32 banks.
"""

from __future__ import annotations

import html
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machine import Library


@dataclass(frozen=True)
class Counter:
    """What one kind of access in one line has cost. Barriers: ``requests`` counts them."""

    kernel: str
    file: str
    line: int
    space: str  # "global", "shared" or "block" (for barriers)
    kind: str  # "load", "store", "atomic" or "barrier"
    size: int  # bytes per lane
    requests: int  # by a warp at a time
    lanes: int  # of all requests together
    bytes: int  # that lanes have asked for
    units: int  # sectors or wavefronts
    ideal: int  # the fewest units that could do
    worst: int  # most units of one request

    @property
    def bytes_moved(self) -> int:
        """What global memory must move: whole sectors."""
        return 32 * self.units if self.space == "global" else 0

    @property
    def active_lanes(self) -> float:
        """Lanes that take part in a request, on average; fewer than 32 where a warp diverges."""
        return self.lanes / self.requests if self.requests else 0.0


def parse(text: str) -> list[Counter]:
    counters = []
    for line in text.splitlines():
        kernel, place, space, kind, *numbers = line.split("\t")
        file, _, number = place.rpartition(":")
        number = number if number.isdigit() else "0"
        counters.append(Counter(kernel, file, int(number), space, kind, *map(int, numbers)))
    return merge(counters)


def merge(counters: Iterable[Counter]) -> list[Counter]:
    """One entry for each kind of access of a line: a compiler may have copied the instruction."""
    groups: dict[tuple, list[Counter]] = {}
    for c in counters:
        groups.setdefault((c.file, c.line, c.kernel, c.space, c.kind, c.size), []).append(c)
    merged = []
    for (file, line, kernel, space, kind, size), group in sorted(groups.items()):
        sums = (
            sum(getattr(c, name) for c in group)
            for name in ("requests", "lanes", "bytes", "units", "ideal")
        )
        merged.append(
            Counter(kernel, file, line, space, kind, size, *sums, max(c.worst for c in group))
        )
    return merged


class Text(str):
    """A text that a notebook shows in fixed width, as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="line-height:1.25">{html.escape(self)}</pre>'


def describe(c: Counter) -> str:
    """One counter in a few words, for the margin of a listing."""
    if c.kind == "barrier":
        return f"{c.requests} barriers"
    unit = "sectors" if c.space == "global" else "wavefronts"
    text = f"{c.space} {c.kind} {c.units / c.requests:.4g} {unit}"
    if c.units > c.ideal:
        text += f", ideal {c.ideal / c.requests:.4g}"
        if c.space == "shared":
            text += f", {c.worst}-way conflict"
    if c.active_lanes < 31.95:
        text += f", {c.active_lanes:.3g} lanes"
    return text


class Report:
    """The counters of one loaded module: ``module.simt``."""

    def __init__(self, name: str, library: Library, check: bool) -> None:
        self._name, self._library, self._check = name, library, check

    def counters(self) -> list[Counter]:
        """One entry for each kind of access of each source line, since the last ``reset()``."""
        if not self._check:
            raise RuntimeError(
                f"{self._name} was loaded without the counters; load it with check=True"
            )
        return parse(self._library.counters())

    def reset(self) -> None:
        """Start counting again."""
        if self._check:
            self._library.reset()

    def totals(self) -> dict[str, int]:
        """All lines together: requests and bytes of global memory, bank conflicts, barriers."""
        counters = self.counters()
        in_global = [c for c in counters if c.space == "global"]
        shared = [c for c in counters if c.space == "shared"]
        return {
            "global_requests": sum(c.requests for c in in_global),
            "global_bytes_asked": sum(c.bytes for c in in_global),
            "global_bytes_moved": sum(c.bytes_moved for c in in_global),
            "global_bytes_ideal": sum(32 * c.ideal for c in in_global),
            "shared_requests": sum(c.requests for c in shared),
            "shared_wavefronts": sum(c.units for c in shared),
            "shared_wavefronts_ideal": sum(c.ideal for c in shared),
            "barriers": sum(c.requests for c in counters if c.kind == "barrier"),
        }

    def table(self) -> Text:
        """The counters as a table, a line for each, with totals."""
        head = ("line", "access", "requests", "lanes", "units", "ideal", "each", "ideal", "")
        rows = [head]
        for c in self.counters():
            line = f"{Path(c.file).name}:{c.line}"
            if c.kind == "barrier":
                rows.append((line, "barrier", str(c.requests), "", "", "", "", "", ""))
                continue
            note = f"{c.units / c.ideal:.1f}x too many" if c.units > 1.05 * c.ideal else ""
            rows.append((
                line, f"{c.space} {c.kind} {c.size} B", str(c.requests),
                f"{c.active_lanes:.1f}", str(c.units), str(c.ideal),
                f"{c.units / c.requests:.2f}", f"{c.ideal / c.requests:.2f}", note,
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        totals = self.totals()
        lines.append(
            f"global memory: {totals['global_bytes_moved']} bytes moved in sectors of 32, "
            f"{totals['global_bytes_ideal']} at best; "
            f"shared memory: {totals['shared_wavefronts']} wavefronts, "
            f"{totals['shared_wavefronts_ideal']} at best; {totals['barriers']} barriers"
        )
        return Text("\n".join(lines))

    def listing(self) -> Text:
        """The source, from the first line that counts to the last, with its costs beside it."""
        notes: dict[str, dict[int, list[str]]] = {}
        for c in self.counters():
            if Path(c.file).is_file():
                notes.setdefault(c.file, {}).setdefault(c.line, []).append(describe(c))
        lines = []
        for file, by_line in notes.items():
            lines.append(f"{Path(file).name}")
            linecache.checkcache(file)
            source = linecache.getlines(file)
            for number in range(max(1, min(by_line) - 3), min(len(source), max(by_line) + 2) + 1):
                text = source[number - 1].rstrip()
                note = "; ".join(by_line.get(number, []))
                lines.append(f"{number:5}  {text:<76}  {note}".rstrip())
        return Text("\n".join(lines))

    def __repr__(self) -> str:
        return str(self.table()) if self._check else f"<{self._name} on the CPU machine>"

    def _repr_html_(self) -> str:
        return Text(repr(self))._repr_html_()
