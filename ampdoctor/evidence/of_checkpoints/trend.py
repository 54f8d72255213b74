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
        cast_by_autocast: Whether fp16 autocast would cast this tensor, or its format is fp16 itself: then Inf follows
            where it grows beyond fp16.
        module: Its owner, as in `named_modules()`.
        entry: The last part of its address.
        file: Where it lies.
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
        step: When it was saved; points of one trend count in one unit. None where it is not known.
        roles: Totals by role.
        scale: Loss scale; None without a scaler.
        loss: The last loss of the log up to then; None without one.
        largest: By address: every weight and buffer that is no mask.
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
        """Those whose step is known."""
        return [point for point in self.points if point.step is not None]
