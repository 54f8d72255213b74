"""The values of the thresholds in force: the defaults, but for those that a user has moved."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import replay_thresholds, scan_thresholds
from ampdoctor.evidence.thresholds.replay_thresholds import HORIZON
from ampdoctor.evidence.thresholds.threshold import MovedThreshold, Threshold

Moves = Mapping[str, Mapping[str, float]]
"""Values by code and name, as a configuration has them: {"AMP107": {"saturated": 0.1}}."""

_CODE = re.compile(r"AMP\d{3}")
_TABLE = [t for rules in (scan_thresholds, replay_thresholds) for t in vars(rules).values() if isinstance(t, Threshold)]
THRESHOLDS: Mapping[str, Threshold] = MappingProxyType(
    {threshold.key: threshold for threshold in sorted(_TABLE, key=lambda threshold: threshold.code)}
)
"""All thresholds by their full names ("AMP107.saturated"), by rule in the order of the codes."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as lost, as harmful, as too many: `thresholds[SATURATED_8_BIT]` is the value in force.

    Attributes:
        moved: Those that differ from their defaults, with their values, in the order of `THRESHOLDS`.
    """

    moved: tuple[tuple[Threshold, float], ...] = ()

    def __getitem__(self, threshold: Threshold) -> float:
        """The value in force."""
        return next((value for one, value in self.moved if one.key == threshold.key), threshold.default)

    @property
    def horizon(self) -> int:
        """Steps that a simulation looks ahead (AMP707)."""
        return int(self[HORIZON])

    def listed(self) -> tuple[MovedThreshold, ...]:
        """The moved ones as a report has them."""
        return tuple(
            MovedThreshold(code=t.code, name=t.name, value=value, default=t.default, unit=t.unit)
            for t, value in self.moved
        )


DEFAULT_THRESHOLDS = Thresholds()
"""Nothing is moved."""


def thresholds_of(code: str) -> tuple[Threshold, ...]:
    """The thresholds of a rule, in the order of its page; none for a rule that judges by no number."""
    return tuple(threshold for threshold in THRESHOLDS.values() if threshold.code == code)


def thresholds_from(*layers: Moves) -> Thresholds:
    """The thresholds with these values moved.

    Args:
        layers: Values by code and name; a later layer wins over those before it.

    Raises:
        UsageError: A code or a name that is not known, a value that is no number or out of its range, or values that
            contradict each other.
    """
    values: dict[str, float] = {}
    for layer in layers:
        for code, names in layer.items():
            values |= {(found := _find(code, name)).key: _checked(found, value) for name, value in names.items()}
    thresholds = Thresholds(
        tuple((t, values[t.key]) for t in THRESHOLDS.values() if values.get(t.key, t.default) != t.default)
    )
    for threshold in THRESHOLDS.values():
        least = threshold.above
        if least is not None and thresholds[threshold] < thresholds[least]:
            raise UsageError(
                f"{threshold.label} is {thresholds[threshold]:g}, below {least.label}, which is {thresholds[least]:g}: "
                "they must ascend"
            )
    return thresholds


def check_threshold(code: str, name: str, value: float) -> None:
    """Refuse a value that no combination of others could make right.

    Raises:
        UsageError: The code or the name is not known, or the value is no number or out of its range.
    """
    _checked(_find(code, name), value)


def _find(code: str, name: str) -> Threshold:
    found = THRESHOLDS.get(f"{code}.{name}")
    if found is not None:
        return found
    names = [threshold.name for threshold in thresholds_of(code)]
    if names:
        raise UsageError(f"{code} has no threshold {name!r}; it has {', '.join(names)}")
    near = difflib.get_close_matches(code.upper(), {threshold.code for threshold in THRESHOLDS.values()}, n=1)
    asked = _CODE.fullmatch(code) is not None  # another rule's code is no slip of the finger
    hint = f"did you mean {near[0]}?" if near and not asked else "`ampdoctor rule CODE` shows a rule's."
    raise UsageError(f"{code} is no rule with a threshold that can be moved; {hint}")


def _checked(threshold: Threshold, value: Any) -> float:
    """The value, an int where it is whole and only that makes sense."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{threshold.label} is {value!r}, which is no number")
    if not threshold.lowest <= value <= threshold.highest:
        raise UsageError(
            f"{threshold.label} is {value:g}, not between {threshold.lowest:g} and {threshold.highest:g} "
            f"({threshold.unit})"
        )
    if threshold.whole and value != int(value):
        raise UsageError(f"{threshold.label} is {value:g}, not a whole number ({threshold.unit})")
    return int(value) if threshold.whole else float(value)
