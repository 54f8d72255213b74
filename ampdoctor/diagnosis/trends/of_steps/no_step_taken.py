"""AMP740: every step is skipped, or the loss scale starts over again and again."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.descent import falls_over
from ampdoctor.diagnosis.over_time.ill_steps import HOPELESS, LEAST_ROWS, SETTLING
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

STEPS = Threshold(
    code="AMP740",
    name="settling",
    default=SETTLING,
    unit="steps",
    lowest=2,
    highest=1_000_000,
    why="Skipped from the run's first step on. AMP703 grants a settling scaler as many: from the highest initial "
    "scale, 2^32, down to 1 are 32.",
)
STARTS = Threshold(
    code="AMP740",
    name="starts",
    default=2,
    unit="times",
    lowest=1,
    highest=1_000_000,
    why="That the scale rises as no scaler lets it rise. Once is a training that went on without its scaler's state, "
    "or a scale that was set by hand.",
)
RULE = register(
    "AMP740",
    "no-step-taken",
    "No step is taken, or the loss scale starts over again and again",
    worst="error",
    commands=WATCHED,
    thresholds=(STEPS, STARTS),
)


@RULE.judges(StepMoment)
def _no_step_taken(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    scale = moment.scale
    if scale.is_new and scale.anew == thresholds[STARTS]:
        return (_starts_over(moment),)
    if scale.in_a_row < LEAST_ROWS:
        return ()
    steps = scale.until - scale.since + 1
    from_the_first = not scale.taken
    gone = moment.end is not None and scale.now is not None and scale.now <= 1  # which scales nothing, at the log's end
    least = thresholds[STEPS] if from_the_first and not gone else HOPELESS
    if steps < least or (not from_the_first and scale.now is not None):
        return ()  # of a scale that falls later on, AMP723 says more
    if not scale.told and falls_over(scale.losses):  # then the norm is not what the optimizer saw
        return ()
    which = "from the first one on" if from_the_first else f"from step {scale.since} on"
    how = "is skipped" if scale.told else "has a gradient that is not finite, and its loss says that it was skipped"
    at = f", at a loss scale of {scale.now:g} by now" if scale.now is not None else ""
    return (_finding(moment, "error", f"Each of {steps} steps {which} {how}{at}: the weights do not move."),)


def _starts_over(moment: StepMoment) -> Finding:
    scale, step = moment.scale, moment.line.step
    harm = "skips its first steps each time" if scale.taken else "never gets down to the scale that works"
    message = (
        f"The loss scale is back at {scale.now:g} at step {step}, for the {_times(scale.anew)} time, where no scaler "
        f"lets it grow: the GradScaler is made anew again and again, as in each epoch, and {harm} ({scale.skipped} of "
        f"{scale.taken + scale.skipped} steps were skipped so far). Make it once, before the epochs."
    )
    return _finding(moment, "warning" if scale.taken else "error", message)


def _times(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _finding(moment: StepMoment, severity: Severity, message: str) -> Finding:
    scale = moment.scale
    return over_time_finding(
        RULE,
        severity,
        message,
        step=moment.line.step,
        first=moment.first("scale"),
        phase="scaler",
        evidence={
            "scale": scale.now,
            "first_scale": scale.first,
            "taken": scale.taken,
            "skipped": scale.skipped,
            "skipped_in_a_row": scale.in_a_row,
            "starts_over": scale.anew,
        },
    )
