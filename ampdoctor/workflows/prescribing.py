"""From a cause to candidates, smallest first, each replayed until one cures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.causes import Cause, excess_binades
from ampdoctor.diagnosis.findings import HELP
from ampdoctor.evidence.report import Prescription
from ampdoctor.workflows import trials as change

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import Birth
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.trials import Trials

EPSILON = 1e-3
"""An optimizer epsilon that fp16 and bf16 state hold with room to spare: fp16's smallest normal number is 6e-5."""


FP32_FAILS = (
    "The same step is not finite in fp32 either, so no precision and no loss scale cures it: look at the learning "
    "rate, the data and the formula."
)
SCALES = (2.0**16, 2.0**12, 2.0**20, 2.0**24)
"""Loss scales tried against underflow: torch's default, then lower where that overflows, then higher."""


def prescribe(birth: Birth, cause: Cause, trials: Trials, session: Session) -> Prescription:
    """The first candidate that a replay verifies; else what the user's code must change, with what was tried.

    Args:
        birth: The culprit.
        cause: Its cause.
        trials: Replays changes on the bad step.
        session: The session.
    """
    cure = change.first_cure(_candidates(birth, cause, trials, session))
    if cure is not None and cure.verified:
        return cure
    tried = (replace(cure, alternatives=()), *cure.alternatives) if cure is not None else ()
    advice = HELP[cause] if trials.reference() is not None else FP32_FAILS
    return Prescription(
        kind="code",
        value=advice,
        status="not_run",
        detail=advice,
        alternatives=tried,
        reason="no setting cures it; only the code can be changed",
    )


def scale_cure(birth: Birth, trials: Trials, session: Session) -> Prescription | None:
    """Lower loss scales, from the one that the overflow asks for down to 1; None where no scaler is enabled."""
    scale = session.events.scale()
    if scale is None:
        return None
    excess = excess_binades(birth) or 1.0
    wanted = 2.0 ** math.floor(math.log2(scale) - excess)
    # other gradients of the step may be larger than the first that overflowed: on down, two binades at a time
    candidates = [s for s in (wanted / 4**i for i in range(8)) if s > 1.0] + [1.0]
    return change.first_cure(
        trials.attempt("init_scale", s, change.loss_scale(s), f"GradScaler(init_scale={s:g})") for s in candidates
    )


def fresh_scaler(trials: Trials) -> Prescription | None:
    """A new GradScaler in place of one that cannot work."""
    return change.first_cure(_scalers(trials))


def _scalers(trials: Trials) -> Iterator[Prescription]:
    for scale in SCALES:
        yield trials.attempt(
            "scaler", {"init_scale": scale}, change.with_scaler(scale), f"GradScaler(init_scale={scale:g})"
        )


def underflow_cure(trials: Trials, session: Session) -> Prescription:
    """A loss scale at which the gradients agree with fp32 again, the usual one first; else bf16."""

    def attempts() -> Iterator[Prescription]:
        if session.precision.compute == "fp16":
            yield from _scalers(trials)
            yield trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), "train in bf16")

    cure = change.first_cure(attempts())
    return cure or Prescription(
        kind="code",
        value=HELP["grad_underflow"],
        status="not_run",
        detail=HELP["grad_underflow"],
        reason="the run does not compute in fp16",
    )


def _candidates(birth: Birth, cause: Cause, trials: Trials, session: Session) -> Iterator[Prescription]:
    where = birth.where
    compute = session.precision.compute
    if cause == "bad_data":
        yield _without_the_batch(birth, trials, session)
        return
    if cause == "optimizer_precision":
        yield trials.attempt(
            "optimizer", {"eps": EPSILON}, change.optimizer_argument("eps", EPSILON), f"optimizer epsilon {EPSILON:g}"
        )
        yield trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "fp32 weights and optimizer state")
        return
    if cause in ("forward_overflow", "backward_overflow", "invalid_op") and where.module:
        yield trials.attempt(
            "fp32_modules", [where.module], change.fp32_modules([where.module]), f"run {where.module} in fp32"
        )
    if compute == "fp16" and cause != "bad_checkpoint":
        yield trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), "train in bf16, without a GradScaler")
    if cause == "invalid_op" and trials.reference() is None:
        yield _without_the_batch(birth, trials, session)


def _without_the_batch(birth: Birth, trials: Trials, session: Session) -> Prescription:
    step = birth.where.step or 0
    batch = step * session.batches_per_step + birth.where.micro_batch
    of = "" if session.batches_per_step == 1 else f" (the replay left out all of step {step})"
    return trials.attempt("skip_batch", batch, change.no_change, f"leave out batch {batch}{of}", from_step=step + 1)
