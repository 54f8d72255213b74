"""What several checkpoints of one training show together: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ampdoctor.evidence.of_checkpoints.checkpoint import RoleSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest finite magnitude of a tensor at one moment.

    Attributes:
        amax: The magnitude.
        cast_by_autocast: True if fp16 autocast would cast this tensor, or its format is fp16 itself: it becomes Inf if
            it grows beyond fp16.
        module: Its owner, as in `named_modules()`.
        entry: The last part of its address.
        file: The file that holds it.
    """

    amax: float
    cast_by_autocast: bool
    module: str
    entry: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendPoint:
    """One checkpoint of a training.

    Attributes:
        name: Its name, for people.
        step: When it was saved; points of one trend count in one unit. None if unknown.
        roles: Totals by role.
        scale: Loss scale; None without a scaler.
        loss: The log's last loss up to then; None without one.
        largest: Largest magnitude of every weight and buffer except masks, by address.
    """

    name: str
    step: int | None
    roles: tuple[RoleSummary, ...] = ()
    scale: float | None = None
    loss: float | None = None
    largest: Mapping[str, Largest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Several checkpoints of one training.

    Attributes:
        points: In order.
        unit: What their steps count, for sentences.
    """

    points: Sequence[TrendPoint]
    unit: str = "step"

    @property
    def dated(self) -> list[TrendPoint]:
        """The points with a known step."""
        return [point for point in self.points if point.step is not None]
