"""Sickness that stays finite: what a comparison with fp32 says, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.replay.findings import CODES, HELP
from ampdoctor.evidence.of_runs.trace import Comparison, Flush, ModuleUpdate, StepEvent
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.thresholds.replay_thresholds import (
    DEPARTS,
    ERROR_BAD,
    ERROR_WARNING,
    MISUSE_ERROR,
    MISUSE_RATIO,
    STALLED,
    ZEROED,
    ZEROED_SHARE,
)
from ampdoctor.evidence.where import Where


@dataclass(frozen=True, slots=True)
class Stagnation:
    """Modules whose updates are lost in their tensors' format.

    Attributes:
        module: The module that holds them all; the worst of them where only the root does.
        updates: Their numbers.
        trained: An optimizer moves them.
    """

    module: str
    updates: tuple[ModuleUpdate, ...]
    trained: bool


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
        op, done = "clip_grad_norm_", f"changed (clipped?) {event.edited} gradients while they were still scaled by"
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
    if first.where.op == "clip_grad_norm_" and changed and _divided_twice(changed.scale, comparison.gradient_ratio):
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
    code = CODES["scaler_misuse"]
    return Finding(
        code=code,
        name=RULES[code].name,
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


def underflow(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Severity | None:
    """Gradients are flushed to zero that are not zero in fp32, and it matters; how much, or None.

    Args:
        comparison: Of one step.
        thresholds: What matters (AMP301).
    """
    if comparison.gradient_error <= thresholds[ERROR_WARNING]:
        return None
    if comparison.zeroed_share < thresholds[ZEROED_SHARE] and comparison.zeroed < thresholds[ZEROED]:
        return None
    return "error" if comparison.gradient_error > thresholds[ERROR_BAD] else "warning"


def unexplained(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """The gradients are far from fp32's, and no rule says why: a warning, as chaos and hidden state look the same.

    Args:
        comparison: Of one step.
        thresholds: How far is far (AMP207).
    """
    if comparison.gradient_error <= thresholds[DEPARTS]:
        return None
    rule = RULES["AMP207"]
    return Finding(
        code=rule.code,
        name=rule.name,
        severity="warning",
        where=Where(step=comparison.step, phase="backward"),
        message=f"step {comparison.step}: the gradients are {comparison.gradient_error:.2g} away from fp32's (relative "
        "L2), and nothing that was looked at explains it",
        evidence={
            "gradient_error": comparison.gradient_error,
            "gradient_ratio": comparison.gradient_ratio,
            "loss": comparison.loss,
            "reference_loss": comparison.reference_loss,
        },
        help="Part of the gradient is lost or belongs to another state: check cancellation (a difference of large "
        "numbers), accumulation, and random draws or counters that the replay cannot rewind.",
    )


def deserves_a_look(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> bool:
    """The gradients depart from fp32 by more than rounding does, or by what is asked for.

    Args:
        comparison: Of one step.
        thresholds: Of underflow (AMP301), whose op the look is to find.
    """
    return not comparison.gradient_error <= min(ERROR_WARNING.default, thresholds[ERROR_WARNING])


def stagnations(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Stagnation, ...]:
    """Modules that do not move though they do in fp32: trained ones and copies apart.

    Args:
        comparison: Of one step.
        thresholds: Which share has to stand still (AMP501).
    """
    return stagnations_of(comparison.updates, thresholds)


def stagnations_of(updates: Sequence[ModuleUpdate], thresholds: Thresholds) -> tuple[Stagnation, ...]:
    """The same of a step's updates alone.

    Over all trained half tensors together, as a key bias whose true gradient is 0 stalls in every healthy run, and over
    all others together.
    """
    share = thresholds[STALLED]
    found = []
    for trained in (True, False):
        group = [u for u in updates if u.trained is trained and u.moved]
        moved, stalled = sum(u.moved for u in group), sum(u.stalled for u in group)
        size = math.fsum(u.size**2 for u in group)
        lost = math.sqrt(math.fsum((u.lost * u.size) ** 2 for u in group) / size) if size else 0.0
        still = tuple(u for u in group if u.stalled)
        if still and stalled > share * moved and lost > share:
            found.append(Stagnation(_holder(still), still, trained))
    return tuple(found)


def stagnation_finding(step: int, stagnation: Stagnation) -> Finding:
    """The finding for modules that stagnate."""
    code = CODES["optimizer_precision"]
    moved = sum(u.moved for u in stagnation.updates)
    stalled = sum(u.stalled for u in stagnation.updates)
    who = "trained weights" if stagnation.trained else "weights that no optimizer holds (an averaged copy?)"
    return Finding(
        code=code,
        name=RULES[code].name,
        severity="error",
        cause="optimizer_precision",
        where=Where(step=step, phase="optimizer", module=stagnation.module, op="aten.add_"),
        message=f"step {step}: {stalled} of {moved} elements of {who} in {stagnation.module or 'the model'} do not "
        f"move "
        "though they do in fp32: each update is below half a unit in the last place of its weight",
        evidence={
            "moved": moved,
            "stalled": stalled,
            "stalled_fraction": stalled / moved,
            "modules": [u.module for u in stagnation.updates[:16]],
            "modules_count": len(stagnation.updates),
            "update_lost": max(u.lost for u in stagnation.updates),
        },
        help=HELP["optimizer_precision"],
    )


def underflow_finding(comparison: Comparison, where: Where, severity: Severity, flushed: float | None) -> Finding:
    """The finding for gradients that underflow.

    Args:
        comparison: Of the step.
        where: The op that flushes, where one was seen.
        severity: From `underflow`.
        flushed: Share of its result that it flushes.
    """
    code = CODES["grad_underflow"]
    scale = next((event.scale for event in comparison.events if event.scale is not None), None)
    scaled = "without a loss scale" if scale is None else f"at loss scale {scale:g}"
    return Finding(
        code=code,
        name=RULES[code].name,
        severity=severity,
        cause="grad_underflow",
        where=where,
        message=f"step {comparison.step}: {comparison.zeroed:.1%} of the gradient elements that are nonzero in fp32 "
        f"are "
        f"zero here, {scaled}; the gradient is {comparison.gradient_error:.2g} away from fp32's (relative L2)",
        evidence={
            "zeroed_grad_fraction": comparison.zeroed,
            "gradient_error": comparison.gradient_error,
            "zeroed_share_of_error": comparison.zeroed_share,
            "scale": scale,
            "flushed_at_op": flushed,
        },
        help=HELP["grad_underflow"],
    )


def underflow_at(comparison: Comparison, flushes: Sequence[Flush], severity: Severity) -> Finding:
    """At the first op of the backward that flushes most of its result, else at the one that flushes the most."""
    first = next((f for f in flushes if f.fraction > 0.5), None) or max(flushes, key=lambda f: f.fraction)
    return underflow_finding(comparison, first.where, severity, first.fraction)


def _first(comparison: Comparison, holds: Callable[[StepEvent], bool]) -> StepEvent | None:
    return next((event for event in comparison.events if holds(event)), None)


def _holder(updates: tuple[ModuleUpdate, ...]) -> str:
    """The innermost module that holds all of them; the one with the most lost elements where that is only the root."""
    paths = [update.module.split(".") for update in updates]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if common and common != [""]:
        return ".".join(common)
    worst = max(updates, key=lambda u: (u.stalled, u.stalled / u.moved if u.moved else math.inf))
    return worst.module
