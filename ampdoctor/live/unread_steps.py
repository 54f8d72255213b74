"""Updates whose numbers were still on the device, and a fused optimizer that skips a sick update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.process_state import are_several
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.loop_watch import UpdateAttempt
from ampdoctor.live.numbers.readings import StepReading

_MOST = 64
"""Updates that may wait for numbers; numbers of older ones will not come."""
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
UNREAD = (
    "the numbers of step {step} are lost, and so are those of later steps where the host is as far ahead of its device "
    "(16 steps): the log has no line of them, and whether they were sick is not known"
)
UNREAD_BEFORE = "; or one of the {unread} steps just before it was, whose numbers were lost"


def too_late(news: LateFailure) -> str:
    """Returns the sentence about a sick step that was known only after its update."""
    said = TOO_LATE.format(step=news.step, what=news.what)
    return said + (UNREAD_BEFORE.format(unread=news.unread) if news.unread else "")


def ways_out(bundle: str | None, model: str | None, *, records: bool) -> str:
    """Returns what to do after a sick step that was known late; `model` is the `--model` of its `bundle`."""
    there = "from which the training is run again" if records else RECORD
    if bundle is not None:
        option = f" --model {model}" if model is not None else ""
        there = f"from which its bundle is replayed: ampdoctor bisect-nan {bundle} --checkpoint LAST{option}"
    return WAYS_OUT.format(from_there=there)


LOSS, GRADIENTS = "its loss is not finite", "its gradients are not finite"
SKIPPED = "its scaler skips it"
"""Its numbers may be non-finite because of the scale alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFailure:
    """A step that was found to be sick only after its update."""

    step: int
    optimizer: str  # its name
    what: str  # what was not finite
    intact: bool  # the update was held back on the device
    unread: int = 0  # steps just before it whose numbers were lost: one of them may have been the first sick one


class UnreadSteps:
    """The updates whose numbers have not arrived yet."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], bool] = {}

    def add(self, attempt: UpdateAttempt, *, held: bool) -> None:
        """Adds an update before it is made; with `held`, the device holds it back where its numbers are not finite."""
        self._steps[attempt.name, attempt.step] = held
        while len(self._steps) > _MOST:
            del self._steps[next(iter(self._steps))]

    def arrived(self, reading: StepReading) -> LateFailure | None:
        """Returns the news of a sick step; None where the step is sound, or was read before its update."""
        held = self._steps.pop((reading.optimizer, reading.step), None)
        lost = [key for key in self._steps if key[0] == reading.optimizer and key[1] < reading.step]
        for key in lost:
            del self._steps[key]
        if held is None:
            return None
        what = None
        if any(not math.isfinite(loss) for loss in reading.losses):
            what = LOSS
        elif reading.skipped:
            what = SKIPPED
        elif reading.sick or (reading.gradient_norm is not None and not math.isfinite(reading.gradient_norm)):
            what = GRADIENTS
        if what is None:
            return None
        intact = held or reading.skipped is True
        return LateFailure(step=reading.step, optimizer=reading.optimizer, what=what, intact=intact, unread=len(lost))


# -- a fused optimizer that holds a sick update back, on its device --

_FLAG, _SCALE = "found_inf", "grad_scale"
"""Attributes that a GradScaler sets on a fused optimizer: where the flag is not 0, parameters, moments and the count
of steps stay unchanged."""


class SkipNonFiniteUpdate:
    """Sets the flag of an optimizer before its step, and removes it afterwards; does not wait for a device."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor], norm: torch.Tensor | None) -> bool:
        """Has a fused optimizer's next step, without a scaler, held back if it is sick; returns whether it can."""
        self.release()
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, _FLAG) or norm is None:
            return False
        held = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        if any(hasattr(gradient, "to_local") for gradient in held):
            return False
        with unseen(), torch.no_grad():
            sick = norm.isfinite().logical_not()
            for loss in () if are_several() else losses:
                if loss.device == sick.device:
                    sick = sick | loss.isfinite().all().logical_not()
            flag = sick.to(torch.float32)
        setattr(optimizer, _FLAG, flag)
        setattr(optimizer, _SCALE, None)
        self._held.append(optimizer)
        return True

    def release(self) -> None:
        """Removes the flag."""
        while self._held:
            optimizer = self._held.pop()
            for name in (_FLAG, _SCALE):
                vars(optimizer).pop(name, None)
