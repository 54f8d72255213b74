"""Judges a watched loop's scaler calls and gradients at each update; no step is run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ampdoctor.diagnosis.replay.nonfinite import MISUSE_ADVICE, for_optimizer, refusal_advice
from ampdoctor.diagnosis.replay.scaler import (
    PERSISTS,
    Cuts,
    HalfWeights,
    certain_misuse,
    misuse_by_hand,
    refused_call_finding,
    stepped_past_finding,
    unguarded_step_finding,
)
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.report_replay import HALF_WEIGHTS
from ampdoctor.evidence.run_facts import Handling
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.callbacks import Clip
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.program import Clipped, Instruction, Unscaled
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.loop_watch import LoopWatch, UpdateAttempt
from ampdoctor.probes.user_code import HalfMade, as_source, called_with, own_line

_SHOWN_BY_CALLS = "the calls alone show it"


class Protocol:
    """Judges each update's calls by a replay's rule, and by samples of its gradients; waits only where a scaler has."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self.half_made = HalfMade()  # where float16 parameters are made
        self._clips: list[Clip] = []
        self._past: tuple[int, Source | None] | None = None  # the last step past the scaler, and its line
        self._cuts: dict[str, Cuts] = {}  # by optimizer
        self._skips: dict[str, tuple[int, int]] = {}  # by optimizer: updates of scalers, and skips in a row since

    def clipping(self, clip: Clip) -> None:
        """Called before gradients are clipped by their norm."""
        self._clips = [*self._clips[-7:], clip]  # there may be several optimizers

    def refused(self, method: str, optimizer: Any, error: Exception, step: int) -> Finding:
        """Returns the finding for a scaler's method that has raised, where that ends the training."""
        halves = half_weights([] if optimizer is None else [optimizer], self._watch.recorder.names(), self.half_made)
        said = describe(error)
        if method == "update" and self._past is not None and halves is None:
            step, source = self._past
            advice = MISUSE_ADVICE["optimizer.step"]
            return refused_call_finding(step, method, said, source=source, advice=advice, past=True)
        advice = HALF_WEIGHTS if halves is not None else for_optimizer(refusal_advice(said), called_with())
        return refused_call_finding(step, method, said, source=as_source(own_line()), advice=advice, halves=halves)

    def is_never_updated(self, attempt: UpdateAttempt) -> bool:
        """Whether this skip makes too many in a row without a call of any scaler's `update`."""
        updates = self._watch.scalers.updates
        before, count = self._skips.get(attempt.name, (updates, 0))
        self._skips[attempt.name] = updates, count + 1 if before == updates else 1
        return self._skips[attempt.name][1] == PERSISTS

    def taken(self, attempt: UpdateAttempt) -> None:
        """Called after an update was made."""
        self._skips.pop(attempt.name, None)

    def broken_by(self, attempt: UpdateAttempt) -> Finding | None:
        """Returns the finding for an update, made or skipped, whose calls certainly break the protocol; else None."""
        watch = self._watch
        if watch.scalers.last is None and attempt.unscaled_by is None:  # a loop without a scaler
            self._past = None
            self._clips.clear()
            return None
        scaled = watch.recorder.of_scaled(attempt.optimizer)
        self._past = (attempt.step, as_source(own_line())) if scaled and attempt.scaler is None else None
        norms = self._clipped(attempt)
        finding = self._of_calls(attempt, scaled, norms)
        if finding is None and scaled:
            finding = self._of_numbers(attempt, norms)
        if finding is None or finding.prescription is not None:
            return finding
        variable = "" if attempt.scaler is None else called_with()
        advice = for_optimizer(finding.help[0].lower() + finding.help[1:].removesuffix("."), variable)
        cure = Prescription(kind="code", value=advice, status="not_run", detail=advice, reason=_SHOWN_BY_CALLS)
        return replace(finding, prescription=cure)

    def _of_calls(
        self, attempt: UpdateAttempt, scaled: Sequence[Instruction], norms: tuple[float, float] | None
    ) -> Finding | None:
        """Judges by the calls alone; `scaled` as in `StepRecorder.of_scaled`."""
        watch, scaler = self._watch, attempt.scaler
        if attempt.unscaled_by is not None and not watch.recorder.reads.any:
            return stepped_past_finding(attempt.step, as_source(own_line()), _scale_of(attempt.unscaled_by))
        if watch.scalers.last is None or watch.scalers.knows_scale:
            return None
        kinds = [type(one) for one in scaled]
        still, early = 0, None
        if scaler is None and kinds and Unscaled not in kinds and Clipped not in kinds:
            still = watch.recorder.unedited(attempt.optimizer)
        elif scaler is not None and Clipped in kinds and Unscaled not in kinds[: kinds.index(Clipped)]:
            early = norms
        if not still and early is None:
            return None
        scale = _scale_of(watch.scalers.last if scaler is None else scaler)
        if scale is None:
            return None
        return certain_misuse(attempt.step, as_source(own_line()), scale, still_scaled=still, clipped=early)

    def _clipped(self, attempt: UpdateAttempt) -> tuple[float, float] | None:
        """The gradients' norm before clipping, and the limit; None without a clipping, or where the host would wait."""
        own = {id(p.grad) for p in parameters_of(attempt.optimizer)}
        mine = [clip for clip in self._clips if not own.isdisjoint(clip.gradients)]
        self._clips = [clip for clip in self._clips if own.isdisjoint(clip.gradients)]
        waited = attempt.scaler is not None and not attempt.is_called_either_way  # a fused optimizer never waits
        if not mine or (mine[-1].total.device.type != "cpu" and not waited):
            return None
        with unseen():
            return float(mine[-1].total), mine[-1].max_norm

    def _of_numbers(self, attempt: UpdateAttempt, norms: tuple[float, float] | None) -> Finding | None:
        """Judges by the changes that the loop's own code made to scaled gradients, where the host may read numbers."""
        watch, optimizer = self._watch, attempt.optimizer
        scaler = attempt.scaler or attempt.unscaled_by or watch.scalers.last
        on_host = all(p.device.type == "cpu" for p in parameters_of(optimizer))
        waited = attempt.scaler is not None and not attempt.is_called_either_way
        if scaler is None or not (on_host or waited):
            return None
        scale = _scale_of(scaler)
        if scale is None or not watch.recorder.samples.active:
            return None
        handling = Handling(
            step=attempt.step,
            scale=scale,
            unscaled=attempt.scaler is not None or attempt.unscaled_by is not None,
            by_itself=attempt.is_called_either_way or not type(optimizer).__module__.startswith("torch.optim."),
            knows_scale=watch.scalers.knows_scale,
            scaled_again=as_source(watch.recorder.scaled_again),
            before=watch.recorder.samples.while_scaled(optimizer),
            after=watch.recorder.samples.last(optimizer),
            clipped=1.0 if norms is None or not norms[0] > norms[1] > 0 else norms[1] / norms[0],
            source=as_source(own_line()),
        )
        cuts = self._cuts.setdefault(attempt.name, Cuts())
        return misuse_by_hand(handling, cuts)


def half_weights(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str], made: HalfMade
) -> HalfWeights | None:
    """Returns these optimizers' float16 parameters with gradients, which no GradScaler unscales, or None."""
    held = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer)}
    halves = [p for p in held.values() if p.grad is not None and p.grad.dtype is torch.float16]
    if not halves:
        return None
    return HalfWeights(len(halves), names.get(id(halves[0]), "of an optimizer"), made.of(halves))


def past_its_scaler(watch: LoopWatch, attempt: UpdateAttempt) -> Any:
    """Returns the scaler that scaled the losses of an update which no scaler makes; None without one."""
    scaler = watch.scalers.last
    if attempt.scaler is not None or scaler is None or not watch.recorder.of_scaled(attempt.optimizer):
        return None
    return scaler


def unguarded(attempt: UpdateAttempt, scaler: Any) -> Finding:
    """Returns the finding for an update that is made although its gradients overflow, because of the scale alone."""
    where = Where(step=attempt.step, phase="optimizer", op="optimizer.step", source=as_source(own_line()))
    return unguarded_step_finding(where, _scale_of(scaler))


def _scale_of(scaler: Any) -> float | None:
    """Returns a scaler's scale; it is read from a device only where a misuse is about to be reported."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, torch.Tensor):
        return None
    with unseen():
        return float(scale)
