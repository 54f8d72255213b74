"""Columns of a log that are there, and have no number: a text, a truth value, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampdoctor.checkpoints.log_files import known_fields, step_of, unread_in
from ampdoctor.evidence.report import ErrorNote, Skipped

MANY = 8
"""Empty losses, up to the last, behind which numbers may be NaN: AMP703's hopeless steps."""
_JUDGED = {"loss": "loss", "grad_norm": "gradient norm", "scale": "loss scale"}
_TOLD = {"step": "number of the step", **_JUDGED}


@dataclass(slots=True)
class _Column:
    numbers: int = 0
    texts: int = 0
    empty: int = 0
    empty_since: int = 0
    longest: int = 0

    def ends_empty(self) -> bool:
        """Whether it is empty at the end for longer than it ever was before, as where it is written now and then."""
        return self.numbers > 0 and self.empty_since >= MANY and self.empty_since > self.longest

    @property
    def rows(self) -> int:
        return self.numbers + self.texts + self.empty


@dataclass(slots=True)
class Unread:
    """Counts, of each number that is judged, the rows that have one and those that have a column without one."""

    _columns: dict[str, _Column] = field(default_factory=dict)

    def hear(self, row: Mapping[str, Any]) -> None:
        """Takes a row: its values by the names of their columns."""
        numbers = known_fields(row)
        if "step" in numbers and step_of(numbers) is None:
            del numbers["step"]
            self._column("step").texts += 1
        for name in numbers.keys() & _TOLD.keys():
            column = self._column(name)
            column.longest = max(column.longest, column.empty_since)
            column.numbers, column.empty_since = column.numbers + 1, 0
        beside = not numbers.keys().isdisjoint(_JUDGED)  # else the row is about something else
        for name, empty in unread_in(row):
            if name in _TOLD:
                column = self._column(name)
                column.texts += not empty
                column.empty += empty
                column.empty_since += empty and beside

    def _column(self, name: str) -> _Column:
        return self._columns.setdefault(name, _Column())

    def checks(self) -> dict[str, str]:
        """Returns, by the name of its check, what is said of a number that is never there."""
        return {
            _JUDGED[name]: f"not judged: none of {one.texts + one.empty} values is a number"
            for name, one in self._columns.items()
            if name in _JUDGED and not one.numbers and (one.texts or name == "loss")
        }

    def errors(self, log: str) -> Iterator[ErrorNote]:
        """Yields what keeps a log from being judged."""
        for name, one in self._columns.items():
            if name not in {"loss", "step"}:
                continue
            what = _TOLD[name]
            if one.texts >= max(one.numbers, 1) or (name == "loss" and one.empty and not one.numbers):
                count = one.rows - one.numbers
                message = f"The {what} is no number in {count:,} of {one.rows:,} rows of {log}."
            elif name == "loss" and one.ends_empty():
                message = (
                    f"The loss is empty in the last {one.empty_since:,} rows of {log}, and was a number before: some "
                    "loggers write nothing, or null, for NaN."
                )
            else:
                continue
            yield ErrorNote(what=f"{log}: {what}", kind="unreadable", message=message)

    def left_out(self) -> Iterator[Skipped]:
        """Yields what else is said of values that are no numbers."""
        for name, one in self._columns.items():
            if one.numbers > one.texts > 0:
                what = f"a {_TOLD[name]}" if one.texts == 1 else f"{one.texts:,} values of the {_TOLD[name]}"
                yield Skipped(what=what, reason="it is no number" if one.texts == 1 else "they are no numbers")
