"""The evidence of rules on tensors: the numbers of each tensor over the looks (samplings) of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ampdoctor.diagnosis.health.step_state import StepState
from ampdoctor.evidence.location import Phase, Where
from ampdoctor.evidence.log_records import DetailLine, TensorDetail, column_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:

    class _Later:  # numpy, imported on first use: a watched script imports every rule, and numbers of steps need none
        def __getattr__(self, name: str) -> Any:
            import numpy as np

            found = self.__dict__[name] = getattr(np, name)  # the next time it is there
            return found

    np = _Later()


LOOKS = 16  # looks that are kept
NEW = 3  # the last of these: their trend is compared with that of those before
LEAST_BEFORE = 6
MOST_BEFORE = 12
_ROBUST = 1.4826
MEASURES = (
    *("norm", "amax", "nonfinite", "flushed_share", "zero_share"),
    *("log2_headroom", "update_ratio", "unmoved_share", "elements", "scale"),
)
_ADDRESS = ("tensor", "role", "part", "call")

_NARROW = ("e4m3", "e5m2", "fp8", "e2m1", "fp4")

Matrix: TypeAlias = "NDArray[np.float64]"
Key = tuple[int, str, str, int]


def measured(tensors: Sequence[TensorDetail]) -> Matrix:
    """Returns (`MEASURES`, tensors); NaN where it was not measured."""
    found = np.full((len(MEASURES), len(tensors)), np.nan)
    for row, name in zip(found, MEASURES, strict=True):
        column = column_of(tensors, name)
        if column.count(None) < len(column):  # numpy takes long for None
            row[:] = column
    return found


@dataclass(slots=True)
class TensorState:
    """The last look at tensors and those before: the evidence of rules on tensors. The next look changes it.

    Attributes:
        line: The last look.
        names: The log's table of names.
        steps: (looks) attempted step of each look, the newest last.
        tensors: Index of each row's name in the log's table; `roles` and `formats` are also by row.
        measures: (`MEASURES`, rows, `LOOKS`), the newest look last; NaN where it was not measured.
        seen: Number of looks, at most `LOOKS`.
        of_steps: The steps of the same optimizer before the last look.
    """

    line: DetailLine
    steps: NDArray[np.int64]
    tensors: list[int]
    roles: NDArray[np.str_]
    formats: list[str | None]
    measures: Matrix
    seen: int = 0
    names: tuple[str, ...] = ()
    of_steps: StepState | None = None
    _of_role: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    _eight_bit: NDArray[np.int64] | None = None

    def where(self, row: int, phase: Phase = "optimizer") -> Where:
        """Returns the address of a row's tensor, by the index of its name, at the last look."""
        return Where(step=self.line.step, phase=phase, tensor=str(self.tensors[row]))

    def name(self, row: int) -> str:
        """Returns the name of a row's tensor, or of its module; "" where the log's table lacks it."""
        index = self.tensors[row]
        return self.names[index] if index < len(self.names) else ""

    def rows(self, role: str) -> NDArray[np.int64]:
        """Returns the rows of tensors in a role."""
        found = self._of_role.get(role)
        if found is None:
            found = self._of_role[role] = np.flatnonzero(self.roles == role)
        return found

    def add_rows(self, keys: Sequence[Key], formats: Sequence[str | None]) -> None:
        """Adds a row for each of some tensors, without values."""
        tensors, roles, _, _ = zip(*keys, strict=True)
        self.tensors += tensors
        self.formats += formats
        self.roles = np.concatenate([self.roles, np.array(roles, dtype=self.roles.dtype)])
        new = np.full((len(MEASURES), len(keys), LOOKS), np.nan)
        self.measures = np.concatenate([self.measures, new], axis=1)
        self._of_role.clear()
        self._eight_bit = None

    def begin(self, step: int) -> None:
        """Begins a look at another step."""
        self.measures[:, :, :-1] = self.measures[:, :, 1:]
        self.measures[:, :, -1] = np.nan
        self.steps[:-1] = self.steps[1:]
        self.steps[-1] = step
        self.seen = min(self.seen + 1, LOOKS)

    def eight_bit(self) -> NDArray[np.int64]:
        """Returns the rows of tensors in a format of 8 bits or less: each has its own scale."""
        if self._eight_bit is None:
            self._eight_bit = np.flatnonzero([one is not None and one.startswith(_NARROW) for one in self.formats])
        return self._eight_bit

    def values(self, measure: str, rows: NDArray[np.int64] | None = None) -> Matrix:
        """Returns (rows, looks) of a measure, the newest last; NaN where it was not measured."""
        matrix = self.measures[MEASURES.index(measure), :, LOOKS - self.seen :]
        return matrix if rows is None else matrix[rows]


class TensorCourses:
    """Keeps the last looks at one optimizer's tensors."""

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}
        self._addresses: Sequence[Sequence[object]] = ()  # of the last line; most lines have the same
        self._at: list[int] = []  # their rows
        self._step: int | None = None
        self.moment = TensorState(
            line=DetailLine(step=0),
            steps=np.zeros(LOOKS, np.int64),
            tensors=[],
            roles=np.array([], dtype="U20"),
            formats=[],
            measures=np.empty((len(MEASURES), 0, LOOKS)),
        )

    def add(self, line: DetailLine) -> None:
        """Adds a line; several lines of one step are one look."""
        moment = self.moment
        if line.step != self._step:
            moment.begin(line.step)
            self._step = line.step
        moment.line = line
        if not line.tensors:
            return
        addresses = [tuple(column_of(line.tensors, name)) for name in _ADDRESS]
        if addresses != self._addresses:
            keys: list[Key] = list(zip(*addresses, strict=True))
            new: dict[Key, str | None] = {}
            for key, form in zip(keys, column_of(line.tensors, "format"), strict=True):
                if key not in self._rows:
                    new.setdefault(key, form)
            if new:
                moment.add_rows(list(new), list(new.values()))
            self._rows |= {key: at for at, key in enumerate(new, start=len(self._rows))}
            self._addresses, self._at = addresses, [self._rows[key] for key in keys]
        moment.measures[:, self._at, -1] = measured(line.tensors)


@dataclass(frozen=True, slots=True)
class Break:
    """How tensors' trends have changed: `by` in robust deviations (0: too few looks), `rate` in e-folds a look."""

    by: Matrix
    rate: Matrix


def breaks(values: Matrix, floor: float, new: int = NEW) -> Break:
    """Returns how the growth of positive values has changed.

    Compares the rates of the logarithm from look to look: the mean of the last `new` against the median of at most
    `MOST_BEFORE` before, in robust deviations of one rate, times sqrt(new) (the deviation of a mean). `values` is
    (rows, looks), evenly spaced; `floor` is the least deviation of a rate.
    """
    values = values[:, -(1 + new + MOST_BEFORE) :]
    if values.shape[1] < 1 + new + LEAST_BEFORE or not len(values):
        return Break(np.zeros(len(values)), np.zeros(len(values)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rates = np.diff(np.log(values), axis=1)
        before, last = rates[:, :-new], rates[:, -new:].mean(axis=1)
        middle = medians(before)
        deviation = np.maximum(_ROBUST * medians(np.abs(before - middle[:, None])), floor)
        by = (last - middle) / deviation * np.sqrt(new)
    return Break(np.nan_to_num(by, nan=0.0, posinf=0.0, neginf=0.0), np.nan_to_num(last))


def medians(values: Matrix) -> Matrix:
    """Returns the median of each row, NaN where it has a NaN; `np.median` takes three times as long for short rows."""
    ordered, count = np.sort(values, axis=1), values.shape[1]
    middle: Matrix = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    middle[np.isnan(ordered[:, -1])] = np.nan
    return middle


def slope(steps: Sequence[int] | NDArray[np.int64], values: Matrix) -> Matrix:
    """Returns the slope of each row by least squares, in units a step; NaN in a row with a NaN."""
    at = np.asarray(steps, dtype=np.float64)
    at = at - at.mean()
    spread = float(at @ at) or 1.0
    result: Matrix = (values - values.mean(axis=1, keepdims=True)) @ at / spread
    return result


# -- weights whose norm begins to grow or to shrink, for two rules --


FLOOR = 0.003  # least deviation of a rate that is assumed, in e-folds a look


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBreak:
    """A weight whose norm changes as it has not before."""

    row: int
    by: float  # robust deviations, positive
    looks: int  # the number of last looks over which it is clearest
    before: float  # norm before these looks
    now: float  # norm at the last look


def moved_first(moment: TensorState, found: WeightBreak) -> str:
    """Returns what left the usual first during a break and shortly before: the settings only if they did."""
    steps = moment.of_steps
    if steps is None:
        return "weights"
    since = int(moment.steps[-1 - found.looks])
    return steps.first("optimizer" if steps.rising else "weights", since=since)


def weight_breaks(moment: TensorState, *, sign: int, least: float, share: float, change: float) -> list[WeightBreak]:
    """Returns the weights whose norm grows (`sign` 1) or shrinks (-1) as it has not before, the clearest first.

    `least` is in robust deviations; `change` is the e-folds of the norm within the last looks. `share` is the least
    share of the norm of all weights, now or before: a bias that starts at zero grows by any factor, which does not
    matter.
    """
    rows = moment.rows("parameter")
    norms = moment.values("norm", rows)
    if not len(rows) or norms.shape[1] < 2:
        return []
    size = np.nan_to_num(norms[:, -1])
    found: dict[int, WeightBreak] = {}
    for new in range(1, NEW + 1):
        if norms.shape[1] < 1 + new:
            break
        broken = breaks(norms, FLOOR, new)
        was = np.nan_to_num(norms[:, -1 - new])
        large = np.maximum(size, was) >= share * np.sqrt((size**2).sum())
        hit = large & (sign * broken.by >= least) & (sign * broken.rate * new >= change)
        for row in map(int, np.flatnonzero(hit)):
            by = float(sign * broken.by[row])
            if row not in found or by > found[row].by:
                found[row] = WeightBreak(
                    row=int(rows[row]), by=by, looks=new, before=float(was[row]), now=float(size[row])
                )
    return sorted(found.values(), key=lambda one: -one.by)
