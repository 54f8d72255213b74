"""What a watched loop's calls on its scaler come to, as an update is about to be made: no step is run again for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.diagnosis.replay.certain_misuse import certain_misuse
from ampdoctor.diagnosis.replay.scaler_misuse import HalfWeights, refused_call_finding, unguarded_step_finding
from ampdoctor.diagnosis.replay.scaler_verdict import PERSISTS
from ampdoctor.evidence.of_runs.trace import StepEvent
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.report.refusals import HALF_WEIGHTS
from ampdoctor.evidence.where import Where
from ampdoctor.live.loop_watch import Attempt, LoopWatch
from ampdoctor.live.numbers.clipping import Clip
from ampdoctor.loop.raised import describe
from ampdoctor.loop.torch_internals import unseen
from ampdoctor.probes.ops.half_made import HalfMade
from ampdoctor.probes.ops.source import as_source, own_line

_SHOWN_BY_CALLS = "the calls alone show it"


class Protocol:
    """Judges the calls of each update, by the rule that a watched test is judged by.

    A loop that has asked for its scale may scale and unscale in its own code, and is not judged: numbers would have to
    decide. No device is waited for, but by a clipping whose norm a scaler's step has waited for already.

    Args:
        watch: Of the loop.

    Attributes:
        half_made: Where parameters in float16 are made.
    """

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self.half_made = HalfMade()
        self._clips: list[Clip] = []
        self._skips: dict[str, tuple[int, int]] = {}  # by optimizer: updates of scalers, and skips in a row since

    def clipping(self, clip: Clip) -> None:
        """Gradients are about to be clipped by their norm."""
        self._clips = [*self._clips[-7:], clip]  # of several optimizers

    def refused(self, method: str, optimizer: Any, error: Exception, step: int) -> Finding:
        """Returns the finding for a call that a scaler has refused, where that ends the training.

        Args:
            method: The scaler's.
            optimizer: For which it was called; None for none.
            error: What the scaler has raised.
            step: The step.
        """
        halves = half_weights([] if optimizer is None else [optimizer], self._watch.recorder.names(), self.half_made)
        advice = HALF_WEIGHTS if halves is not None else HELP["scaler_misuse"]
        source = as_source(own_line())
        return refused_call_finding(step, method, describe(error), source=source, advice=advice, halves=halves)

    def is_never_updated(self, attempt: Attempt) -> bool:
        """Whether this skip makes too many in a row between which no scaler's `update` was called."""
        updates = self._watch.scalers.updates
        before, count = self._skips.get(attempt.name, (updates, 0))
        self._skips[attempt.name] = updates, count + 1 if before == updates else 1
        return self._skips[attempt.name][1] == PERSISTS

    def taken(self, attempt: Attempt) -> None:
        """An update was made."""
        self._skips.pop(attempt.name, None)

    def broken_by(self, attempt: Attempt) -> Finding | None:
        """Returns the finding for an update whose calls break the protocol; None where that is not certain.

        Args:
            attempt: The update that is about to be made, or that its scaler has skipped.
        """
        watch, scaler = self._watch, attempt.scaler
        if watch.scalers.last is None or watch.scalers.knows_scale:
            return None
        if scaler is None:
            if not (scaled := watch.recorder.still_scaled(attempt.optimizer)):
                return None
            scale = _scale_of(watch.scalers.last)
            event = StepEvent(
                kind="optimizer_step",
                optimizer=attempt.name,
                scale=scale,
                unscaled=False,
                still_scaled=scaled,
                scales=() if scale is None else (scale,),
            )
        else:
            own = {id(p.grad) for group in attempt.optimizer.param_groups for p in group["params"]}
            mine = [clip for clip in self._clips if not own.isdisjoint(clip.gradients)]
            self._clips = [clip for clip in self._clips if own.isdisjoint(clip.gradients)]
            if not mine or not watch.recorder.clipped_while_scaled(attempt.optimizer):
                return None
            if mine[-1].total.device.type != "cpu" and getattr(attempt.optimizer, "grad_scale", None) is not None:
                return None  # a fused optimizer: nobody has waited for the device
            with unseen():
                norms = float(mine[-1].total), mine[-1].max_norm
            scale = _scale_of(scaler)
            event = StepEvent(kind="unscale", optimizer=attempt.name, scale=scale, clipped=norms)
        finding = certain_misuse([event], attempt.step, as_source(own_line()))
        if finding is None:
            return None
        advice = finding.help[0].lower() + finding.help[1:].removesuffix(".")
        cure = Prescription(kind="code", value=advice, status="not_run", detail=advice, reason=_SHOWN_BY_CALLS)
        return replace(finding, prescription=cure)


def half_weights(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str], made: HalfMade
) -> HalfWeights | None:
    """The float16 parameters that got gradients, which no GradScaler unscales; None without any.

    Args:
        optimizers: Whose they are.
        names: Of parameters, by their id.
        made: Where they were made.
    """
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    halves = [p for p in held.values() if p.grad is not None and p.grad.dtype is torch.float16]
    if not halves:
        return None
    return HalfWeights(len(halves), names.get(id(halves[0]), "of an optimizer"), made.of(halves))


def past_its_scaler(watch: LoopWatch, attempt: Attempt) -> Any:
    """Returns the scaler that has scaled the losses of an update which no scaler makes; None where none has."""
    scaler = watch.scalers.last
    if attempt.scaler is not None or scaler is None or not watch.recorder.comes_of_scaled(attempt.optimizer):
        return None
    return scaler


def unguarded(attempt: Attempt, scaler: Any) -> Finding:
    """Returns the finding for an update whose gradients overflow by the scale alone, and which is made all the same."""
    where = Where(step=attempt.step, phase="optimizer", op="optimizer.step", source=as_source(own_line()))
    return unguarded_step_finding(where, _scale_of(scaler))


def _scale_of(scaler: Any) -> float | None:
    """Its scale; read from a device only where a loop is about to be told that it misuses its scaler."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, torch.Tensor):
        return None
    with unseen():
        return float(scale)
