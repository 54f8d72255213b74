"""Turns a cause into candidate changes, smallest first, and replays them until one cures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ampdoctor.bisect.smallest_set import smallest_set
from ampdoctor.diagnosis.replay.causes import (
    HELP,
    STATE,
    Cause,
    batch_is_at_fault,
    batch_may_be_at_fault,
    excess_binades,
)
from ampdoctor.evidence.python_lines import exact
from ampdoctor.evidence.report import Prescription
from ampdoctor.probes.altering.ran import OwnOps
from ampdoctor.workflows.proving import changes as change
from ampdoctor.workflows.proving.hand_scale import rescaled
from ampdoctor.workflows.proving.interventions import intervene
from ampdoctor.workflows.proving.other_kernels import around, other_kernels
from ampdoctor.workflows.proving.repair import repair
from ampdoctor.workflows.proving.scaler_protocol import put_right
from ampdoctor.workflows.proving.trials import SHOWN, first_cure

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Birth
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.proving.changes import Change
    from ampdoctor.workflows.proving.trials import Trials

EPSILON = 1e-3
"""An optimizer epsilon well above fp16's smallest normal number (6e-5), so that fp16 and bf16 state hold it."""


FP32_FAILS = (
    "The same step is not finite in fp32 either, so no precision and no loss scale cures it: look at the learning "
    "rate, the data and the formula."
)
SCALES = (2.0**16, 2.0**12, 2.0**20, 2.0**24)
"""Loss scales tried against underflow: torch's default, then a lower one in case it overflows, then higher ones."""


_PRECISIONS_OWN = ("forward_overflow", "backward_overflow", "invalid_op")
"""Causes that a format may be behind: if nothing smaller cures, fp32 throughout does, provided fp32 is finite."""
MOST_TRIALS = 60
"""Maximum number of trials of a search: enough to find a set of five among hundreds of modules."""
MOST_SCALES = 8
"""Number of lower loss scales to try, two binades apart."""


def prescribe(
    birth: Birth, cause: Cause, trials: Trials, session: Session, *, others: Sequence[Birth] = ()
) -> Prescription:
    """Returns the first candidate that a replay verifies; else the change that the code needs, as an intervention.

    Args:
        birth: The culprit.
        cause: Its cause.
        trials: Replays changes on the bad step.
        session: The session.
        others: Independent births of the same step.
    """
    births = (birth, *others)
    if birth.origin == "grad":
        return put_right(birth.where.op or "", trials, session)
    cure = first_cure(_candidates(births, cause, trials, session))
    if cure is None or cure.status not in SHOWN:
        return _in_code(births, cause, trials, session, cure)
    return replace(cure, alternatives=(*cure.alternatives, *_beside(births, cure, trials, session)))


def _in_code(
    births: Sequence[Birth], cause: Cause, trials: Trials, session: Session, failed: Prescription | None
) -> Prescription:
    """Returns a change of the user's own code; what is left to try where none is shown to help; else words.

    Args:
        births: The culprit, and others.
        cause: Its cause.
        trials: Replays changes on the bad step.
        session: The session.
        failed: What was tried before, of which nothing cures.
    """
    birth = births[0]
    tried = (replace(failed, alternatives=()), *failed.alternatives) if failed is not None else ()
    if birth.origin in STATE:
        code = repair([b.where for b in births if b.origin in STATE], trials)
    else:
        code = intervene(births, trials)
    if code.status == "intervention":
        return replace(code, alternatives=tried)
    fails_anyway = trials.reference() is None and trials.unable is None
    last: Prescription | None = None
    if cause in _PRECISIONS_OWN and trials.reference() is not None:
        last = trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "train in fp32")
    elif cause == "invalid_op" and fails_anyway and batch_may_be_at_fault(birth) and not batch_is_at_fault(birth):
        last = _without_the_batch(birth, trials, session)
    if last is not None and last.verified:
        return replace(last, alternatives=(*tried, code))
    advice = FP32_FAILS if fails_anyway and cause != "bad_data" else HELP[cause]
    return replace(code, value=advice, detail=advice, alternatives=tried)


def _beside(births: Sequence[Birth], cure: Prescription, trials: Trials, session: Session) -> Iterator[Prescription]:
    """Yields alternatives to a verified change, if they cost little to try.

    To a whole run in another format for one line of the loss: the change of that line. To several modules in fp32:
    another format for all. To a module in fp32 for an unusual batch: the run without that batch, whose replay takes
    only the steps after it.
    """
    birth = births[0]
    if cure.kind == "fp32_modules" and len(cure.value) > 1 and session.precision.compute == "fp16":
        yield _in_bf16(trials, session)
    if cure.kind == "dtype" and not birth.where.module:
        yield intervene(births, trials, first_only=True)
    if cure.kind == "fp32_modules" and birth.where.phase == "forward" and (birth.where.step or 0) > 0:
        yield _without_the_batch(birth, trials, session)


def scale_cure(birth: Birth, trials: Trials, session: Session, used: float | None = None) -> Prescription | None:
    """Try lower loss scales, from the one that removes the overflow down to 1; None if no scaler is enabled.

    Args:
        birth: The overflow.
        trials: The trials of its step.
        session: The session.
        used: The scale of the scaler that skipped the step; the step may have made that scaler itself.
    """
    scale, lowered = session.events.scale(), change.loss_scale
    if scale is None or (used is not None and session.makes_scalers):
        scale, lowered = used, change.with_scaler
    if scale is None:
        return None
    scale = abs(scale)  # GradScaler accepts a negative scale, which overflows just as soon
    if not 0.0 < scale < math.inf:
        return None
    excess = excess_binades(birth) or 1.0
    wanted = 2.0 ** math.floor(math.log2(scale) - excess)
    # other gradients of the step may be larger than the first that overflowed: go on down, two binades at a time
    candidates = [s for s in (wanted / 4**i for i in range(8)) if s > 1.0] + [1.0]
    return first_cure(
        trials.attempt("init_scale", s, lowered(s), f"GradScaler(init_scale={exact(s)})") for s in candidates
    )


def fresh_scaler(trials: Trials) -> Prescription | None:
    """Try a new GradScaler in place of one that cannot work."""
    return first_cure(_scalers(trials))


def _scalers(trials: Trials) -> Iterator[Prescription]:
    for scale in SCALES:
        yield trials.attempt(
            "scaler", {"init_scale": scale}, change.with_scaler(scale), f"GradScaler(init_scale={exact(scale)})"
        )


def can_unscale(session: Session) -> bool:
    """Would a GradScaler take the run's gradients? Those of weights that are fp16 themselves it refuses to unscale."""
    groups = (group for optimizer in session.optimizers.values() for group in optimizer.param_groups)
    return all(parameter.dtype is not torch.float16 for group in groups for parameter in group["params"])


def underflow_cure(trials: Trials, session: Session) -> Prescription:
    """Try loss scales at which the gradients may agree with fp32 again, the usual one first; then bf16."""
    tried = (attempt for scales in (True, False) for attempt in underflow_cures(trials, session, scales=scales))
    return first_cure(tried) or Prescription(
        kind="code",
        value=HELP["grad_underflow"],
        status="not_run",
        detail=HELP["grad_underflow"],
        reason="the run does not compute in fp16",
    )


def underflow_cures(trials: Trials, session: Session, *, scales: bool) -> Iterator[Prescription]:
    """Tries what may bring gradients back that fp16 has lost: loss scales, the usual one first, or else bf16.

    Args:
        trials: The trials of the step.
        session: The session.
        scales: Try loss scales; False: bf16.
    """
    if session.precision.compute != "fp16":
        return
    if scales:
        yield from _scalers(trials) if can_unscale(session) else ()
    else:
        yield trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), "train in bf16")


def _candidates(  # noqa: C901 - one row for each cause
    births: Sequence[Birth], cause: Cause, trials: Trials, session: Session
) -> Iterator[Prescription]:
    birth = births[0]
    compute = session.precision.compute
    if cause == "kernel_defect":
        yield from other_kernels(birth, trials, session)
        yield from around(_other_formats(births, trials, session))
        return
    if cause == "bad_data":
        if birth.origin == "op" and birth.where.module and trials.reference() is not None:
            yield from modules_in_fp32(births, trials)  # a cast that fp32 does without
        yield _without_the_batch(birth, trials, session)
        return
    if cause == "optimizer_precision":
        if change.mostly_frozen(session):
            words = change.TRAINED_IN_FP32
            yield trials.attempt("code", words, change.trained_in_fp32, words, stands_in=True)
        if not birth.after_backward:
            yield trials.attempt(
                "optimizer",
                {"eps": EPSILON},
                change.optimizer_argument("eps", EPSILON),
                f"optimizer epsilon {EPSILON:g}",
            )
        yield trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "fp32 weights and optimizer state")
        return
    if cause == "backward_overflow" and compute == "fp16" and not session.events.enabled:
        yield from _scales_by_hand(birth, trials)
    wide_fails = cause == "invalid_op" and trials.reference() is None and trials.unable is None
    if not wide_fails and cause in ("forward_overflow", "backward_overflow", "invalid_op") and birth.where.module:
        yield from modules_in_fp32(births, trials)
    if not wide_fails and compute == "fp16" and cause != "bad_checkpoint":
        yield _in_bf16(trials, session)
    if cause == "invalid_op" and batch_is_at_fault(birth) and trials.reference() is None:
        yield _without_the_batch(birth, trials, session)


def _other_formats(births: Sequence[Birth], trials: Trials, session: Session) -> Iterator[Prescription]:
    """Try formats in which the same arithmetic runs through another kernel."""
    if trials.reference() is None:
        return
    if births[0].where.module:
        yield from modules_in_fp32(births, trials)
    if session.precision.compute == "fp16":
        yield _in_bf16(trials, session)
    yield trials.attempt("dtype", "float32", change.compute_dtype("fp32"), "train in fp32")


def _scales_by_hand(birth: Birth, trials: Trials) -> Iterator[Prescription]:
    """Try lower scales for a step that multiplies its loss itself."""
    trials.reference()
    own = trials.by_hand
    if not (math.isfinite(own) and own >= 2.0):
        return
    first = math.floor(excess_binades(birth) or 0.0) + 1
    for binades in range(first, first + 2 * MOST_SCALES, 2):
        scale = own / 2.0**binades
        if scale < 1.0:
            return
        yield trials.attempt(
            "init_scale", scale, rescaled(2.0**-binades), f"scale the loss by {exact(scale)} in place of {exact(own)}"
        )


def modules_in_fp32(births: Sequence[Birth], trials: Trials) -> Iterator[Prescription]:
    """Try fp32 for the culprit's module, then for the modules of all births, then for the smallest set that cures.

    Args:
        births: The births, the culprit first.
        trials: The trials of their step.
    """
    ran = OwnOps()
    known: dict[frozenset[str], Prescription] = {}

    def attempt(names: Sequence[str], *, watch: OwnOps | None = None) -> Prescription:
        tried = known.get(frozenset(names))
        if tried is None:
            made = change.fp32_modules(names) if watch is None else _watching(change.fp32_modules(names), watch)
            tried = trials.attempt("fp32_modules", list(names), made, f"run {_listed(names)} in fp32")
            known[frozenset(names)] = tried
        return tried

    yield attempt([births[0].where.module], watch=ran)
    if any(not birth.where.module for birth in births):
        return  # one of the births lies outside every module
    if known[frozenset([births[0].where.module])].status == "not_run":
        return
    together = list(dict.fromkeys(birth.where.module for birth in births))
    elements = [*ran.modules, *(name for name in together if name not in ran.modules)]
    found = smallest_set(
        elements, lambda names: attempt(_ordered(elements, names)).verified, given=together, limit=MOST_TRIALS
    )
    if found is None:
        everything = known[frozenset(elements)]
        yield replace(everything, value=[""], detail=f"run all {len(elements)} modules that compute in fp32")
        return
    proof = "none can be left out" if found.minimal else "perhaps not the smallest set"
    cure = attempt(found.elements)
    yield replace(cure, detail=f"{cure.detail} ({proof}: {len(known)} trials among {len(elements)} modules)")


def _watching(made: Change, watch: OwnOps) -> Change:
    @contextmanager
    def both(session: Session) -> Iterator[None]:
        with made(session), watch.attach(session):
            yield

    return both


def _ordered(elements: Sequence[str], names: frozenset[str]) -> list[str]:
    return [name for name in elements if name in names]


def _listed(names: Sequence[str]) -> str:
    shown = [name or "the whole model" for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _in_bf16(trials: Trials, session: Session) -> Prescription:
    scaled = session.events.enabled or session.makes_scalers
    detail = "train in bf16" if session.precision.autocast else "train in bf16: model.to(torch.bfloat16)"
    if scaled or session.precision.autocast:
        detail += ", without a GradScaler"
    return trials.attempt("dtype", "bfloat16", change.compute_dtype("bf16"), detail)


def _without_the_batch(birth: Birth, trials: Trials, session: Session) -> Prescription:
    step = birth.where.step or 0
    batch = step * session.batches_per_step + birth.where.micro_batch
    of = "" if session.batches_per_step == 1 else f" (the replay left out all of step {step})"
    return trials.attempt("skip_batch", batch, change.no_change, f"leave out batch {batch}{of}", from_step=step + 1)
