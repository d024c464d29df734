"""The counters of a checked module, for people: as data, as a table, as annotated source."""

from __future__ import annotations


class Report:
    def __init__(self, name: str, library, check: bool) -> None:  # noqa: ANN001
        self._name, self._library, self._check = name, library, check
