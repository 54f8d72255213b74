"""What is known of the settings of a run's own loss scaler, beside its state."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.evidence.of_checkpoints.checkpoint import ScalerState


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSetting:
    """An argument of a GradScaler that its constructor takes and its first use refuses.

    Attributes:
        name: The argument ("growth_interval").
        given: Its value, as Python writes it.
        used: What the replay went on with in its place.
        raised: What torch says of it, type first.
    """

    name: str
    given: str
    used: float
    raised: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """The run's scaler before and after a checkpoint was loaded, and the checkpoint's.

    Attributes:
        own: As the factory made it.
        file: As the checkpoint holds it.
        now: As the replay goes on with it.
        asked: The GradScaler arguments that the run names; None where it handed over a scaler, of which that is not
            known.
    """

    own: ScalerState
    file: ScalerState
    now: ScalerState
    asked: frozenset[str] | None = None
