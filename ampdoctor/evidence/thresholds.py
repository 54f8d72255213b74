"""Thresholds of the rules, the values in force, and the thresholds of loss scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ampdoctor.evidence.json_records import Finite, Text, form


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One number by which a rule judges, and the reason (`why`) for its default.

    Mathematical facts (a format's largest number, whether a value is finite) are not thresholds: nobody can move them.
    `default` is an int if only whole numbers make sense. `above` is a threshold of the same rule that it must not be
    less than.
    """

    code: str  # "AMP107"
    name: str  # the configuration's key within the rule ("saturated")
    default: float
    unit: str  # "share", "steps", "relative L2 error"
    why: str
    lowest: float = 0.0
    highest: float = 1.0
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


# -- thresholds of loss scaling; every other is in the file of its rule, in `diagnosis` --

FLUSHED = Threshold(
    code="AMP301",
    name="flushed",
    default=1e-3,
    unit="share",
    why="Share of nonzero gradient elements that may become zero: what adaptive loss scaling aims at (Zhao et al., "
    "arXiv 1910.12385). Of profile and recommend.",
)
ERROR_NOTE = Threshold(
    code="AMP301",
    name="error_note",
    default=5e-3,
    unit="relative L2 error",
    lowest=1e-6,
    why="Error of the weight gradients that is as good as bf16's (measured: 3.3e-3 to 5.5e-3). Of profile and "
    "recommend, whose choice of a loss scale aims at it too.",
)
ERROR_WARNING = Threshold(
    code="AMP301",
    name="error_warning",
    default=2e-2,
    unit="relative L2 error",
    why="From here on training was measurably worse (12-block transformer: up to 7e-3 it equals fp32's, 1.5e-2 to 9e-2 "
    "costs loss).",
    above=ERROR_NOTE,
)
ERROR_BAD = Threshold(
    code="AMP301",
    name="error_bad",
    default=0.1,
    unit="relative L2 error",
    why="From here on it failed to learn (same measurement: at 0.3 it does).",
    above=ERROR_WARNING,
)
FP32_SHARE = Threshold(
    code="AMP303",
    name="fp32_share",
    default=0.2,
    unit="share",
    why="Share of the parameters beyond which fp32 modules are no longer the cheap answer (our default).",
)
SKIP_RATE = Threshold(
    code="AMP707",
    name="skip_rate",
    default=1e-3,
    unit="share",
    lowest=1e-6,
    highest=0.5,
    why="Share of steps that a scaler may skip once it has settled: what OpenSeq2Seq's LogMax scaler aims at. Of "
    "recommend, which derives the growth interval from it.",
)
HORIZON = Threshold(
    code="AMP707",
    name="horizon",
    default=10_000,
    unit="steps",
    lowest=1,
    highest=1_000_000,
    why="Steps ahead over which skips are counted in a simulation, which goes through it step by step: a short "
    "training run. Of recommend.",
)


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
        """Steps that a simulation looks ahead (AMP707)."""
        return int(self[HORIZON])

    def listed(self) -> tuple[MovedThreshold, ...]:
        """The moved ones as a report has them."""
        return tuple(
            MovedThreshold(code=t.code, name=t.name, value=value, default=t.default, unit=t.unit)
            for t, value in self.moved
        )


DEFAULT_THRESHOLDS = Thresholds()
