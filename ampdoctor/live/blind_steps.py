"""`BlindSteps`: the updates that were made before anyone could know their numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ampdoctor.live.loop_watch import Attempt
from ampdoctor.live.numbers.readings import StepReading

State = Literal["changed", "intact"]
TOO_LATE = (
    "step {step} was sick ({what}), which a device tells only after the update: the weights may be poisoned, and "
    "nothing was run again"
)
WAYS_OUT = (
    ". Ways out: guard with a fused optimizer, which holds such an update back; look=sync, at one synchronisation a "
    "step; or the last good checkpoint, {from_there}"
)
RECORD = (
    "where record_batches=K has kept the batches of the last K updates: they are replayed from it up to the sick step"
)
HELD_BACK = (
    "step {step} was sick ({what}) and its update was held back on the device: the weights are intact, and the next "
    "sick one within {steps} steps is looked at, at one synchronisation a step until then"
)
SKIPPED = "its scaler skips it"
"""What is not finite there may be so by the scale alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateNews:
    """A step of which it is known afterwards that it was sick.

    Attributes:
        step: Its number.
        optimizer: Name of the optimizer whose it was.
        what: What was not finite in it.
        weights: Whether its update was made ("changed"), or held back on the device ("intact").
    """

    step: int
    optimizer: str
    what: str
    weights: State


class BlindSteps:
    """Remembers them until their numbers arrive."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], bool] = {}

    def add(self, attempt: Attempt, *, held: bool) -> None:
        """An update is about to be made unread.

        Args:
            attempt: The update.
            held: The device holds it back where its numbers are not finite.
        """
        self._steps[attempt.name, attempt.step] = held

    def arrived(self, reading: StepReading) -> LateNews | None:
        """Returns what a step's numbers say too late; None where they are sound, or were read in time."""
        held = self._steps.pop((reading.optimizer, reading.step), None)
        for lost in [key for key in self._steps if key[0] == reading.optimizer and key[1] < reading.step]:
            del self._steps[lost]
        if held is None:
            return None
        what = None
        if any(not math.isfinite(loss) for loss in reading.losses):
            what = "its loss is not finite"
        elif reading.skipped:
            what = SKIPPED
        elif reading.sick or (reading.gradient_norm is not None and not math.isfinite(reading.gradient_norm)):
            what = "its gradients are not finite"
        if what is None:
            return None
        intact = held or reading.skipped is True
        return LateNews(
            step=reading.step, optimizer=reading.optimizer, what=what, weights="intact" if intact else "changed"
        )
