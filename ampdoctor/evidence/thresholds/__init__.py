"""The values of the thresholds in force: the defaults, but for those that a user has moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ampdoctor.evidence.thresholds.scaling_thresholds import HORIZON
from ampdoctor.evidence.thresholds.threshold import MovedThreshold, Threshold

Moves = Mapping[str, Mapping[str, float]]
"""Values by code and name, as a configuration has them: {"AMP107": {"saturated": 0.1}}."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as lost, as harmful, as too many: `thresholds[SATURATED_8_BIT]` is the value in force.

    Attributes:
        moved: Those that differ from their defaults, with their values, in the order of their rules' codes.
    """

    moved: tuple[tuple[Threshold, float], ...] = ()

    def __getitem__(self, threshold: Threshold) -> float:
        """The value in force."""
        if not self.moved:  # as rules ask at every step
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
"""Nothing is moved."""
