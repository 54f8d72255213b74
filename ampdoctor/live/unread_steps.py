"""Updates that were made before anyone could know their numbers, and a fused optimizer that skips a sick one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ampdoctor.hooks.process_state import are_several
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.loop_watch import Attempt
from ampdoctor.live.numbers.readings import StepReading

State = Literal["changed", "intact"]
_MOST = 64
"""Updates whose numbers may be on their way; of others none come."""
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


def too_late(news: LateNews) -> str:
    """What is said of a step that has changed its weights before anyone knew."""
    said = TOO_LATE.format(step=news.step, what=news.what)
    return said + (UNREAD_BEFORE.format(unread=news.unread) if news.unread else "")


def ways_out(bundle: str | None, model: str | None, *, records: bool) -> str:
    """How a sick step is come to again, where it was told only after its update.

    Args:
        bundle: Its bundle, if one was kept.
        model: What `--model` takes for it, if that is known.
        records: The batches of the last updates are kept.
    """
    there = "from which the training is run again" if records else RECORD
    if bundle is not None:
        option = f" --model {model}" if model is not None else ""
        there = f"from which its bundle is replayed: ampdoctor bisect-nan {bundle} --checkpoint LAST{option}"
    return WAYS_OUT.format(from_there=there)


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
        unread: Steps just before it whose numbers were lost: one of these may have been the first.
    """

    step: int
    optimizer: str
    what: str
    weights: State
    unread: int = 0


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
        while len(self._steps) > _MOST:
            del self._steps[next(iter(self._steps))]

    def arrived(self, reading: StepReading) -> LateNews | None:
        """Returns what a step's numbers say too late; None where they are sound, or were read in time."""
        held = self._steps.pop((reading.optimizer, reading.step), None)
        lost = [key for key in self._steps if key[0] == reading.optimizer and key[1] < reading.step]
        for key in lost:
            del self._steps[key]
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
            step=reading.step,
            optimizer=reading.optimizer,
            what=what,
            weights="intact" if intact else "changed",
            unread=len(lost),
        )


# `Guard`: lets a fused optimizer hold a sick update back by itself, on its device.


_FLAG, _SCALE = "found_inf", "grad_scale"
"""What a fused optimizer asks itself for, and a GradScaler sets: where the flag is not 0, parameters, moments and the
count of steps stay as they are."""


class Guard:
    """Sets the flag of an optimizer before its step, and takes it away afterwards; nothing waits for a device."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor], norm: torch.Tensor | None) -> bool:
        """Let the next step be held back if its numbers are not finite.

        Args:
            optimizer: About to step without a scaler.
            losses: What its gradients come of; not looked at where several processes share a step, which would then
                decide apart.
            norm: Of its gradients.

        Returns:
            Whether it can: it is fused, its gradients have a norm of their own, and no part of them lies elsewhere.
        """
        self.release()
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, _FLAG) or norm is None:
            return False
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
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
        """Take the flag away."""
        while self._held:
            optimizer = self._held.pop()
            for name in (_FLAG, _SCALE):
                vars(optimizer).pop(name, None)
