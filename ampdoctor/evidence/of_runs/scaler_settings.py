"""Facts about the settings of a run's own loss scaler, besides its state."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.evidence.of_checkpoints.checkpoint import ScalerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSetting:
    """An argument of a GradScaler that its constructor takes and its first use refuses.

    Attributes:
        name: The argument ("growth_interval").
        given: Its value, as Python writes it.
        used: The value that the replay used instead.
        raised: torch's exception, type first.
    """

    name: str
    given: str
    used: float
    raised: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """The run's scaler before and after a checkpoint was loaded, and the checkpoint's.

    Attributes:
        own: The scaler as the factory made it.
        file: The scaler in the checkpoint.
        now: The scaler with which the replay goes on.
        asked: The GradScaler arguments that the run names; None if it passed a scaler, whose arguments are unknown.
    """

    own: ScalerState
    file: ScalerState
    now: ScalerState
    asked: frozenset[str] | None = None
