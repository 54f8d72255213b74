"""AMP407: the step breaks the scaler's protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.births import birth_numbers
from ampdoctor.diagnosis.replay.causes import HELP, MISUSE_ADVICE
from ampdoctor.diagnosis.scaler.scaler_finding import starting_scale
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.report_replay import NOT_THE_ORDER
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Threshold, Thresholds
from ampdoctor.evidence.trace import Birth, Comparison, StepEvent

MISUSE_RATIO = Threshold(
    code="AMP407",
    name="ratio",
    default=2.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Factor by which the gradient that reaches the optimizer is too long or too short: rounding alone would need a "
    "relative error of 0.5 for 2.",
)
MISUSE_ERROR = Threshold(
    code="AMP407",
    name="relative_error",
    default=0.1,
    unit="relative L2 error",
    why="Error of the gradients from which a part of them is suspected of another scale (as AMP301.error_bad).",
)
RULE = register(
    "AMP407",
    "scaler-misuse",
    "The step breaks the scaler's protocol",
    worst="error",
    commands=REPLAYED,
    thresholds=(MISUSE_RATIO, MISUSE_ERROR),
)


_CLIPPINGS = ("clip_grad_norm_", "gradient clipping")
_ONE_EACH = "remove the second call: one update for each backward"


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """Trained parameters in float16.

    Attributes:
        count: How many there are.
        first: The name of the first.
        made: The user's line that has made them so; None where it was not seen.
    """

    count: int
    first: str
    made: Source | None


def lost_scale_finding(
    lost: ScalerState, own: float | None, birth: Birth | None = None, cure: Prescription | None = None
) -> Finding:
    """A checkpoint's settled loss scale that the run does not continue.

    Args:
        lost: The checkpoint's scaler.
        own: The scale at which the run starts; None if it has no scaler.
        birth: The overflow for which the run skips its steps; None where it does not.
        cure: The run at the checkpoint's scale.
    """
    where = Where(step=0, phase="scaler", op="scaler_state") if birth is None else replace(birth.where, phase="scaler")
    skips = "" if birth is None else ", and every step is skipped"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning" if birth is None else "error",
        cause="scaler_misuse",
        where=where,
        message=f"the checkpoint's loss scale had settled at {lost.scale:g} ({lost.growth_tracker} clean steps), but "
        f"{starting_scale('the run', own)}{skips}",
        evidence={"checkpoint_scale": lost.scale, "run_scale": own, "growth_tracker": lost.growth_tracker},
        help="Load the scaler's state with the rest of the checkpoint: scaler.load_state_dict(checkpoint['scaler']).",
        prescription=cure,
    )


def unguarded_step_finding(at: Birth | Where, scale: float | None) -> Finding:
    """Gradients that overflowed reached the weights, because the optimizer was stepped past its scaler.

    Args:
        at: The overflow; or the step, where a replay through the scaler skips it, and takes it at a lower scale.
        scale: The loss scale.
    """
    where = at if isinstance(at, Where) else replace(at.where, phase="optimizer", module="", op="optimizer.step")
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=where,
        message=f"step {where.step}: gradients scaled by {scale if scale is not None else 1:g} overflow, and "
        "optimizer.step() uses them: scaler.step(optimizer) would have skipped the step",
        evidence={"scale": scale} if isinstance(at, Where) else birth_numbers(at, ()),
        help=HELP["scaler_misuse"],
    )


def stepped_past_finding(step: int, source: Source | None, scale: float | None) -> Finding:
    """An optimizer steps on gradients that a scaler has unscaled, and the scaler is not asked whether they overflowed.

    Args:
        step: The step.
        source: The line that makes the call.
        scale: The loss scale.
    """
    advice = MISUSE_ADVICE["optimizer.step"]
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=step, phase="optimizer", op="optimizer.step", source=source),
        message=f"step {step}: scaler.unscale_ has divided the gradients, and optimizer.step() uses them past the "
        "scaler: an update whose gradients overflow is made all the same, which scaler.step(optimizer) skips",
        evidence={"scale": scale},
        help=HELP["scaler_misuse"],
        prescription=Prescription(
            kind="code", value=advice, status="not_run", detail=advice, reason="the calls alone show it"
        ),
    )


def stepped_again_finding(step: int, source: Source | None, *, held_back: bool, scaled: bool = True) -> Finding:
    """An optimizer steps once more on gradients of which an update was made already, or left out by its scaler.

    Args:
        step: The step.
        source: The line that makes the second call.
        held_back: The scaler had skipped the update.
        scaled: A scaler is at work, whose skip the second call passes by: an error. Else a warning.
    """
    advice = MISUSE_ADVICE["optimizer.step again"] if scaled else _ONE_EACH
    first, harm = "that scaler.step(optimizer) has used", "every update is made twice"
    if held_back:
        first = "with which scaler.step(optimizer) has skipped the update"
        harm = "gradients that overflowed reach the weights"
    elif scaled:
        harm += ", and one that the scaler skips is made all the same"
    else:
        first = "of its last update"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error" if scaled else "warning",
        cause="scaler_misuse" if scaled else None,
        where=Where(step=step, phase="optimizer", op="optimizer.step", source=source),
        message=f"step {step}: the optimizer steps again on the gradients {first}, with no backward in between: {harm}",
        evidence={"skipped_by_the_scaler": held_back},
        help=HELP["scaler_misuse"] if scaled else f"{advice[0].upper()}{advice[1:]}.",
        prescription=Prescription(
            kind="code",
            value=advice,
            status="not_run",
            detail=advice,
            reason="the calls alone show it: a second update on the same gradients is wrong in every precision",
        ),
    )


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
    """The GradScaler refused a call: other calls must come before it, or the gradients are in float16.

    Args:
        step: The step.
        method: The scaler's method.
        raised: What it raised, type first.
        source: The line that called it, the user's own where there is one.
        advice: The change that the user has to write.
        halves: The trained weights in float16, where they are the reason.
        past: The step was made past the scaler, which is why it refuses; the line is that of the step.
    """
    op = "optimizer.step" if past else f"scaler.{method}"
    help_ = HELP["scaler_misuse"] if advice not in NOT_THE_ORDER else f"{advice[0].upper()}{advice[1:]}."
    message = f"step {step}: the scaler refuses the call of {method}: {raised}"
    if past:
        message = f"step {step}: optimizer.step() is called past the scaler, which then refuses {method}: {raised}"
    evidence: dict[str, Any] = {"raised": raised}
    if halves is not None:
        many = halves.count != 1
        made = "" if halves.made is None else f", made so at {halves.made.file}:{halves.made.line}"
        message += (
            f" {halves.count} trained parameter{'s are' if many else ' is'} in float16,"
            f"{' the first of them' if many else ''} {halves.first}{made}: a GradScaler needs weights in fp32"
        )
        evidence = {**evidence, "float16_parameters": halves.count, "first": halves.first}
        source = halves.made or source
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=step, phase="scaler", op=op, source=source),
        message=message,
        evidence=evidence,
        help=help_,
        prescription=Prescription(
            kind="code",
            value=advice,
            status="not_run",
            detail=advice,
            reason="the step ends there, so no replay can stand in for it",
        ),
    )


def suspicious(events: Sequence[StepEvent]) -> bool:
    """Gradients were used, changed or mixed while scaled: whether that did harm, a comparison says (`misuse`)."""
    return any(
        event.misscaled or (event.scale not in (None, 1.0) and (_used_scaled(event) or _changed_scaled(event)))
        for event in events
    )


def misuse(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """The step's own calls break the scaler's protocol, and its gradients show it.

    A gradient that is only rounded keeps its norm within the relative error.

    Args:
        comparison: Of one step.
        thresholds: By which factor they show it (AMP407).
    """
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
    return _misuse_finding(comparison, event, op, f"the step {done} {event.scale:g}")


def other_readings(comparison: Comparison, first: Finding) -> tuple[Finding, ...]:
    """What else the calls of a misuse may mean: a reading is the right one only if a replay put right agrees with it.

    Args:
        comparison: Of one step.
        first: What `misuse` says of it.
    """
    used, changed = _first(comparison, _used_scaled), _first(comparison, _changed_scaled)
    if first.where.op in _CLIPPINGS and changed and _divided_twice(changed.scale, comparison.gradient_ratio):
        said = f"the step divided its gradients itself, and scaler.unscale_ did so once more, by {changed.scale:g}"
        return (_misuse_finding(comparison, changed, "unscale", said),)
    if first.where.op == "optimizer.step" and used and _holds_anothers(comparison, used):
        said = f"gradients of another optimizer's loss, scaled by {used.scale:g}, were still there when its own came"
        return (_misuse_finding(comparison, used, "optimizer.zero_grad", said),)
    return ()


def suspected_misuse(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """What may be wrong with the scale of a part of the gradients: each is true only if a replay put right agrees.

    Gradients that are far from fp32's have other causes as well, and a step may scale a loss, or unscale a gradient, in
    its own code: the calls alone do not tell.

    Args:
        comparison: Of one step.
        thresholds: How far is far (AMP407).
    """
    if comparison.gradient_error <= thresholds[MISUSE_ERROR]:
        return ()
    found = []
    unscaled = set[str]()  # a fused optimizer divides inside its own step: no unscale event comes first
    for event in comparison.events:
        if event.twice:
            said = f"a part of the loss goes through scaler.scale twice: it is scaled by {event.twice:g} once too often"
            found.append(_misuse_finding(comparison, replace(event, scale=event.twice), "GradScaler.scale", said))
        if not event.scale or (event.scale == 1.0 and not event.misscaled):
            continue
        if event.kind == "unscale":
            unscaled.add(event.optimizer)
        late = event.kind == "optimizer_step" and event.optimizer in unscaled
        times = f"scaled by {event.scale:g}"
        if event.misscaled and late:
            said = f"{event.misscaled} gradients went on to collect gradients {times} after scaler.unscale_"
            found.append(_misuse_finding(comparison, event, "scaler.unscale_", said))
        elif event.misscaled and (other := [scale for scale in event.scales if scale not in (1.0, event.scale)]):
            said = f"{event.misscaled} gradients are divided by {event.scale:g}, but were scaled by " + " and ".join(
                f"{scale:g}" for scale in other
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
    """No call shows it, and nothing else explains the gradients: a hook, or code that reads them, may be the cause.

    It is where a replay put right agrees.

    Args:
        comparison: Of one step.
        thresholds: How far from fp32's they have to be (AMP407).
    """
    event = _first(comparison, _after_scaling)
    scaled = any(event.kind == "scale" for event in comparison.events)
    if comparison.gradient_error <= thresholds[MISUSE_ERROR] or event is None or not scaled:
        return None
    said = f"gradients were used inside the step, or in a hook, while they were still scaled by {event.scale:g}"
    return _misuse_finding(comparison, event, "Tensor.grad", said)


def _misuse_finding(comparison: Comparison, event: StepEvent, op: str, said: str) -> Finding:
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=comparison.step, phase="optimizer", op=op),
        message=f"step {comparison.step}: {said}; what reaches the optimizer is "
        f"{comparison.gradient_ratio:.3g} times the fp32 gradient",
        evidence={
            "scale": event.scale,
            "gradient_ratio": comparison.gradient_ratio,
            "gradient_error": comparison.gradient_error,
            "edited": event.edited,
            "unscaled": event.unscaled,
            "misscaled": event.misscaled,
            "scales": list(event.scales),
        },
        help=HELP["scaler_misuse"],
    )


def _used_scaled(event: StepEvent) -> bool:
    return event.kind == "optimizer_step" and not event.unscaled


def _after_scaling(event: StepEvent) -> bool:
    """Gradients are unscaled; a fused optimizer does that inside its step."""
    return event.kind in ("unscale", "optimizer_step") and event.unscaled and event.scale not in (None, 1.0)


def _changed_scaled(event: StepEvent) -> bool:
    return event.kind == "unscale" and event.edited > 0


def _unscaled_twice(event: StepEvent, ratio: float) -> bool:
    """Changed after unscaling, and too short by the scale itself: clipping shortens fp32's gradients as well."""
    return event.kind == "optimizer_step" and event.edited > 0 and _divided_twice(event.scale, ratio)


def _divided_twice(scale: float | None, ratio: float) -> bool:
    return bool(scale) and ratio > 0 and abs(math.log2(ratio * (scale or 1.0))) < 1.0


def _holds_anothers(comparison: Comparison, used: StepEvent) -> bool:
    """Scaled and plain gradients are mixed, and another optimizer stepped before this one did."""
    earlier = comparison.events[: comparison.events.index(used)]
    stepped = any(event.kind == "optimizer_step" and event.optimizer != used.optimizer for event in earlier)
    return stepped and len(used.scales) > 1


def _first(comparison: Comparison, holds: Callable[[StepEvent], bool]) -> StepEvent | None:
    return next((event for event in comparison.events if holds(event)), None)
