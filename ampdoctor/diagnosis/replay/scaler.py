"""Rules on a run's loss scaler: a loop that uses it wrongly (AMP407), and what it begins with."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ampdoctor.diagnosis.catalogue import REPLAYED, figure, judge, rule, scale_text
from ampdoctor.diagnosis.replay.nonfinite import HELP, MISUSE_ADVICE, cause_of, derivative_beyond, origin_numbers
from ampdoctor.diagnosis.scan.scaler import (
    DEAD_SCALER,
    FRESH_SCALER,
    FROZEN_SCALER,
    SCALER_SETTINGS,
    dead_words,
    plain,
    starting_scale,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState, is_dead
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Cause, Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import Change, Handling, ResumedScaler
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.trace import Comparison, NonFiniteOrigin, StepEvent, StepOutcome

SCALER_MISUSE = rule("AMP407", REPLAYED)
MISUSE_RATIO = SCALER_MISUSE["ratio"]
MISUSE_ERROR = SCALER_MISUSE["relative_error"]


AT_START = Where(step=0, phase="scaler", op="scaler_state")
_CLIPPINGS = ("clip_grad_norm_", "gradient clipping")
_ONE_EACH = "remove the second call: one update for each backward"


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """Trained parameters in float16; `made` is the user's line that cast them, where it was seen."""

    count: int
    first: str
    made: Source | None


def _misused(
    where: Where,
    said: str,
    evidence: Mapping[str, Any],
    *,
    severity: Severity = "error",
    advice: str = "",
    cure: Prescription | None = None,
) -> Finding:
    """Makes a finding of AMP407; without advice of its own, the order of calls is advised."""
    return SCALER_MISUSE.finding(
        severity,
        f"step {where.step}: {said}",
        where=where,
        cause="scaler_misuse",
        evidence=evidence,
        advice=f"{advice[0].upper()}{advice[1:]}." if advice else HELP["scaler_misuse"],
        prescription=cure,
    )


def lost_scale_finding(
    lost: ScalerState, own: float | None, origin: NonFiniteOrigin | None = None, cure: Prescription | None = None
) -> Finding:
    """Makes the finding for a checkpoint's settled loss scale that the run (it starts at `own`) does not continue."""
    settled = f"the checkpoint's loss scale is {scale_text(lost.scale)} after {lost.growth_tracker:,} clean steps"
    return _misused(
        AT_START if origin is None else replace(origin.where, phase="scaler"),
        f"{settled}, but {starting_scale('the run', own)}{'' if origin is None else ', and every step is skipped'}",
        {"checkpoint_scale": lost.scale, "run_scale": own, "growth_tracker": lost.growth_tracker},
        severity="warning" if origin is None else "error",
        advice="load the scaler's state with the rest of the checkpoint: scaler.load_state_dict(checkpoint['scaler'])",
        cure=cure,
    )


def unguarded_step_finding(at: NonFiniteOrigin | Where, scale: float | None) -> Finding:
    """Makes the finding for overflowed gradients that reach the weights past the scaler."""
    where = at if isinstance(at, Where) else replace(at.where, phase="optimizer", module="", op="optimizer.step")
    said = "overflow, and optimizer.step() uses them; scaler.step(optimizer) would have skipped the step"
    evidence = {"scale": scale} if isinstance(at, Where) else origin_numbers(at, ())
    return _misused(where, f"gradients scaled by {scale_text(scale)} {said}", evidence)


def stepped_past_finding(step: int, source: Source | None, scale: float | None) -> Finding:
    """Makes the finding for an optimizer that steps past the scaler on gradients that the scaler has unscaled."""
    return _misused(
        Where(step=step, phase="optimizer", op="optimizer.step", source=source),
        "optimizer.step() is called after scaler.unscale_, in place of scaler.step(optimizer). "
        "An update whose gradients overflow is made, and not skipped.",
        {"scale": scale},
        cure=Prescription.untried(MISUSE_ADVICE["optimizer.step"], "the calls alone show it"),
    )


def stepped_again_finding(step: int, source: Source | None, *, held_back: bool, scaled: bool = True) -> Finding:
    """Makes the finding for a second step on the same gradients: an error where it ignores a scaler's skip."""
    advice = MISUSE_ADVICE["optimizer.step again"] if scaled else _ONE_EACH
    first, harm = "of its last update", "Every update is made twice"
    if held_back:
        first = "with which scaler.step(optimizer) has skipped the update"
        harm = "Gradients that overflowed reach the weights"
    elif scaled:
        first = "that scaler.step(optimizer) has used"
        harm += ", and one that the scaler skips is made all the same"
    found = _misused(
        Where(step=step, phase="optimizer", op="optimizer.step", source=source),
        f"the optimizer steps again on the gradients {first}, without a backward in between. {harm}.",
        {"skipped_by_the_scaler": held_back},
        severity="error" if scaled else "warning",
        advice="" if scaled else advice,
        cure=Prescription.untried(
            advice, "the calls alone show it: a second update on the same gradients is wrong in every precision"
        ),
    )
    return found if scaled else replace(found, cause=None)


def refused_call_finding(
    step: int,
    method: str,
    raised: str,
    *,
    source: Source | None,
    advice: str,
    halves: HalfWeights | None = None,
    past: bool = False,
) -> Finding:
    """Makes the finding for a call that GradScaler refuses; `past`: because the step was made past it."""
    said = f"{'after a call of optimizer.step() ' if past else ''}the scaler refuses {method}: {raised}"
    evidence: dict[str, Any] = {"raised": raised}
    if halves is not None:
        many = halves.count != 1
        made = "" if halves.made is None else f", made so at {halves.made.file}:{halves.made.line}"
        said += (
            f" {halves.count:,} trained parameter{'s are' if many else ' is'} in fp16,"
            f"{' the first of them' if many else ''} {halves.first}{made}: a GradScaler needs weights in fp32"
        )
        evidence |= {"float16_parameters": halves.count, "first": halves.first}
        source = halves.made or source
    return _misused(
        Where(step=step, phase="scaler", op="optimizer.step" if past else f"scaler.{method}", source=source),
        said,
        evidence,
        advice=advice.removesuffix("."),
        cure=Prescription.untried(advice, "the step ends there, so no replay can stand in for it"),
    )


def suspicious(events: Sequence[StepEvent]) -> bool:
    """Returns whether gradients were used, changed or mixed while scaled; `misuse` compares whether it did harm."""
    return any(
        event.misscaled or (event.scale not in (None, 1.0) and (_used_scaled(event) or _changed_scaled(event)))
        for event in events
    )


def misuse(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """Finds calls of the step that break the scaler's protocol, where its gradients show it."""
    ratio = thresholds[MISUSE_RATIO]
    if 1 / ratio <= comparison.gradient_ratio <= ratio:
        return None
    scaled = _first(comparison, _used_scaled)
    clipped = _first(comparison, _changed_scaled)
    twice = _first(comparison, lambda event: _unscaled_twice(event, comparison.gradient_ratio))
    event = scaled or clipped or twice
    if event is None or not event.scale or event.scale == 1.0:
        return None
    if event is scaled:
        op, done = "optimizer.step", "stepped on its gradients while they were still scaled by"
    elif event is clipped:
        op = "gradient clipping" if event.clipped is None else "clip_grad_norm_"
        done = f"changed (clipped?) {event.edited} gradients while they were still scaled by"
    else:
        op, done = "unscale", "divided its gradients, which were unscaled already, once more by about"
    return _misuse_finding(comparison, event, op, f"the step {done} {scale_text(event.scale)}")


def other_readings(comparison: Comparison, first: Finding) -> tuple[Finding, ...]:
    """Returns other explanations of a misuse; one is right only if a replay with it corrected agrees."""
    used, changed = _first(comparison, _used_scaled), _first(comparison, _changed_scaled)
    if first.where.op in _CLIPPINGS and changed and _divided_twice(changed.scale, comparison.gradient_ratio):
        said = f"the step divided its gradients itself, and scaler.unscale_ again, by {scale_text(changed.scale)}"
        return (_misuse_finding(comparison, changed, "unscale", said),)
    if first.where.op == "optimizer.step" and used and _holds_anothers(comparison, used):
        said = f"gradients of another optimizer's loss, scaled by {scale_text(used.scale)}, were not cleared before"
        return (_misuse_finding(comparison, used, "optimizer.zero_grad", said),)
    return ()


def suspected_misuse(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """Returns what may be wrong with the scale of a part of the gradients; a corrected replay decides."""
    if comparison.gradient_error <= thresholds[MISUSE_ERROR]:
        return ()
    found = []
    unscaled = set[str]()  # a fused optimizer divides inside its own step: no unscale event comes first
    for event in comparison.events:
        if event.twice:
            said = f"a part of the loss goes through scaler.scale twice, by {scale_text(event.twice)} each time"
            found.append(_misuse_finding(comparison, replace(event, scale=event.twice), "GradScaler.scale", said))
        if not event.scale or (event.scale == 1.0 and not event.misscaled):
            continue
        if event.kind == "unscale":
            unscaled.add(event.optimizer)
        late = event.kind == "optimizer_step" and event.optimizer in unscaled
        times = f"scaled by {scale_text(event.scale)}"
        if event.misscaled and late:
            said = f"{event.misscaled} gradients went on to collect gradients {times} after scaler.unscale_"
            found.append(_misuse_finding(comparison, event, "scaler.unscale_", said))
        elif event.misscaled and (other := [scale for scale in event.scales if scale not in (1.0, event.scale)]):
            said = (
                f"{event.misscaled} gradients are divided by {scale_text(event.scale)}, but were scaled by "
                + " and ".join(f"{scale_text(scale)}" for scale in other)
            )
            found.append(_misuse_finding(comparison, event, "scaler.step", said))
        elif event.misscaled:
            said = (
                f"{event.misscaled} gradients are in part those of a loss that was not {times}, and are divided by it"
            )
            found.append(_misuse_finding(comparison, event, "backward", said))
        elif event.kind == "grad":
            said = f"gradients {times}, from torch.autograd.grad, went into another loss as they are"
            found.append(_misuse_finding(comparison, event, "autograd.grad", said))
    return tuple({finding.where.op: finding for finding in reversed(found)}.values())[::-1]


def used_while_scaled(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """Suspects a hook, or code that reads gradients, if nothing else explains them; a corrected replay decides."""
    after_scaling = (one for one in comparison.events if one.kind in ("unscale", "optimizer_step") and one.unscaled)
    event = next((one for one in after_scaling if one.scale not in (None, 1.0)), None)
    scaled = any(event.kind == "scale" for event in comparison.events)
    if comparison.gradient_error <= thresholds[MISUSE_ERROR] or event is None or not scaled:
        return None
    said = (
        f"gradients were used inside the step, or in a hook, while they were still scaled by {scale_text(event.scale)}"
    )
    return _misuse_finding(comparison, event, "Tensor.grad", said)


def _misuse_finding(comparison: Comparison, event: StepEvent, op: str, said: str) -> Finding:
    own = ("scale", "edited", "unscaled", "misscaled")
    return _misused(
        Where(step=comparison.step, phase="optimizer", op=op),
        f"{said}. The optimizer gets {figure(comparison.gradient_ratio)} times the gradient of fp32.",
        {"gradient_ratio": comparison.gradient_ratio, "gradient_error": comparison.gradient_error}
        | {name: getattr(event, name) for name in own}
        | {"scales": list(event.scales)},
    )


def _used_scaled(event: StepEvent) -> bool:
    return event.kind == "optimizer_step" and not event.unscaled


def _changed_scaled(event: StepEvent) -> bool:
    return event.kind == "unscale" and event.edited > 0


def _unscaled_twice(event: StepEvent, ratio: float) -> bool:
    """Whether they changed after unscaling and are too short by the scale: clipping also shortens fp32's gradients."""
    return event.kind == "optimizer_step" and event.edited > 0 and _divided_twice(event.scale, ratio)


def _divided_twice(scale: float | None, ratio: float) -> bool:
    return bool(scale) and ratio > 0 and abs(math.log2(ratio * (scale or 1.0))) < 1.0


def _holds_anothers(comparison: Comparison, used: StepEvent) -> bool:
    """Whether scaled and plain gradients are mixed, and another optimizer stepped before."""
    earlier = comparison.events[: comparison.events.index(used)]
    stepped = any(event.kind == "optimizer_step" and event.optimizer != used.optimizer for event in earlier)
    return stepped and len(used.scales) > 1


def _first(comparison: Comparison, holds: Callable[[StepEvent], bool]) -> StepEvent | None:
    return next((event for event in comparison.events if holds(event)), None)


# -- misuse that the calls alone show, for a loop that runs once without an fp32 comparison --
#
# A step may scale its losses and unscale its gradients in its own code (`misuse` compares). It needs the scale for
# that: code that breaks the protocol and never read the scale is misuse.


def certain_misuse(
    step: int, source: Source | None, scale: float, *, still_scaled: int = 0, clipped: tuple[float, float] | None = None
) -> Finding | None:
    """Returns the finding for an update on scaled gradients, or a clipping (norm before, most after) of them."""
    if still_scaled:
        op, said = (
            "optimizer.step",
            f"the step uses {still_scaled} gradients that are still scaled by {scale_text(scale)}",
        )
    elif clipped is not None and _shortened(clipped, scale) > MISUSE_RATIO.default:
        op = "clip_grad_norm_"
        said = (
            f"gradients were clipped from norm {clipped[0]:.4g} to {clipped[1]:.4g} while they were still scaled by "
            f"{scale_text(scale)}"
        )
    else:
        return None
    evidence = {
        "scale": scale,
        "scales": [scale] if still_scaled else [],
        "edited": 0,
        "still_scaled": still_scaled,
        "misscaled": 0,
        "clipped": None if clipped is None else list(clipped),
    }
    return _finding(step, op, said, source, evidence)


def _finding(step: int, op: str, said: str, source: Source | None, evidence: dict[str, Any]) -> Finding:
    return _misused(Where(step=step, phase="optimizer", op=op, source=source), said, evidence, advice=MISUSE_ADVICE[op])


def _shortened(clipped: tuple[float, float], scale: float) -> float:
    """Returns the factor by which clipping to this norm shortens scaled gradients more than unscaled ones."""
    before, most = clipped
    return min(before / most, scale) if math.isfinite(before) and scale and most > 0 else 1.0


_SAME = 1e-3
"""Largest relative difference of a factor from the inverse of the scale. A world size or a count of micro-batches that
is no power of two differs by far more, float32 arithmetic by far less."""
_LOW = 16.0  # smaller scales belong to a run that scales nothing, and a world size may equal them
_SAME_NORM, _OTHER_FACTOR = 1e-4, 1e-3
"""Relative differences of two steps' norms, and of their factors. Norms that agree to 1e-4 under factors that differ
ten times as much were made equal: a constant or a count does not do that."""
_OWN_BOUND, _SCALED_BOUND = 0.05, 1e-3
"""Bounds, in units of the scale, that were not meant for scaled gradients. Norms are clipped to 0.1 and more: a bound
below 0.05 after the division by the scale was meant without it. A loop that read its scale may have multiplied a small
bound by it, so the limit is a thousandth there."""


class Cuts:
    """The steps of an optimizer whose gradients were multiplied while they were scaled."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []  # factor, norm afterwards, scale

    def add(self, factor: float, norm: float, scale: float) -> tuple[float, ...]:
        """Adds a step; returns the scales of earlier steps with another factor and the same norm."""
        same = tuple(
            at
            for other, there, at in self._steps
            if abs(there - norm) <= _SAME_NORM * norm and abs(other - factor) > _OTHER_FACTOR * factor
        )
        self._steps = [*self._steps[-63:], (factor, norm, scale)]
        return same


def misuse_by_hand(at: Handling, cuts: Cuts) -> Finding | None:
    """Returns the finding where a step's numbers show that the loop mishandles the scale; adds the step to `cuts`."""
    if at.scale < _LOW:
        return None
    found = _scaled_twice(at) or _used_as_scaled(at) or _twice_divided(at) or _cut_scaled(at, cuts)
    if found is None:
        return None
    op, said = found
    evidence = {
        "scale": at.scale,
        "before_unscaling": None if at.before is None else asdict(at.before),
        "afterwards": None if at.after is None else asdict(at.after),
    }
    line = at.scaled_again if op == "GradScaler.scale" else at.source
    return _finding(at.step, op, said, line, evidence)


def _scaled_twice(at: Handling) -> tuple[str, str] | None:
    if at.scaled_again is None or not (at.unscaled or at.by_itself):
        return None
    known = at.after is not None and (at.before is not None or at.by_itself)
    if _divisions(at) or (at.knows_scale and not known):
        return None
    said = (
        f"a loss of which a part was scaled already is scaled once more, by {scale_text(at.scale)}, and unscaled once"
    )
    return "GradScaler.scale", said


def _used_as_scaled(at: Handling) -> tuple[str, str] | None:
    if at.unscaled or at.by_itself or at.after is None or at.after.factor != 1.0:
        return None
    return "optimizer.step", f"the step uses gradients that are still scaled by {scale_text(at.scale)}"


def _twice_divided(at: Handling) -> tuple[str, str] | None:
    if at.after is None or at.after.norm >= at.scale**-0.5:  # a gradient of usual length was not divided twice
        return None
    if at.unscaled and _divisions(at) and at.scaled_again is None:
        said = f"the gradients are divided by {scale_text(at.scale)} twice: by the scaler and by the loop's own code"
    elif not at.unscaled and not at.by_itself and _is_inverse(at.after, at.scale**2, at.clipped):
        said = f"the loop's own code divides the gradients by {scale_text(at.scale)} twice"
    else:
        return None
    return "unscale", f"{said}; what reaches the optimizer has norm {at.after.norm:.3g}"


def _cut_scaled(at: Handling, cuts: Cuts) -> tuple[str, str] | None:
    done, most = at.before, at.scale * (_SCALED_BOUND if at.knows_scale else _OWN_BOUND)
    if done is None or not at.unscaled:
        return None
    if done.bound is not None and done.most / done.bound > MISUSE_RATIO.default and done.bound < most:
        said = f"gradients of magnitudes up to {done.most:.4g} were cut to {done.bound:.4g}"
    elif done.factor is not None and 0 < done.factor < 1 / MISUSE_RATIO.default and not _divisions(at):
        same = cuts.add(done.factor, done.norm, at.scale)
        if not same or (done.norm >= most and all(scale == at.scale for scale in same)):
            return None
        said = f"gradients were shortened to norm {done.norm:.4g}, in this step as in others,"
    else:
        return None
    return "gradient clipping", f"{said} while they were still scaled by {scale_text(at.scale)}"


def _divisions(at: Handling) -> int:
    return sum(change is not None and _is_inverse(change, at.scale, at.clipped) for change in (at.before, at.after))


def _is_inverse(change: Change, scale: float, clipped: float) -> bool:
    factor = change.factor
    return factor is not None and any(abs(factor * scale / other - 1.0) <= _SAME for other in (1.0, clipped))


# -- skipped steps, in a replay and in a watched loop --


PERSISTS = 4
"""Steps in a row, up to the end, that a scaler must skip to count as unable to settle, if it ever stepped.

A scaler that has just doubled its scale skips one step; an overflow of 2^h takes h more.
"""
NEVER_UPDATED = "scaler.update() is never called, so the scale never changes: call it once, after scaler.step."
MADE_ANEW = (
    "The scale does not come down although scaler.update() is called: a scaler that is made anew in each step forgets "
    "what it has learned. Make it once, before the loop."
)
MAKE_ONCE = (
    "make the GradScaler once, before the epochs, and hand it to what trains one: a new one begins at its init_scale "
    "again, and forgets what the last has learned"
)


@dataclass(frozen=True, slots=True)
class SkipVerdict:
    """What a run of skipped steps means."""

    cause: Cause  # why they were skipped
    severity: Severity  # a warning where the scale falls to one that works: it should start lower
    advice: str = ""  # what to do first; "" where the cause's own help suffices


def verdict_on_skips(
    origin: NonFiniteOrigin | None,
    *,
    scales: Sequence[float],
    steps: int,
    cures: bool,
    updated: bool,
    hopeless: bool = False,
    begun_again: int = 0,
) -> SkipVerdict:
    """Judges steps that were skipped for an overflow which a lower scale may cure; `scales` are of each call."""
    cause: Cause = "grad_overflow" if cures else "scaler_collapse"
    if not cures and origin is not None and (hopeless or derivative_beyond(origin)):
        cause = cause_of(origin)  # no scale works: nothing does, or the scale is not the cause
    comes_down = steps < PERSISTS or len(set(scales)) > 1  # a scaler made anew in each step does not
    severity: Severity = "warning" if cures and comes_down and not begun_again else "error"
    return SkipVerdict(cause, severity, _advice(scales, updated=updated))


def times_begun_again(outcomes: Sequence[StepOutcome], optimizers: Container[str]) -> int:
    """Returns how often a scale rises after a skip in updates of `optimizers`: then the scaler is a new one."""
    count = 0
    last: dict[str, float] = {}  # scale of the last update, where it was skipped
    for outcome in outcomes:
        skipped = {id(event) for event in outcome.updates_skipped}
        for event in outcome.events:
            if event.kind != "step" or event.scale is None or event.optimizer not in optimizers:
                continue
            name = event.optimizer
            count += name in last and event.scale > last[name]
            last.pop(name, None)
            if id(event) in skipped:
                last[name] = event.scale
    return count


def _advice(scales: Sequence[float], *, updated: bool) -> str:
    """Returns the advice; a scale that stays the same after a skip is that of a new scaler, which never skipped."""
    if len(scales) < 2:
        return ""
    if not updated:
        return NEVER_UPDATED
    return MADE_ANEW if len(scales) >= PERSISTS and len(set(scales)) == 1 and scales[0] > 1.0 else ""


def scale_kills(origin: NonFiniteOrigin, scale: float | None) -> bool:
    """Returns whether the loss scale is dead and the non-finite values appear after the loss."""
    return scale is not None and is_dead(scale) and origin.where.phase not in ("forward", "loss", "data")


# -- a run's own loss scaler before its first step: dead, with wrong settings, or overwritten --


def dead_scaler_finding(scale: float, dead_at: float, where: Where, cure: Prescription | None) -> Finding:
    """Makes the finding for a loss scale with which every step does harm or is skipped; `cure` is a fresh scaler."""
    return DEAD_SCALER.finding(
        "error",
        f"before {f'step {where.step}' if where.step else 'the first step'} the loss scale is {dead_words(scale)}",
        where=where,
        cause="scaler_collapse" if where.step else "bad_checkpoint",
        evidence={"scale": scale, "dead_at_or_below": dead_at},
        advice="Start from a fresh GradScaler, or one with a sane init_scale.",
        prescription=cure,
    )


def unusable_scale_finding(scale: float, prescription: Prescription | None, *, reached: bool = False) -> Finding:
    """Makes the finding for a first loss scale, or with `reached` a later one, without a finite inverse in fp32."""
    falls = f"from {scale_text(scale)} the scaler's settings lead to a loss scale whose inverse is not finite in fp32"
    return DEAD_SCALER.finding(
        "error",
        f"{falls if reached else f'the inverse of loss scale {scale_text(scale)} is not finite in fp32'}: "
        "a step that is not skipped writes Inf into the weights",
        where=Where(step=0, phase="scaler", op="scaler_state", nonfinite="inf"),
        cause="scaler_collapse" if reached else "bad_checkpoint",
        evidence={"scale": scale},
        prescription=prescription,
    )


def run_scaler_findings(scaler: ScalerState, thresholds: Thresholds) -> Iterator[Finding]:
    """Yields what scan says of a checkpoint with this scaler: AMP401, AMP403 and AMP404."""
    for finding in judge(CheckpointSummary(format="", tensors=(), scalers=(scaler,)), thresholds):
        if finding.code in {DEAD_SCALER.code, FROZEN_SCALER.code, SCALER_SETTINGS.code}:
            yield replace(finding, where=AT_START)


def unloaded_scale_finding(saved: Finding, own: float | None) -> Finding:
    """Returns scan's finding on a checkpoint's dead or collapsed scale (`saved`) for a run that steps at `own`."""
    return replace(
        saved,
        severity="warning",
        message=f"{saved.message} {starting_scale('The run', own)}{' instead' if own is not None else ''}.",
        help="Do not load this scaler state: start from a fresh GradScaler.",
        prescription=None,
    )


SETTINGS_OVERWRITTEN = rule("AMP411", REPLAYED)

LOADED = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings that `load_state_dict` replaces together with the scale and the count of clean steps (torch's GradScaler).
The scale is state, and is meant to be replaced."""


def overwritten_finding(scalers: ResumedScaler) -> Finding | None:
    """Makes the finding for settings that loading a scaler's state replaces: a note where the replay keeps them."""
    lost: dict[str, dict[str, float]] = {}
    kept = True
    for name in LOADED:
        own, file, now = (getattr(one, name) for one in (scalers.own, scalers.file, scalers.now))
        if _same(own, file):
            continue
        replaced = _same(now, file)
        meant = name in scalers.asked if scalers.asked is not None else own != FRESH_SCALER[name]
        if meant and (replaced or scalers.asked is None):
            lost[name] = {"run": own, "checkpoint": file, "replay": now}
            kept = kept and not replaced
    if not lost:
        return None
    pairs = " and ".join(
        f"{name} {plain(of['run'])} (the checkpoint: {plain(of['checkpoint'])})" for name, of in lost.items()
    )
    ends = (
        "a run that loads the checkpoint's scaler state loses that"
        if kept
        else "loading the checkpoint's scaler state replaces that"
    )
    setters = "; ".join(f"scaler.set_{name}({plain(of['run'])})" for name, of in lost.items())
    return SETTINGS_OVERWRITTEN.finding(
        "note" if kept else "warning",
        f"the run's scaler asks for {pairs}: {ends}",
        where=AT_START,
        evidence={"settings": lost},
        prescription=Prescription.untried(
            setters,
            "which of the two is meant, only the run's author knows",
            f"after scaler.load_state_dict(...), if the run's own are meant: {setters}",
        ),
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
