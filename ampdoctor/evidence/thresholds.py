"""Thresholds of the rules, the values in force, and the thresholds of loss scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ampdoctor.evidence.json_records import Finite, Text, form


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number by which a rule judges, and the reason (`why`) for its default: a row of the rule's page.

    Mathematical facts (a format's largest number, whether a value is finite) are not thresholds: nobody can move them.
    `default` is an int if only whole numbers make sense. `above` is a threshold of the same rule that it must not be
    less than.
    """

    code: str  # "AMP107"
    name: str  # the configuration's key within the rule ("saturated")
    default: float
    unit: str  # "share", "steps", "relative L2 error"
    lowest: float = 0.0
    highest: float = 1.0
    why: str = ""
    above: Threshold | None = None

    @property
    def key(self) -> str:
        """Its full name: "AMP107.saturated"."""
        return f"{self.code}.{self.name}"

    @property
    def whole(self) -> bool:
        """True if only whole numbers make sense."""
        return isinstance(self.default, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedThreshold:
    """A threshold that the user has moved.

    Attributes:
        code: The rule's code.
        name: As in --threshold CODE.NAME=VALUE.
        value: What it was moved to.
        default: What it was moved from.
        unit: Of both.
    """

    code: Annotated[str, form(pattern="^AMP[0-9]{3}$")]
    name: Text
    value: Finite
    default: Finite
    unit: Text


# -- thresholds of loss scaling, which rooms below `diagnosis` and the command line's help know without their pages --

FLUSHED = Threshold("AMP301", "flushed", 1e-3, "share")
ERROR_NOTE = Threshold("AMP301", "error_note", 5e-3, "relative L2 error", 1e-6)
ERROR_WARNING = Threshold("AMP301", "error_warning", 2e-2, "relative L2 error")
ERROR_BAD = Threshold("AMP301", "error_bad", 0.1, "relative L2 error")
FP32_SHARE = Threshold("AMP303", "fp32_share", 0.2, "share")
SKIP_RATE = Threshold("AMP723", "skip_rate", 1e-3, "share", 1e-6, 0.5)
HORIZON = Threshold("AMP723", "horizon", 10_000, "steps", 1, 1_000_000)


# -- the values in force --

Moves = Mapping[str, Mapping[str, float]]
"""Values by code and name, as a configuration has them: {"AMP107": {"saturated": 0.1}}."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The values in force: `thresholds[SATURATED_8_BIT]`.

    `moved` are the thresholds that differ from their defaults, with their values, in the order of their rules' codes.
    """

    moved: tuple[tuple[Threshold, float], ...] = ()

    def __getitem__(self, threshold: Threshold) -> float:
        """The value in force."""
        if not self.moved:  # fast path: rules read thresholds at every step
            return threshold.default
        return next((value for one, value in self.moved if one.key == threshold.key), threshold.default)

    @property
    def horizon(self) -> int:
        """Steps that a simulation looks ahead (AMP723)."""
        return int(self[HORIZON])

    def listed(self) -> tuple[MovedThreshold, ...]:
        """The moved ones as a report has them."""
        return tuple(
            MovedThreshold(code=t.code, name=t.name, value=value, default=t.default, unit=t.unit)
            for t, value in self.moved
        )


DEFAULT_THRESHOLDS = Thresholds()
