"""Rules on the loss and the gradient norm over a run's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue import WATCHED, register
from ampdoctor.diagnosis.health.rolling import FIRST, HOP, LENGTH, MOST, RECENT, SPANS
from ampdoctor.diagnosis.health.step_state import LEAST_ROWS, StepState, norm_of
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STEPS_NOT_FINITE = register(
    "AMP722",
    "steps-not-finite",
    "A step was taken with a loss or a gradient that is not finite",
    worst="error",
    commands=WATCHED,
)


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
    said = ", and the step was taken" if line.skipped is False else ""
    if of_norm and of_loss:
        said += f", and the loss {line.loss}: the forward has made it, of its batch or its weights"
    elif line is not moment.line and line.skipped is None and not undecided:
        said += f", and no finite {'norm' if moment.line.loss is None else 'loss'} follows: the weights took it"
    if may_be_skipped:
        said += "; no step follows in the log: either a scaler has skipped it, as it should, or the weights are lost"
    finding = STEPS_NOT_FINITE.finding(
        "warning" if may_be_skipped else "error",
        f"The {'gradient norm' if of_norm else 'loss'} of step {line.step} is {value}{said}.",
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


GRADIENT_JUMP_DEVIATIONS = Threshold(
    code="AMP720",
    name="deviations",
    default=6.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1000.0,
    why="Of the logarithm above the median of the last 128 accepted steps: OLMo's and levanter's six, with a median in "
    "place of a mean.",
)
GRADIENT_JUMP_BEYOND = Threshold(
    code="AMP720",
    name="beyond",
    default=1.5,
    unit="share",
    lowest=0.0,
    highest=100.0,
    why="How far beyond the highest of the window, as a share of that one's way from the median: a norm with a heavy "
    "tail has been far before.",
)
GRADIENT_JUMP_TIMES = Threshold(
    code="AMP720",
    name="times",
    default=1.5,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Of the usual norm: what is many deviations of a norm that hardly moves, as a discriminator's in its first "
    "steps, and less than half as large again, does no harm.",
)
GRADIENT_JUMP = register(
    "AMP720",
    "gradient-jump",
    "The gradient norm or the loss jumps",
    worst="warning",
    commands=WATCHED,
    thresholds=(GRADIENT_JUMP_DEVIATIONS, GRADIENT_JUMP_BEYOND, GRADIENT_JUMP_TIMES),
)


@GRADIENT_JUMP.judges(StepState)
def gradient_jump(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    """A step whose norm or loss is far above the usual, and beyond all recent values."""
    least = thresholds[GRADIENT_JUMP_DEVIATIONS]
    if not moment.judged or (moment.norm_above < least and moment.loss_above < least) or moment.line.skipped:
        return ()
    line, norm, loss = moment.line, norm_of(moment.line), moment.line.loss
    of_norm = (
        norm is not None
        and moment.norm_above >= least
        and norm >= thresholds[GRADIENT_JUMP_TIMES] * moment.norm.usual
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
    blamed = ": look at the batch, and at the update before it" if first == "data" else ""
    too = f"; the loss left the usual with it{blamed}" if both else ""
    times = f", {value / usual:.3g} times the usual {usual:.3g}" if usual > 0 else f"; the usual is {usual:.3g}"
    finding = GRADIENT_JUMP.finding(
        "warning",
        f"The {what} of step {line.step} is {value:.3g}{times} ({above:.1f} robust deviations){too}.",
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


CLIMBS_AT_FIRST_LOSS = Threshold(
    code="AMP741",
    name="loss",
    default=2.0,
    unit="factor",
    lowest=1.1,
    highest=1e9,
    why="Median of the last 16 losses over that of the first 8. In the first 400 steps of 309 healthy trainings of "
    "benchmarks/alerts (seeds 0 to 3) it is 1.15 at most.",
)
CLIMBS_AT_FIRST_NORM = Threshold(
    code="AMP741",
    name="norm",
    default=30.0,
    unit="factor",
    lowest=1.5,
    highest=1e9,
    why="Median of the last 8 gradient norms over that of the first 8, while the loss is not below its first level. In "
    "the same trainings it is 2.3 at most; 22 of a critic, which has its generator beside it and is left alone.",
)
CLIMBS_AT_FIRST = register(
    "AMP741",
    "climbs-at-first",
    "The loss or the gradient norm has grown many times over in the first steps",
    worst="error",
    commands=WATCHED,
    thresholds=(CLIMBS_AT_FIRST_LOSS, CLIMBS_AT_FIRST_NORM),
)


@CLIMBS_AT_FIRST.judges(StepState)
def _climbs_at_first(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.alone:
        return ()  # with several optimizers, one's gain is another's loss
    loss, norm = moment.first_losses.rise(RECENT), moment.first_norms.rise(FIRST)
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
    finding = CLIMBS_AT_FIRST.finding(
        "error" if both else "warning",
        f"The {what} of the last {steps} steps is {times * first:.4g}, {times:.3g} times what it was in the first "
        f"{FIRST} ({first:.4g}){too}.",
        where=Where(step=moment.line.step, phase="loss" if of_loss else "backward"),
        evidence={
            "first": "optimizer" if moment.first() == "optimizer" else "data" if of_loss and not too else "gradient",
            "loss_times": loss,
            "norm_times": norm,
            "first_loss": _known(moment.first_losses.first),
            "first_norm": _known(moment.first_norms.first),
        },
    )
    return (finding,)


def _known(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN is not itself


LEVEL_SHIFTS_SUM = Threshold(
    code="AMP724",
    name="sum",
    default=12.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Of the loss and the norm together: of the mean of the last 4, 8 or 16 of each above what is usual, in "
    "deviations of such a mean. The healthy trainings of benchmarks/alerts stay below 9.3.",
)
LEVEL_SHIFTS_LOSS = Threshold(
    code="AMP724",
    name="loss",
    default=6.8,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="Likewise of the loss alone: healthy ones stay below 5.8.",
)
LEVEL_SHIFTS_NORM = Threshold(
    code="AMP724",
    name="norm",
    default=3.8,
    unit="robust standard deviations",
    lowest=0.5,
    highest=MOST,
    why="Of the norm alone, in deviations of one value, because a norm wanders: its mean over 16 steps is no nearer to "
    "the usual than one over 8, and over fewer it is not asked. Not while the loss falls. Healthy ones stay below 3.6; "
    "one value counts 5 at most.",
)
LEVEL_SHIFTS = register(
    "AMP724",
    "level-shifts",
    "The loss or the gradient norm climbs",
    worst="warning",
    commands=WATCHED,
    thresholds=(LEVEL_SHIFTS_SUM, LEVEL_SHIFTS_LOSS, LEVEL_SHIFTS_NORM),
)
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
    matters, of_spans = moment.undoes(moment.loss.latest), list(zip(_ROOTS, losses, norms, strict=True))
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
        f"The {'loss and the gradient norm have' if worst == of_both else f'{what} has'} climbed: the {what} of the "
        f"last {SPANS[0]} steps is {course.latest:.4g}, usual is {course.usual:.4g} (over up to {SPANS[-1]} steps, in "
        f"robust deviations, of which a step counts {MOST:.0f} at most: loss {loss:+.1f}, gradient norm {norm:+.1f}).",
        where=Where(step=moment.line.step, phase="backward" if norm > loss else "loss"),
        evidence={
            "first": moment.first("gradient" if norm > loss else "data"),
            "loss_lift": loss,
            "norm_lift": norm,
            "latest": course.latest,
            "usual": course.usual,
        },
    )
    return (finding,)


LOSS_NOT_BACK_STEPS = Threshold(
    code="AMP721",
    name="steps",
    default=20,
    unit="steps",
    lowest=2,
    highest=10_000,
    why="In a row above the usual by three robust deviations, after a spike of six: a spike that does harm stays, one "
    "that does not is back within ten steps or so (BLOOM's, PaLM's).",
)
LOSS_NOT_BACK = register(
    "AMP721",
    "loss-not-back",
    "The loss has jumped and not come back",
    worst="error",
    commands=WATCHED,
    thresholds=(LOSS_NOT_BACK_STEPS,),
)


@LOSS_NOT_BACK.judges(StepState)
def _loss_not_back(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    spike = moment.spike
    if spike is None:
        return ()
    steps = int(thresholds[LOSS_NOT_BACK_STEPS])
    if spike.above != steps:
        return ()
    line = moment.line
    finding = LOSS_NOT_BACK.finding(
        "error",
        f"The loss rose to {spike.value:.4g} at step {spike.step}, from about {spike.usual:.4g}, and {steps} steps "
        f"later it is still {line.loss:.4g}: above {spike.limit:.4g} in each of them.",
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


DESCENT_LOST_SHARE = Threshold(
    code="AMP739",
    name="share",
    default=0.5,
    unit="share",
    why="Of the way from the highest usual loss to the lowest that the usual loss has gone back up. Trainings that "
    "were ruined went back by 0.48 to 1; healthy ones by 0.22 at most, and by 0.47 where their task was changed.",
)
DESCENT_LOST = register(
    "AMP739",
    "descent-lost",
    "The loss has given back what it had learned",
    worst="warning",
    commands=WATCHED,
    thresholds=(DESCENT_LOST_SHARE,),
)


@DESCENT_LOST.judges(StepState)
def _descent_lost(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    if moment.loss.count % HOP or moment.loss.count < LENGTH or not moment.alone:
        return ()  # the usual loss changes once a hop
    descent, usual = moment.descent, moment.loss.usual
    way = descent.fallen_from - descent.lowest
    if not descent.falls or usual - descent.lowest < thresholds[DESCENT_LOST_SHARE] * way:
        return ()
    share = (usual - descent.lowest) / way
    finding = DESCENT_LOST.finding(
        "warning",
        f"The loss is back at {usual:.4g}, after {descent.lowest:.4g} at its lowest: {share:.0%} of the way that it "
        f"had come down from {descent.fallen_from:.4g} is lost.",
        where=Where(step=moment.line.step, phase="loss"),
        evidence={
            "first": moment.first("data"),
            "usual": usual,
            "lowest": descent.lowest,
            "highest": descent.fallen_from,
            "share": share,
        },
    )
    return (finding,)


LOSS_FALLS_DEVIATIONS = Threshold(
    code="AMP732",
    name="deviations",
    default=6.0,
    unit="robust standard deviations",
    lowest=0.5,
    highest=1000.0,
    why="By which the median of the last 16 losses is below the 112 before. A note only: a curriculum, a phase of "
    "fast learning and a lower learning rate do the same.",
)
LOSS_FALLS = register(
    "AMP732",
    "loss-falls",
    "The training loss falls at once",
    worst="note",
    commands=WATCHED,
    thresholds=(LOSS_FALLS_DEVIATIONS,),
)


@LOSS_FALLS.judges(StepState)
def _loss_falls(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    loss = moment.loss
    if (
        not moment.judged
        or moment.accepted % HOP
        or loss.count < LENGTH
        or loss.shift > -thresholds[LOSS_FALLS_DEVIATIONS]
    ):
        return ()
    finding = LOSS_FALLS.finding(
        "note",
        f"The training loss has fallen at once, from {loss.usual:.4g} to {loss.recent:.4g} over {RECENT} steps "
        f"({-loss.shift:.1f} robust deviations): good news, or batches that repeat.",
        where=Where(step=moment.line.step, phase="data"),
        evidence={"first": "data", "usual": loss.usual, "recent": loss.recent, "deviations": -loss.shift},
    )
    return (finding,)


PLATEAU_STEPS = Threshold(
    code="AMP731",
    name="steps",
    default=2000,
    unit="steps",
    lowest=200,
    highest=10_000_000,
    why="Without a lower loss, each mean of 200 held against the one before. A note only: a run at the end of its "
    "learning does the same.",
)
PLATEAU = register(
    "AMP731",
    "plateau",
    "The loss stands while the gradients do not vanish",
    worst="note",
    commands=WATCHED,
    thresholds=(PLATEAU_STEPS,),
)


@PLATEAU.judges(StepState)
def _plateau(moment: StepState, thresholds: Thresholds) -> Sequence[Finding]:
    stretch = moment.plateau
    if not stretch.steps or stretch.told or stretch.steps < thresholds[PLATEAU_STEPS] or math.isnan(stretch.best):
        return ()
    stretch.told = True
    falling = stretch.norm_now < 0.5 * stretch.norm_then
    finding = PLATEAU.finding(
        "note",
        f"The loss has not fallen below {stretch.best:.4g} for {stretch.steps} steps; the gradient norm "
        f"{'has fallen' if falling else 'has not'}, from {stretch.norm_then:.3g} to {stretch.norm_now:.3g}: "
        f"{'it has converged, or saturated' if falling else 'it still pushes, and gets nowhere'}.",
        where=Where(step=moment.line.step, phase="loss"),
        evidence={
            "first": "gradient" if falling else "optimizer",
            "best": stretch.best,
            "steps": stretch.steps,
            "norm_before": stretch.norm_then,
            "norm": stretch.norm_now,
        },
    )
    return (finding,)
