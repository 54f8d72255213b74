"""AMP741: the loss or the gradient norm has grown many times over before there is a usual."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.beginning import FIRST
from ampdoctor.diagnosis.over_time.course import RECENT
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LOSS = Threshold(
    code="AMP741",
    name="loss",
    default=2.0,
    unit="factor",
    lowest=1.1,
    highest=1e9,
    why="Median of the last 16 losses over that of the first 8. In the first 400 steps of 309 healthy trainings of "
    "benchmarks/alerts (seeds 0 to 3) it is 1.15 at most.",
)
NORM = Threshold(
    code="AMP741",
    name="norm",
    default=30.0,
    unit="factor",
    lowest=1.5,
    highest=1e9,
    why="Median of the last 8 gradient norms over that of the first 8, while the loss is not below its first level. In "
    "the same trainings it is 2.3 at most; 22 of a critic, which has its generator beside it and is left alone.",
)
RULE = register(
    "AMP741",
    "climbs-at-first",
    "The loss or the gradient norm has grown many times over in the first steps",
    worst="error",
    commands=WATCHED,
    thresholds=(LOSS, NORM),
)


@RULE.judges(StepMoment)
def _climbs_at_first(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    if not moment.alone:
        return ()  # what one of several optimizers wins, another loses
    loss, norm = moment.first_losses.rise(RECENT), moment.first_norms.rise(FIRST)
    if loss < thresholds[LOSS] and norm < thresholds[NORM]:
        return ()
    of_loss = loss >= thresholds[LOSS]
    if not of_loss and 0 < moment.first_losses.rise(FIRST) < 1:
        return ()  # it learns
    what, times, steps, first = (
        ("loss", loss, RECENT, moment.first_losses.first)
        if of_loss
        else ("gradient norm", norm, FIRST, moment.first_norms.first)
    )
    both = of_loss and norm >= thresholds[NORM]
    too = f", and the gradient norm {norm:.3g} times" if of_loss and norm >= thresholds[LOSS] else ""
    finding = over_time_finding(
        RULE,
        "error" if both else "warning",
        f"The {what} of the last {steps} steps is {times * first:.4g}, {times:.3g} times what it was in the first "
        f"{FIRST} ({first:.4g}){too}.",
        step=moment.line.step,
        first="optimizer" if moment.first() == "optimizer" else "data" if of_loss and not too else "gradient",
        phase="loss" if of_loss else "backward",
        evidence={"loss_times": loss, "norm_times": norm, "first_loss": _known(moment.first_losses.first),
                  "first_norm": _known(moment.first_norms.first)},
    )  # fmt: skip
    return (finding,)


def _known(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN is not itself
