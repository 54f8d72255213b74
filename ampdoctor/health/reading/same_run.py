"""Finds logs of one run in several forms, such as a table beside event files, and reads the complete one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, StepLine
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import ReadIssues
from ampdoctor.health.reading.opening import AMPDOCTOR, FoundLog

MOST_BYTES = 64 * 1024 * 1024
MOST_ROWS = 50_000  # largest log that is compared with others; a longer one is judged by itself
_ALIKE = 1e-3  # relative difference of a number in two logs of one run: one of them prints four digits
_NUMBERS = ("loss", "gradient_norm", "loss_scale", "skipped")

_Row: TypeAlias = tuple[float | None, ...]


def without_copies(logs: Sequence[FoundLog]) -> tuple[list[FoundLog], list[Skipped]]:
    """Returns the logs with numbers that no other log has, and notes about the rest; the first of two equal logs stays.

    A log is a copy where another one has all its rows in the same order and with all their numbers. Steps are not
    compared, as one logger begins at 0 and another at 1. So a copy never has a problem that the other log lacks.
    """
    if len(logs) < 2:
        return list(logs), []
    kept: list[_Held] = []
    copies: list[Skipped] = []
    for log in logs:
        held = _held(log)
        whole = next((one for one in kept if held.is_in(one)), None)
        if whole is not None:
            copies.append(_copy(log, whole.log))
            continue
        copies += [_copy(one.log, log) for one in kept if one.is_in(held)]
        kept = [*(one for one in kept if not one.is_in(held)), held]
    return [one.log for one in kept], copies


@dataclass(frozen=True, slots=True)
class _Held:
    """A log to compare with others."""

    log: FoundLog
    rows: list[_Row]  # the numbers of its steps; empty where they were not read
    has_more: bool  # whether it has more than these numbers, so that it must be read

    def is_in(self, other: _Held) -> bool:
        """Whether another log has all of it."""
        if self.has_more or not self.rows or len(self.rows) > len(other.rows):
            return False
        rest = iter(other.rows)
        return all(any(_says(one, row) for one in rest) for row in self.rows)


def _copy(log: FoundLog, whole: FoundLog) -> Skipped:
    return Skipped(what=log.shown, reason=f"the same run as {whole.shown}, which has each of its numbers")


def _held(log: FoundLog) -> _Held:
    rows: list[_Row] = []
    has_more = log.kind is AMPDOCTOR or bool(log.errors)
    try:
        if sum(file.size for file in log.state()) > MOST_BYTES:
            return _Held(log, [], has_more=True)
        for one in log.lines(ReadIssues()):
            line = one.line
            if isinstance(line, StepLine):
                there = (1.0 if told else None for told in (line.learning_rates, line.seconds))  # present or not
                rows.append((*(getattr(line, name) for name in _NUMBERS), *there))
            elif isinstance(line, EndLine):
                has_more = has_more or bool(line.exit_code or line.reason)
            if len(rows) > MOST_ROWS:
                return _Held(log, [], has_more=True)
    except CheckpointError:  # judging the log reports it
        return _Held(log, [], has_more=True)
    return _Held(log, rows, has_more)


def _says(whole: _Row, row: _Row) -> bool:
    return all(
        mine is None or (other is not None and _alike(float(mine), float(other)))
        for mine, other in zip(row, whole, strict=True)
    )


def _alike(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= _ALIKE * max(abs(one), abs(other))
