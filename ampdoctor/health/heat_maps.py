"""Heat maps of many tensors over a run's steps; each column and row is the worst of those that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ampdoctor.diagnosis.health.tensor_state import MEASURES, measured
from ampdoctor.evidence.log_records import DetailLine, column_of
from ampdoctor.evidence.report_health import HeatMap, MapName

MOST_COLUMNS = 400
MOST_ROWS = 200
MOST_CELLS = 480_000  # all maps of a run together: six of full size, some 4 MB of a page
SHOWN: tuple[tuple[MapName, str], ...] = (
    ("norm", "gradient"),
    ("zero_share", "gradient"),
    ("flushed_share", "gradient"),
    ("log2_headroom", "gradient"),
    ("norm", "parameter"),
    ("update_ratio", "parameter"),
    ("update_ratio", "update"),
    ("amax", "activation"),
    ("log2_headroom", "activation"),
    ("flushed_share", "activation_gradient"),
)
"""The measures that are drawn, and the role of their tensors."""
_LOWEST_IS_WORST = frozenset({"log2_headroom"})
_BY_CHANGE = frozenset({"norm", "amax", "update_ratio"})
"""No value of these is bad in itself: the worst is farthest from its tensor's median, in powers of two."""
_HELD = 2 * MOST_COLUMNS

_Values = NDArray[np.float64]
_NONE = np.empty(0, np.intp)


@dataclass(slots=True)
class _Growing:
    """A map that is still growing: at most `_HELD` columns; beyond that the worse of two neighbours is kept."""

    name: MapName
    rows: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    columns: list[_Values] = field(default_factory=list)
    _last: tuple[Sequence[str], NDArray[np.intp], NDArray[np.intp]] = ((), _NONE, _NONE)

    def rows_of(self, names: Sequence[str], known: NDArray[np.intp]) -> NDArray[np.intp]:
        """Returns the rows of the `known` names."""
        if names is not self._last[0] or not np.array_equal(known, self._last[1]):
            rows = [self.rows.setdefault(names[at], len(self.rows)) for at in known.tolist()]
            self._last = names, known, np.array(rows, np.intp)
        return self._last[2]

    def add(self, step: int, rows: NDArray[np.intp], values: _Values) -> None:
        if not self.steps or self.steps[-1] != step:
            if len(self.steps) >= _HELD:
                self._halve()
            self.steps.append(step)
            self.columns.append(np.full(len(self.rows), np.nan))
        column = self.columns[-1]
        if len(column) < len(self.rows):
            column = self.columns[-1] = np.append(column, np.full(len(self.rows) - len(column), np.nan))
        lowest = self.name in _LOWEST_IS_WORST
        (np.fmin if lowest else np.fmax).at(column, rows, values)  # a module that is called twice has two values

    def forget_from(self, step: int) -> None:
        """Drops the steps from `step` on."""
        kept = [at for at, known in enumerate(self.steps) if known < step]
        self.steps = [self.steps[at] for at in kept]
        self.columns = [self.columns[at] for at in kept]

    def table(self) -> _Values:
        """Returns an array of shape (tensors, steps)."""
        table = np.full((len(self.rows), len(self.columns)), np.nan)
        for at, column in enumerate(self.columns):
            table[: len(column), at] = column
        return table

    def _halve(self) -> None:
        pairs = np.arange(len(self.steps)).reshape(-1, 2)
        kept = _worst_columns(self.name, self.table(), list(pairs))
        self.steps = [self.steps[at] for at in kept]
        self.columns = [self.columns[at] for at in kept]


class Maps:
    """All maps of one optimizer's details."""

    def __init__(self) -> None:
        self._maps = {key: _Growing(key[0]) for key in SHOWN}
        self._addresses: tuple[Sequence[object], ...] = ()  # table, tensors and roles of the last line
        self._names: list[str] = []
        self._of_role: dict[str, NDArray[np.intp]] = {}
        self.headroom: dict[int, float] = {}
        """The least headroom of the gradients at each measured step."""

    def add(self, line: DetailLine, table: Sequence[str]) -> None:
        """Adds a line with the tensors of a step, or some of them; `table` holds their names."""
        if not line.tensors:
            return
        measures = measured(line.tensors)
        tensors, roles = (tuple(column_of(line.tensors, one)) for one in ("tensor", "role"))
        if self._addresses != (table, tensors, roles):  # most lines have those of the line before
            self._addresses = (table, tensors, roles)
            self._names = [table[at] if at < len(table) else f"#{at}" for at in tensors]
            self._of_role = {role: np.flatnonzero(np.array(roles) == role) for role in set(roles)}
        for (name, role), growing in self._maps.items():
            values = measures[MEASURES.index(name)]
            at = self._of_role.get(role, _NONE)
            known = at[~np.isnan(values[at])]
            if not len(known):
                continue
            growing.add(line.step, growing.rows_of(self._names, known), values[known])
            if (name, role) == ("log2_headroom", "gradient"):
                least = float(values[known].min())
                self.headroom[line.step] = min(self.headroom.get(line.step, least), least)

    def forget_from(self, step: int) -> None:
        """Drops the steps that a later attempt has undone."""
        for growing in self._maps.values():
            growing.forget_from(step)
        self.headroom = {at: value for at, value in self.headroom.items() if at < step}

    def heat_maps(self) -> tuple[HeatMap, ...]:
        """Returns the maps that have numbers."""
        there = [(key, growing) for key, growing in self._maps.items() if growing.steps]
        rows = sum(min(len(growing.rows), MOST_ROWS) for _, growing in there)
        columns = max(min(MOST_COLUMNS, MOST_CELLS // max(rows, 1)), 2)
        return tuple(_heat_map(key[0], key[1], growing, columns) for key, growing in there)


def _badness(name: MapName, table: _Values) -> _Values:
    """Returns how bad each cell is; -inf where it is unknown."""
    if name in _BY_CHANGE:
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(np.abs(table))
            finite = np.where(np.isfinite(logs), logs, np.nan)
            usual = _medians(finite)
            bad = np.abs(logs - usual[:, None])
        bad = np.where(np.isinf(table), np.inf, np.where(table == 0, 0.0, bad))
    else:
        bad = -table if name in _LOWEST_IS_WORST else table
    return np.where(np.isnan(bad), -np.inf, bad)


def _medians(table: _Values) -> _Values:
    """Returns the median of each row's known values; NaN where it has none."""
    ordered = np.sort(table, axis=1)
    known = np.isfinite(ordered).sum(axis=1)
    return np.asarray(ordered[np.arange(len(ordered)), np.maximum(known - 1, 0) // 2])


def _worst_columns(name: MapName, table: _Values, spans: Sequence[NDArray[np.intp]]) -> list[int]:
    worst = _badness(name, table).max(axis=0, initial=-np.inf)
    return [int(span[np.argmax(worst[span])]) for span in spans]


def _heat_map(name: MapName, role: str, growing: _Growing, most: int) -> HeatMap:
    table, tensors = growing.table(), list(growing.rows)
    if len(growing.steps) > most:
        kept = _worst_columns(name, table, np.array_split(np.arange(len(growing.steps)), most))
    else:
        kept = list(range(len(growing.steps)))
    rows = np.arange(len(tensors))
    if len(tensors) > MOST_ROWS:
        worst = _badness(name, table).max(axis=1, initial=-np.inf)
        rows = np.sort(np.argsort(-worst, kind="stable")[:MOST_ROWS])
    return HeatMap(
        name=name,
        role=role,
        steps=tuple(growing.steps[at] for at in kept),
        tensors=tuple(tensors[at] for at in rows),
        of=len(tensors),
        values=tuple(tuple(None if value != value else value for value in table[at, kept].tolist()) for at in rows),  # noqa: PLR0124 - NaN is not itself
    )
