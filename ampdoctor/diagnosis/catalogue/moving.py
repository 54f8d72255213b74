"""Moving thresholds: which there are, and their values in force once a user has moved some."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.errors import UsageError
from ampdoctor.evidence.thresholds import Moves, Threshold, Thresholds

_CODE = re.compile(r"AMP\d{3}")


def all_thresholds() -> Mapping[str, Threshold]:
    """Return all thresholds by their full names ("AMP107.saturated"), by rule in the order of the codes."""
    return {threshold.key: threshold for rule in rules().values() for threshold in rule.thresholds}


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
        tuple((t, values[t.key]) for t in all_thresholds().values() if values.get(t.key, t.default) != t.default)
    )
    for threshold in all_thresholds().values():
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
    found = all_thresholds().get(f"{code}.{name}")
    if found is not None:
        return found
    names = [threshold.name for threshold in rules()[code].thresholds] if code in rules() else []
    if names:
        raise UsageError(f"{code} has no threshold {name!r}; it has {', '.join(names)}")
    near = difflib.get_close_matches(code.upper(), {threshold.code for threshold in all_thresholds().values()}, n=1)
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
