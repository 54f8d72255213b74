"""Rules on the loss and the gradient norm over a run's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue import SCANNED, WATCHED, figure, rule, scale_text
from ampdoctor.diagnosis.health.rolling import FIRST, HOP, LENGTH, RECENT, SPANS, falls_over
from ampdoctor.diagnosis.health.step_state import LEAST_ROWS, StepState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

STEPS_NOT_FINITE = rule("AMP722", (*WATCHED, *SCANNED), ruins_checkpoint=True)


@STEPS_NOT_FINITE.judges(StepState)
def _steps_not_finite(moment: StepState, _: Thresholds) -> Sequence[Finding]:
    line = moment.ill.lost
    undecided = line is None and moment.ill.last
    if undecided:
        line = moment.ill.waiting
    if line is None:
        return ()
    of_norm = line.gradient_norm is not None and not math.isfinite(line.gradient_norm)
    value = line.gradient_norm if of_norm else line.loss
    of_loss = line.loss is not None and not math.isfinite(line.loss)
    if undecided and not of_loss and moment.scale.in_a_row >= LEAST_ROWS:
        return ()  # the last of many skipped steps, or norms that are never measured
    may_be_skipped = undecided and not (of_loss and moment.scale.now is None)
    both = of_norm and of_loss
    said = f", and so is the loss ({_shown(line.loss)})" if both else ""
    said += ", and the step was taken" if line.skipped is False else ""
    if both:
        said += ": the forward made it, of its batch or its weights"
    elif line is not moment.line and line.skipped is None and not undecided:
        said += f", and no finite {'norm' if moment.line.loss is None else 'loss'} follows: the weights took it"
    if may_be_skipped:
        said += ". No step follows in the log: a scaler has skipped it, as it should, or the weights are lost"
    finding = STEPS_NOT_FINITE.finding(
        "warning" if may_be_skipped else "error",
        f"The {'gradient norm' if of_norm else 'loss'} of step {line.step:,} is {_shown(value)}{said}.",
        where=Where(
            step=line.step,
            phase="backward" if of_norm else "loss",
            nonfinite="nan" if value is not None and math.isnan(value) else "inf",
        ),
        evidence={
            "first": moment.first("forward" if of_loss else "gradient", since=line.step),
            "loss": line.loss,
            "gradient_norm": line.gradient_norm,
            "skipped": line.skipped,
        },
    )
    return (finding,)


def _shown(value: float | None) -> str:
    return "NaN" if value is None or math.isnan(value) else "Inf" if value > 0 else "-Inf"


GRADIENT_JUMP = rule("AMP720", WATCHED)
GRADIENT_JUMP_DEVIATIONS = GRADIENT_JUMP["deviations"]
GRADIENT_JUMP_BEYOND = GRADIENT_JUMP["beyond"]


@GRADIENT_JUMP.judges(StepState)
def gradient_jump(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    """A step whose norm or loss is far above the usual, and beyond all recent values."""
    least = thresholds[GRADIENT_JUMP_DEVIATIONS]
    if not moment.judged or (moment.norm_above < least and moment.loss_above < least) or moment.line.skipped:
        return ()
    line, norm, loss = moment.line, moment.line.norm, moment.line.loss
    of_norm = (
        norm is not None
        and moment.norm_above >= least
        and norm >= thresholds[GRADIENT_JUMP["times"]] * moment.norm.usual
        and moment.moves(norm)
        and moment.norm.beyond(norm) >= thresholds[GRADIENT_JUMP_BEYOND]
    )
    of_loss = moment.loss_above >= least and moment.matters(loss)
    course, value = (moment.norm, norm) if of_norm else (moment.loss, loss if of_loss else None)
    beyond = 0.0 if value is None else course.beyond(value)
    if value is None or beyond < thresholds[GRADIENT_JUMP_BEYOND]:
        return ()
    what, above = ("gradient norm", moment.norm_above) if of_norm else ("loss", moment.loss_above)
    usual = course.usual
    both = of_norm and loss is not None and moment.loss_above >= least
    first = moment.first()
    blamed = ": look at the batch, and at the update before it" if first in {"data", "loss", "both"} else ""
    too = f". The loss is unusual in the same step{blamed}" if both else ""
    times = f", {figure(value / usual)} times the usual {usual:.3g}" if usual > 0 else f"; {usual:.3g} is usual"
    finding = GRADIENT_JUMP.finding(
        "warning",
        f"The {what} of step {line.step:,} is {value:.3g}{times} ({above:.1f} robust deviations){too}.",
        where=Where(step=line.step, phase="backward" if of_norm else "loss"),
        evidence={
            "first": first,
            "what": what.replace(" ", "_"),
            "value": value,
            "usual": usual,
            "deviations": above,
            "beyond": beyond,
            "loss": loss,
            "loss_deviations": moment.loss_above,
        },
    )
    return (finding,)


CLIMBS_AT_FIRST = rule("AMP741", WATCHED)
CLIMBS_AT_FIRST_LOSS = CLIMBS_AT_FIRST["loss"]
CLIMBS_AT_FIRST_NORM = CLIMBS_AT_FIRST["norm"]


@CLIMBS_AT_FIRST.judges(StepState)
def _climbs_at_first(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.alone:
        return ()  # with several optimizers, one's gain is another's loss
    loss, norm = moment.first_losses.rise(RECENT), moment.first_norms.rise(FIRST)
    if not (loss or norm):
        return ()  # as at most steps
    if loss < thresholds[CLIMBS_AT_FIRST_LOSS] and norm < thresholds[CLIMBS_AT_FIRST_NORM]:
        return ()
    of_loss = loss >= thresholds[CLIMBS_AT_FIRST_LOSS]
    if not of_loss and 0 < moment.first_losses.rise(FIRST) < 1:
        return ()  # it learns
    what, times, steps, first = (
        ("loss", loss, RECENT, moment.first_losses.first)
        if of_loss
        else ("gradient norm", norm, FIRST, moment.first_norms.first)
    )
    both = of_loss and norm >= thresholds[CLIMBS_AT_FIRST_NORM]
    too = f", and the gradient norm {norm:.3g} times" if of_loss and norm >= thresholds[CLIMBS_AT_FIRST_LOSS] else ""
    together = "both" if too else "loss"
    finding = CLIMBS_AT_FIRST.finding(
        "error" if both else "warning",
        f"The {what} of the last {steps} steps is {figure(times * first)}, {figure(times)} times that of the first "
        f"{FIRST} ({figure(first)}){too}.",
        where=Where(step=moment.line.step, phase="loss" if of_loss else "backward"),
        evidence={
            "first": "optimizer" if moment.first() == "optimizer" else together if of_loss else "gradient",
            "loss_times": loss,
            "norm_times": norm,
            "first_loss": _known(moment.first_losses.first),
            "first_norm": _known(moment.first_norms.first),
        },
    )
    return (finding,)


def _known(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN is not itself


LEVEL_SHIFTS = rule("AMP724", WATCHED)
LEVEL_SHIFTS_SUM = LEVEL_SHIFTS["sum"]
LEVEL_SHIFTS_LOSS = LEVEL_SHIFTS["loss"]
LEVEL_SHIFTS_NORM = LEVEL_SHIFTS["norm"]
_ROOTS = [math.sqrt(span) for span in SPANS]
_BOTH = 3.0
"""Least deviations of the loss's mean for loss and norm to climb together. A norm that climbs under a steady loss has
its own threshold."""
_LONG = _ROOTS[1]
"""For the norm alone, only means over 8 steps and more count. Four large norms in a row are a burst, as in a healthy
PPO whose returns grow; jumps are AMP720's."""
_FALLS = -1.0
"""Deviations below the usual from which a loss falls: a norm that rises then belongs to a phase of fast learning."""


@LEVEL_SHIFTS.judges(StepState)
def _level_shifts(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.judged or moment.rising or not moment.alone or moment.loss.count < LENGTH:
        return ()  # with several optimizers, one's gain is another's loss
    loss, norm = moment.loss.height(), moment.norm.height()
    if (
        loss + norm < _ROOTS[0] * thresholds[LEVEL_SHIFTS_SUM]
        and loss < _ROOTS[0] * thresholds[LEVEL_SHIFTS_LOSS]
        and norm < SPANS[1] * thresholds[LEVEL_SHIFTS_NORM]
    ):
        return ()  # as at most steps: all excess together is not enough for the shortest span
    losses, norms = moment.loss.lifts(), moment.norm.lifts()
    if not moment.moves(moment.norm.latest):
        norms = tuple(0.0 for _ in norms)
    learned = moment.has_learned
    matters, of_spans = moment.reverses_progress(moment.loss.latest), list(zip(_ROOTS, losses, norms, strict=True))
    of_both, of_loss, of_norm = (
        max(lifts, default=0.0) / thresholds[least]
        for lifts, least in (
            (
                [matters * root * (loss + norm) for root, loss, norm in of_spans if root * loss >= _BOTH],
                LEVEL_SHIFTS_SUM,
            ),
            ([matters * root * loss for root, loss, _ in of_spans], LEVEL_SHIFTS_LOSS),
            ([norm for root, loss, norm in of_spans if learned and loss > _FALLS and root >= _LONG], LEVEL_SHIFTS_NORM),
        )
    )
    worst = max(of_both, of_loss, of_norm)
    if worst < 1.0:
        return ()
    loss, norm = max(losses), max(norms)
    course, what = (moment.norm, "gradient norm") if norm > loss else (moment.loss, "loss")
    finding = LEVEL_SHIFTS.finding(
        "warning",
        f"The {'loss and the gradient norm have' if worst == of_both else f'{what} has'} climbed: the {what} is "
        f"{figure(course.latest)} over the last {SPANS[0]} steps, and {figure(course.usual)} is usual. "
        f"In robust deviations over up to {SPANS[-1]} steps: loss {loss:+.1f}, gradient norm {norm:+.1f}.",
        where=Where(step=moment.line.step, phase="backward" if norm > loss else "loss"),
        evidence={
            "first": moment.first("both" if worst == of_both else "gradient" if norm > loss else "loss"),
            "loss_lift": loss,
            "norm_lift": norm,
            "latest": course.latest,
            "usual": course.usual,
        },
    )
    return (finding,)


LOSS_NOT_BACK = rule("AMP721", WATCHED)


@LOSS_NOT_BACK.judges(StepState)
def _loss_not_back(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    spike = moment.spike
    if spike is None:
        return ()
    steps = int(thresholds[LOSS_NOT_BACK["steps"]])
    line = moment.line
    if spike.above != steps or line.loss is None:
        return ()
    finding = LOSS_NOT_BACK.finding(
        "error",
        f"The loss rose from about {figure(spike.usual)} to {figure(spike.value)} at step {spike.step:,}. "
        f"{steps} steps later it is still {figure(line.loss)}, and above {figure(spike.limit)} in each of them.",
        where=Where(step=line.step, phase="loss"),
        evidence={
            "first": moment.first(since=spike.step),
            "since": spike.step,
            "at_first": spike.value,
            "usual": spike.usual,
            "limit": spike.limit,
            "loss": line.loss,
        },
    )
    return (finding,)


DESCENT_LOST = rule("AMP739", WATCHED)


@DESCENT_LOST.judges(StepState)
def _descent_lost(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if moment.loss.count % HOP or moment.loss.count < LENGTH or not moment.alone:
        return ()  # the usual loss changes once a hop
    descent, usual = moment.descent, moment.loss.usual
    way = descent.fallen_from - descent.lowest
    if not descent.falls or usual - descent.lowest < thresholds[DESCENT_LOST["share"]] * way:
        return ()
    share = (usual - descent.lowest) / way
    finding = DESCENT_LOST.finding(
        "warning",
        f"The loss is back at {figure(usual)}; its lowest was {figure(descent.lowest)}. "
        f"{share:.0%} of the fall from {figure(descent.fallen_from)} is lost.",
        where=Where(step=moment.line.step, phase="loss"),
        evidence={
            "first": moment.first("loss"),
            "usual": usual,
            "lowest": descent.lowest,
            "highest": descent.fallen_from,
            "share": share,
        },
    )
    return (finding,)


# -- how a log ends --


GRADIENTS_VANISHED = rule("AMP702", WATCHED)
LEAST_ZEROS = GRADIENTS_VANISHED["entries"]
MOMENTUM_STEPS = 50  # steps in which momentum alone may lower the loss: 0.9^50 is 0.5 %
CUT = "a cut graph (detach, no_grad, frozen weights) and a constant output look alike"


@GRADIENTS_VANISHED.judges(StepState)
def _gradients_vanished(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    zeros = moment.zeros
    if moment.end is None or zeros.zeros < thresholds[LEAST_ZEROS] or 2 * zeros.zeros <= zeros.rows:
        return ()
    losses = [loss for _, loss in zeros.losses]
    since = zeros.first + (0 if zeros.before is None else MOMENTUM_STEPS)
    learns = falls_over([loss for step, loss in zeros.losses if step >= since])
    if learns and zeros.before is None:  # a norm that never had another value was not measured, or rounded away
        return ()
    finished, scale = bool(losses) and not any(losses), moment.scale.now
    why = "nothing in the log says why" if scale is None else f"the loss scale {scale_text(scale)} does not explain it"
    severity: Severity = "warning"
    between = f" while the loss stays {_between(losses)}" if losses else ""
    if finished:
        severity, between, why = "note", " and so is the loss", ""
    elif learns:
        severity, between = "note", f" though the loss still falls, {_between(losses)}"
        why = "norms are rounded away, or not measured"
    elif scale is not None and scale < 1:
        severity, why = "error", f"the loss scale has collapsed to {scale_text(scale)}"
    else:
        why = f"{why}; {CUT}"
        if losses and not zeros.coarse:
            severity = "error"
        elif not losses and zeros.before is None:
            severity = "note"
    before = "" if zeros.before is None else f", {zeros.before:.3g} before"
    finding = GRADIENTS_VANISHED.finding(
        severity,
        f"The gradient norm is exactly 0 from step {zeros.first:,} to {zeros.last:,}{before}{between}"
        f"{f': {why}' if why else ''}.",
        where=Where(step=zeros.first, phase="backward"),
        cause="scaler_collapse" if "collapsed" in why else None,
        evidence={
            "first": "gradient",
            "first_step": zeros.first,
            "last_step": zeros.last,
            "entries": zeros.zeros,
            "norm_before": zeros.before,
            "loss_lowest": min(losses, default=None),
            "loss_highest": max(losses, default=None),
            "scale": scale,
        },
    )
    return (finding,)


def _between(losses: Sequence[float]) -> str:
    low, high = min(losses), max(losses)
    return f"at {low:.4g}" if low == high else f"between {low:.4g} and {high:.4g}"


LOSS_CONSTANT = rule("AMP705", WATCHED)


@LOSS_CONSTANT.judges(StepState)
def _loss_constant(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    same = moment.equal
    if moment.end is None or same.rows < thresholds[LOSS_CONSTANT["entries"]] or same.resting:
        return ()
    if not thresholds[LOSS_CONSTANT["loss"]] <= abs(same.value) < math.inf:
        return ()
    finding = LOSS_CONSTANT.finding(
        "note" if same.rounded else "warning",
        f"The loss is exactly {same.value:.17g} in the last {same.rows:,} entries, from step {same.since:,} on. "
        "The weights do not move, or the output does not depend on the input.",
        where=Where(step=same.since, phase="loss"),
        evidence={
            "first": "optimizer",
            "loss": same.value,
            "first_step": same.since,
            "entries": same.rows,
            "rounded": same.rounded,
        },
    )
    return (finding,)
