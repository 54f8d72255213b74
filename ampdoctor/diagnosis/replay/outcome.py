"""Rules on the replay itself: not reproduced, not deterministic, not finite in fp32 either."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampdoctor.diagnosis.catalogue import MEASURED, REPLAYED, rule
from ampdoctor.diagnosis.health.loss_rules import STEPS_NOT_FINITE
from ampdoctor.diagnosis.health.run_rules import NO_STEP_TAKEN
from ampdoctor.diagnosis.replay.scale_choice import where_at
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Report, Severity
from ampdoctor.evidence.trace import NonFiniteOrigin

NOT_REPRODUCED = rule("AMP902", REPLAYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """Evidence from outside the replay that the run fails."""

    why: str  # the evidence in words
    step: int | None = None  # the first global step at which it fails, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The circumstances of a replay in which nothing failed."""

    steps: int  # optimizer steps that were replayed
    device: str  # "cpu", "cuda:0"
    policy: str  # whose autocast list: "cuda", "native"
    precision: str  # the compute format ("fp16")
    scaled: bool  # with an enabled GradScaler
    torch: str  # torch's version
    checkpoint: bool = False  # a checkpoint was loaded
    global_step: int | None = None  # optimizer steps that the checkpoint had done, if recorded
    lacks: tuple[str, ...] = ()  # parts of the run's state that the checkpoint lacked ("optimizer")
    file_scaler: ScalerState | None = None  # the scaler's state in the checkpoint
    compared: int | None = None  # steps compared with fp32, where the user wanted fewer than all
    option: str = "--steps"  # the option that sets the number of steps
    placed: bool = False  # the batches begin where the checkpoint was saved


def known_failure(
    of_log: Iterable[Finding], loss: float | None, scaler: ScalerState | None, *, said: bool
) -> KnownFailure | None:
    """Returns the evidence that the run fails, if there is any; `said`: the user says so (`--expect-failure`).

    `of_log` is found in its log; `loss` was saved with the checkpoint. What the run came back from is no failure, and
    neither is the last norm of a log, where a scaler may have skipped the step. A loss scale below 1 that an overflow
    has just lowered is still falling; a scale that has settled there may train well.
    """
    for one in of_log:
        step, lost, norm = one.where.global_step, one.evidence.get("loss"), one.evidence.get("gradient_norm")
        if one.code == STEPS_NOT_FINITE.code and one.severity != "note":
            if lost is not None and not math.isfinite(lost):
                return KnownFailure(why=f"its log has a loss of {lost} at step {step}", step=step)
            if one.severity == "error":
                return KnownFailure(why=f"its log has gradient norms of {norm} from step {step} on", step=step)
        if one.code == NO_STEP_TAKEN.code and one.severity == "error":
            return KnownFailure(why="by its log no step is taken any more", step=step)
    if loss is not None and not math.isfinite(loss):
        return KnownFailure(why=f"a loss of {loss} was saved with its checkpoint")
    if scaler is not None and 0 < scaler.scale < 1 and scaler.growth_tracker == 0:
        return KnownFailure(why=f"its checkpoint's loss scale has come down to {scaler.scale:g}")
    return KnownFailure(why="so the user says") if said else None


def not_reproduced_finding(known: KnownFailure, here: Here) -> Finding:
    """Makes the note: why a clean replay does not prove a healthy run, and what to change to see the failure."""
    differs = differences(known, here)
    return NOT_REPRODUCED.finding(
        "note",
        f"the run is known to fail ({known.why}), but {here.steps} "
        f"step{'' if here.steps == 1 else 's'} of it stayed finite here",
        where=Where(step=max(here.steps - 1, 0), phase="loss"),
        evidence={
            "known_from": known.why,
            "failing_step": known.step,
            "global_step": here.global_step,
            "steps": here.steps,
            "device": here.device,
            "policy": here.policy,
            "precision": here.precision,
            "torch": here.torch,
            "differences": list(differs),
            **({} if here.compared is None else {"compared": here.compared}),
        },
        advice="What differs here: " + "; ".join(differs) + ".",
    )


def differences(known: KnownFailure, here: Here) -> tuple[str, ...]:
    """Returns clauses on what differs, or may differ, between the replay and the failed run, the likeliest first."""
    found = [] if here.compared is None else [_comparison(here.compared)]
    found.append(_steps(known, here))
    if not here.checkpoint:
        found.append("the weights are as the factory makes them, not as they were when it failed (--checkpoint)")
    found += [f"the checkpoint holds no {part}" for part in here.lacks]
    found.append(_data(here))
    if here.file_scaler is not None and not here.scaled:
        found.append(f"it was trained with a GradScaler, in fp16, and is replayed in {here.precision} without one")
    if here.device != "cpu":
        found.append(f"the device is {here.device} of this machine")
    elif here.policy == "cuda":
        found.append(
            "the device is a CPU that casts as CUDA's autocast does: what only a GPU's kernel does is not seen"
        )
    else:
        found.append("the device is a CPU, with its own autocast list (--policy native)")
    found.append("one process replays it: what hangs on the number of ranks is not seen")
    found.append(f"torch is {here.torch}")
    return tuple(found)


def _data(here: Here) -> str:
    if here.placed:
        return (
            f"the data are those that followed step {here.global_step}, as far as the factory gives them in that order"
        )
    other = "" if here.global_step is None else f", not those that followed step {here.global_step}"
    return f"the data are the first {here.steps} steps' batches of the factory{other}"


def comparison_left_out(report: Report) -> str | None:
    """Returns the option with which the user limited the comparison with fp32, if a known failure did not show."""
    compared = next((one.evidence.get("compared") for one in report.found if one.code == NOT_REPRODUCED.code), None)
    return None if compared is None else _option(compared)


def _option(compared: int) -> str:
    return "--compare-steps" if compared else "--no-compare"


def _comparison(compared: int) -> str:
    held = f"only {compared} step{' was' if compared == 1 else 's were'}" if compared else "no step was"
    return f"{held} held beside fp32, where alone a failure shows that stays finite (leave out {_option(compared)})"


def _steps(known: KnownFailure, here: Here) -> str:
    if known.step is None or here.global_step is None:
        return f"only {here.steps} steps were replayed ({here.option})"
    first, last = here.global_step + 1, here.global_step + here.steps
    if known.step < first:
        return (
            f"it failed from step {known.step} on, before this checkpoint was saved at step {here.global_step}: one "
            f"from before step {known.step} starts nearer to it"
        )
    if known.step > last:
        reach = known.step - here.global_step
        further = f"{here.option} {reach} reaches it"
        return f"it failed at step {known.step}, and steps {first} to {last} were replayed ({further})"
    data = "with the data that the factory gives for it" if here.placed else "but not with that step's data"
    return f"it failed at step {known.step}, which was replayed, {data}"


NONDETERMINISTIC_REPLAY = rule("AMP901", REPLAYED)


def nondeterministic_finding(
    step: int, what: str, first: float, second: float, severity: Severity = "warning"
) -> Finding:
    """Makes the finding for a step that gave other bits; the loss or the largest values of `what` differed first."""
    return NONDETERMINISTIC_REPLAY.finding(
        severity,
        f"step {step} does not come back bit by bit from the same state and random state: the first "
        f"difference is the {what or 'loss'}, {first:.9g} and then {second:.9g}",
        where=Where(step=step, phase="forward"),
        evidence={"differs": what or "loss", "first": first, "second": second},
        advice="Seed every generator in the factory, and keep counters and files of the loop inside it.",
    )


NONFINITE_IN_FP32 = rule("AMP206", MEASURED)

DIVERGES = (
    "No precision and no loss scale cures it: lower the learning rate or warm it up, clip the gradients, and look at "
    "the data and the formula."
)


def diverging_finding(origin: NonFiniteOrigin, losses: Sequence[float | None]) -> Finding:
    """Makes the finding for a run whose updates lead to non-finite values in fp32 too, at once or a few steps later.

    `origin` is where it first left the compute format. `losses` are in fp32, of all steps up to the non-finite one.
    """
    last = len(losses) - 1
    before = losses[last - 1]
    grew = "" if losses[0] is None or before is None else f" (loss {losses[0]:.3g} in step 0, {before:.3g} before it)"
    return NONFINITE_IN_FP32.finding(
        "error",
        f"step {origin.where.step} is not finite, and in fp32 from the start step {last} is not either{grew}: "
        "the updates drive the run there, and precision is not the cause",
        where=Where(step=origin.where.step, phase=origin.where.phase, nonfinite=origin.where.nonfinite),
        evidence={"fp32_step": last, "fp32_losses": list(losses)},
        advice=DIVERGES,
        prescription=Prescription(
            kind="code",
            value=DIVERGES,
            status="not_run",
            detail=DIVERGES,
            reason="how large a step the run bears is not tried",
        ),
    )


def nonfinite_in_fp32(steps: Sequence[int]) -> Finding:
    """Makes the finding of AMP206: the fp32 reference itself is not finite at these steps."""
    return NONFINITE_IN_FP32.finding(
        "error",
        f"step {steps[0]} is not finite in fp32 either (loss, gradients or state): precision is not the cause",
        where=where_at(steps[0], phase="backward", nonfinite="nan"),
        evidence={"steps": list(steps)},
        prescription=Prescription(
            kind="code",
            value=NONFINITE_IN_FP32.page.texts["action"],
            status="not_run",
            detail=NONFINITE_IN_FP32.page.texts["action"],
            reason="what to change depends on what makes the value",
        ),
    )
