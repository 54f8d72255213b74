"""AMP723: the loss scale falls again and again, or lies at its floor."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.diagnosis.catalogue.rule import WATCHED, register
from ampdoctor.diagnosis.over_time.over_time_finding import over_time_finding
from ampdoctor.diagnosis.over_time.step_courses import StepMoment
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

FALLS = Threshold(
    code="AMP723",
    name="falls",
    default=4,
    unit="back-offs",
    lowest=2,
    highest=1000,
    why="Since the scale last grew. A scaler that probes the limit falls once for each growth; four falls between two "
    "growths are 16 times a larger gradient, or a forward that overflows at any scale.",
)
IN_A_ROW = Threshold(
    code="AMP723",
    name="in_a_row",
    default=4,
    unit="steps",
    lowest=2,
    highest=1000,
    why="Skipped one after another, once a step has been taken: the spikes of healthy runs are within 16 times the "
    "usual. It needs no usual, and so no steps before it but that one.",
)
LEAST = Threshold(
    code="AMP723",
    name="least",
    default=1.0,
    unit="scale",
    lowest=0.0,
    highest=65536.0,
    why="A scale below it makes gradients smaller instead of larger: torch's documentation calls it a sign that the "
    "gradients are not to be trusted. An overflow at 1 is one of the gradients as they are; DeepSpeed's floor is "
    "there, and it ends the run.",
)
AT_FLOOR = Threshold(
    code="AMP723",
    name="at_floor",
    default=8,
    unit="steps",
    lowest=2,
    highest=1000,
    why="Skipped one after another at one scale. A scaler falls at each overflow, DeepSpeed's and Megatron-LM's by "
    "default at every second: a scale that eight leave where it is has a floor (DeepSpeed's is 1) or is fixed.",
)
RULE = register(
    "AMP723",
    "scale-ratchets",
    "The loss scale falls and does not grow",
    worst="error",
    commands=WATCHED,
    thresholds=(FALLS, IN_A_ROW, LEAST, AT_FLOOR),
)


@RULE.judges(StepMoment)
def _scale_ratchets(moment: StepMoment, thresholds: Thresholds) -> Sequence[Finding]:
    scale = moment.scale
    stuck = scale.unmoved >= thresholds[AT_FLOOR]
    if scale.now is None or not (stuck or (scale.settled and (scale.falls or scale.in_a_row))):
        return ()
    line, least, in_a_row = moment.line, thresholds[LEAST], thresholds[IN_A_ROW]
    overflows = scale.in_a_row > 0 and scale.until == line.step
    low = scale.highest >= least and (scale.now < least or (overflows and scale.now <= least))
    many = scale.falls >= thresholds[FALLS] or scale.in_a_row >= in_a_row
    ended = moment.end is not None and bool(moment.end.reason or moment.end.exit_code) and scale.in_a_row >= in_a_row
    if not (low or stuck or many):
        return ()
    deep = low and scale.now <= least * 2.0**-in_a_row
    severity: Severity = "error" if (low and scale.in_a_row >= in_a_row) or deep or stuck or ended else "warning"
    skipped = f", and {scale.in_a_row} steps in a row are skipped" if scale.in_a_row > 1 else ""
    if stuck:
        skipped += f", the last {scale.unmoved} of them without a fall: no step is taken any more"
    elif overflows and low:
        skipped += ": gradients overflow even at this scale"
    if ended:
        skipped += "; the run has ended there"
    fallen = f"is {scale.now:g} at step {line.step}"
    if scale.falls:
        binades = f"{scale.falls} times ({scale.fallen:g} binades) since it last grew"
        fallen = f"has fallen to {scale.now:g} at step {line.step}, {binades}"
    ahead = max(0, int(scale.now).bit_length() - 1) if scale.now > 1 else 0
    finding = over_time_finding(
        RULE,
        severity,
        f"The loss scale {fallen}{skipped}"
        f"{f': {ahead} more, and it is at 1, which scales nothing' if ahead and not (low or ended) else ''}.",
        step=line.step,
        first=moment.first(),
        phase="scaler",
        evidence={
            "scale": scale.now,
            "highest": scale.highest,
            "falls": scale.falls,
            "binades": scale.fallen,
            "skipped_in_a_row": scale.in_a_row,
            "steps_between_falls": list(scale.lengths),
            **({"ended": moment.end.reason or True} if ended and moment.end is not None else {}),
        },
    )
    return (finding,)
