"""AMP720: the gradient norm or the loss leaves at once what was usual."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment, norm_of
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

DEVIATIONS = Threshold(
    code="AMP720",
    name="deviations",
    default=6.0,
    unit="robust standard deviations",
    lowest=1.0,
    highest=1000.0,
    why="Of the logarithm above the median of the last 128 accepted steps: OLMo's and levanter's six, with a median in "
    "place of a mean.",
)
BEYOND = Threshold(
    code="AMP720",
    name="beyond",
    default=1.5,
    unit="share",
    lowest=0.0,
    highest=100.0,
    why="How far beyond the highest of the window, as a share of that one's way from the median: a norm with a heavy "
    "tail has been far before.",
)
TIMES = Threshold(
    code="AMP720",
    name="times",
    default=1.5,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="Of the usual norm: what is many deviations of a norm that hardly moves, as a discriminator's in its first "
    "steps, and less than half as large again, does no harm.",
)
RULE = register(
    "AMP720",
    "gradient-jump",
    "The gradient norm or the loss jumps",
    worst="warning",
    commands=WATCHED,
    thresholds=(DEVIATIONS, BEYOND, TIMES),
)


@RULE.judges(StepMoment)
def gradient_jump(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    """A step whose norm or loss lies beyond whatever was usual before it."""
    least = thresholds[DEVIATIONS]
    if not moment.judged or (moment.norm_above < least and moment.loss_above < least) or moment.line.skipped:
        return ()
    line, norm, loss = moment.line, norm_of(moment.line), moment.line.loss
    of_norm = (
        norm is not None
        and moment.norm_above >= least
        and norm >= thresholds[TIMES] * moment.norm.usual
        and moment.moves(norm)
        and moment.norm.beyond(norm) >= thresholds[BEYOND]
    )
    of_loss = moment.loss_above >= least and moment.matters(loss)
    course, value = (moment.norm, norm) if of_norm else (moment.loss, loss if of_loss else None)
    beyond = 0.0 if value is None else course.beyond(value)
    if value is None or beyond < thresholds[BEYOND]:
        return ()
    what, above = ("gradient norm", moment.norm_above) if of_norm else ("loss", moment.loss_above)
    usual = course.usual
    both = of_norm and loss is not None and moment.loss_above >= least
    first = moment.first()
    blamed = ": look at the batch, and at the update before it" if first == "data" else ""
    too = f"; the loss left the usual with it{blamed}" if both else ""
    times = f", {value / usual:.3g} times the usual {usual:.3g}" if usual > 0 else f"; the usual is {usual:.3g}"
    finding = over_time_finding(
        RULE,
        "warning",
        f"The {what} of step {line.step} is {value:.3g}{times} ({above:.1f} robust deviations){too}.",
        step=line.step,
        first=first,
        phase="backward" if of_norm else "loss",
        evidence={
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
