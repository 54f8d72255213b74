"""Rules on the end of a training log: losses and gradient norms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ampdoctor.diagnosis.catalogue import NOT_REPLAYED, SCANNED, rule
from ampdoctor.diagnosis.health.loss_rules import gradient_jump
from ampdoctor.diagnosis.health.rolling import LENGTH, falls_over
from ampdoctor.diagnosis.health.step_state import StepState
from ampdoctor.diagnosis.scan.scaler import LOGGED_NORMS, fresh_scaler, scale_text, without_a_scale
from ampdoctor.diagnosis.scan.tensors import FP16_FLUSH_AT, is_training_loss
from ampdoctor.evidence.checkpoint_stats import RUN_LOG, CheckpointSummary, LogEntry
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.log_records import StepLine
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds

Series = list[tuple[LogEntry, float]]
MOMENTUM_STEPS = 50  # steps in which momentum alone may lower the loss: 0.9^50 is 0.5 %


def series(summary: CheckpointSummary, of: Callable[[LogEntry], float | None]) -> Series:
    """Returns the entries that have a value, with it, by step."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    return [(entry, value) for entry in entries if (value := of(entry)) is not None]


def trailing_entries(entries: Sequence[LogEntry], test: Callable[[LogEntry], bool]) -> list[LogEntry]:
    """Returns the entries at the end that all pass the test."""
    found: list[LogEntry] = []
    for entry in reversed(entries):
        if not test(entry):
            break
        found.append(entry)
    return found[::-1]


def loss_fell(entries: Iterable[LogEntry]) -> bool:
    """Returns whether the loss falls far beyond its noise: training works, whatever the norms are."""
    losses = [e.loss for e in sorted(entries, key=lambda e: e.step) if e.loss is not None]
    return falls_over(losses)


LOSS_NOT_FINITE = rule("AMP701", SCANNED, ruins_checkpoint=True)


def _is_lost(entry: LogEntry) -> bool:
    """Whether a loss is not finite, or 0.0, which the Trainer writes in place of a NaN."""
    if entry.loss is None:
        return False
    hidden = entry.loss == 0 and entry.grad_norm is not None and not math.isfinite(entry.grad_norm)
    return hidden or not math.isfinite(entry.loss)


@LOSS_NOT_FINITE.judges(CheckpointSummary)
def _stored_losses(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    """Judges a training loss that was saved under another name than a log's."""
    for lost in filter(is_training_loss, summary.lost):
        value, many = f"{lost.last:g}", f"the last of {lost.count} losses in " if lost.count > 1 else "the loss "
        yield LOSS_NOT_FINITE.finding(
            "error",
            f"{many[0].upper()}{many[1:]}{lost.name} is {value}.",
            where=Where(
                phase="loss",
                global_step=summary.global_step,
                op="number",
                nonfinite="inf" if math.isinf(lost.last) else "nan",
                tensor=lost.name,
                file=lost.file or None,
            ),
            evidence={"entries": lost.count, "lost": lost.nans + lost.infs},
        )


@LOSS_NOT_FINITE.judges(CheckpointSummary)
def loss_not_finite(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    """Judges a loss that is not finite; an error where it stays so up to the log's end."""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss)]
    lost = [entry for entry in entries if _is_lost(entry)]
    if not lost:
        return
    trailing = trailing_entries(entries, _is_lost)
    first = (trailing or lost)[0]
    fine = [entry for entry in entries if entry.step < first.step and not _is_lost(entry)]
    evidence = {
        "first_step": first.step,
        "entries": len(entries),
        "lost": len(lost),
        "lost_at_the_end": len(trailing),
        "last_finite_step": fine[-1].step if fine else None,
        "last_finite_loss": fine[-1].loss if fine else None,
    }
    said = (
        f"{first.loss:g}" if first.loss != 0 else f"0 beside a gradient norm of {first.grad_norm}, a NaN in disguise,"
    )
    alive = bool(summary.scalers) and not any(s.dead for s in summary.scalers)
    if not trailing:
        ahead = next(entry.step for entry in entries if entry.step > lost[-1].step)
        message = f"The loss was {said} at step {first.step} and is finite again from step {ahead} on."
        severity: Severity = "note"
    elif len(trailing) == 1 and fine and alive:
        message = f"The loss is {said} at the log's last step, {first.step}; the scaler skips such a step."
        severity = "warning"
    else:
        message = f"The loss is {said} from step {first.step} to the log's end{_before(fine)}."
        severity = "error"
    yield LOSS_NOT_FINITE.finding(
        severity,
        message,
        where=Where(
            phase="loss",
            global_step=first.step,
            nonfinite="inf" if first.loss is not None and math.isinf(first.loss) else "nan",
        ),
        evidence=evidence,
    )


def _before(fine: Sequence[LogEntry]) -> str:
    return f", after {fine[-1].loss:.4g} at step {fine[-1].step}" if fine else ""


GRADIENTS_NOT_FINITE = rule("AMP703", SCANNED, ruins_checkpoint=True)
LEAST_UNFINITE = GRADIENTS_NOT_FINITE["entries"]
HOPELESS_STEPS = GRADIENTS_NOT_FINITE["hopeless"]
SETTLING_STEPS = GRADIENTS_NOT_FINITE["settling"]


@GRADIENTS_NOT_FINITE.judges(CheckpointSummary)
def _gradients_not_finite(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    if any(lost.severity == "error" for lost in loss_not_finite(summary, thresholds)):  # the gradients add nothing
        return
    entries = [entry for entry, _ in series(summary, lambda e: e.grad_norm)]
    trailing = trailing_entries(entries, lambda e: e.grad_norm is not None and not math.isfinite(e.grad_norm))
    if len(trailing) < thresholds[LEAST_UNFINITE]:
        return
    first, last = trailing[0], trailing[-1]
    steps = last.step - first.step + 1
    dead = any(scaler.dead for scaler in summary.scalers)
    if len(trailing) == len(entries) and steps <= thresholds[SETTLING_STEPS] and not dead:
        return
    measured = any(e.grad_norm is not None and not math.isnan(e.grad_norm) for e in entries)
    learns = loss_fell(e for e in summary.log if e.step >= first.step + (MOMENTUM_STEPS if measured else 0))
    if learns and len(trailing) == len(entries):
        return
    severity: Severity = "error" if steps >= thresholds[HOPELESS_STEPS] else "warning"
    said = "no loss scale that was tried in that time worked"
    if learns:
        severity, said = "note", "the loss falls all the same, so the norm is not what the optimizer saw"
    elif not measured and not dead:
        severity, said = "note", "it may never have been measured"
    yield GRADIENTS_NOT_FINITE.finding(
        severity,
        f"The gradient norm is {first.grad_norm} from step {first.step} to the log's end, in {len(trailing)} entries "
        f"over {steps} steps: {said}.",
        where=Where(
            phase="backward",
            global_step=first.step,
            nonfinite="nan" if first.grad_norm is not None and math.isnan(first.grad_norm) else "inf",
        ),
        evidence={"first_step": first.step, "last_step": last.step, "entries": len(trailing), "steps": steps},
    )


# AMP702
#
# Three causes make every gradient zero while the loss is not: a loss scale so small, or missing, that all of them flush
# in fp16; a graph that is cut; and an output that no longer depends on the weights. Only the first leaves traces in a
# checkpoint: the scale itself, or fp16 weights without one.


GRADIENTS_VANISHED = rule("AMP702", (*SCANNED, "health"))
LEAST_ZEROS = GRADIENTS_VANISHED["entries"]
WITHIN_REACH = GRADIENTS_VANISHED["reach"]

TELLING_DECAY = 50  # steps of decay from which the moments prove missing gradients
_CUT = "a graph that was cut (detach, no_grad, frozen weights) and an output that is constant look alike"


@dataclass(frozen=True, slots=True)
class _Why:
    words: str
    cause: str | None
    prescription: Prescription | None
    evidence: dict[str, float | int | None]


@GRADIENTS_VANISHED.judges(CheckpointSummary)
def gradients_vanished(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Makes one finding where the log's gradient norms are zero up to its end."""
    entries = [e for e in sorted(summary.log, key=lambda entry: entry.step) if e.grad_norm is not None]
    trailing = _trailing(entries)
    zeros = [entry for entry in trailing if entry.grad_norm == 0]
    if len(zeros) < thresholds[LEAST_ZEROS] or 2 * len(zeros) <= len(trailing):
        return
    first, last = zeros[0], zeros[-1]
    losses = [e.loss for e in trailing if e.loss is not None and math.isfinite(e.loss)]
    finished = bool(losses) and not any(losses)
    earlier = [e.grad_norm for e in entries if e.step < first.step and e.grad_norm and math.isfinite(e.grad_norm)]
    learns = loss_fell(e for e in summary.log if e.step >= first.step + (MOMENTUM_STEPS if earlier else 0))
    if learns and not earlier:  # a norm that never had another value was not measured, or rounded away
        return
    why = _why(summary, earlier[-LOGGED_NORMS:], first, thresholds[WITHIN_REACH])
    coarse = all(round(norm, 4) == norm for norm in earlier)
    severity: Severity = "warning"
    if finished:
        severity, loss = "note", " and so is the loss"
    elif learns:
        severity, loss = "note", " though the loss still falls" + (f", {_between(losses)}" if losses else "")
        why = _Why("norms are rounded away, or not measured", None, None, why.evidence)
    else:
        if why.cause or (losses and not coarse):
            severity = "error"
        elif not losses and not earlier:
            severity = "note"
        loss = f" while the loss stays {_between(losses)}" if losses else ""
    before = f", {earlier[-1]:.3g} before" if earlier else ""
    message = (
        f"The gradient norm is exactly 0 from step {first.step} to {last.step}{before}{loss}"
        f"{'.' if finished else f': {why.words}.'}"
    )
    evidence = {
        "first_step": first.step,
        "last_step": last.step,
        "entries": len(zeros),
        "norm_before": earlier[-1] if earlier else None,
        "loss_lowest": min(losses, default=None),
        "loss_highest": max(losses, default=None),
        **why.evidence,
    }
    yield GRADIENTS_VANISHED.finding(
        severity,
        message,
        where=Where(phase="backward", global_step=first.step),
        cause=None if finished else why.cause,
        evidence=evidence,
        prescription=None if finished else why.prescription,
    )


def _trailing(entries: Sequence[LogEntry]) -> list[LogEntry]:
    found: list[LogEntry] = []
    for entry in reversed(entries):
        if entry.grad_norm is None or 0 < abs(entry.grad_norm) < math.inf:
            break
        found.append(entry)
    return found[::-1]


def _between(losses: Sequence[float]) -> str:
    low, high = min(losses), max(losses)
    return f"at {low:.4g}" if low == high else f"between {low:.4g} and {high:.4g}"


def _why(summary: CheckpointSummary, norms: Sequence[float], first: LogEntry, reach: float) -> _Why:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    elements = sum(t.examined for t in weights)
    typical = statistics.median(norms) / math.sqrt(elements) if norms and elements else None
    logged = [e.scale for e in summary.log if e.scale is not None and e.step >= first.step]
    scales = [s.scale for s in summary.scalers] or logged[-1:]
    evidence: dict[str, float | int | None] = {"typical_gradient_before": typical, **_starving(summary)}
    tail = _moments(evidence)
    if scales:
        scale = scales[0]
        bound = FP16_FLUSH_AT / scale if scale > 0 else math.inf
        evidence |= {"scale": scale, "flushed_below": bound}
        flushing = typical is None or bound >= typical / reach
        flush = f"gradients up to {bound:.2g} become zero in fp16{_beside(typical)}{tail}"
        if scale < 1 and flushing:
            words = f"the loss scale has collapsed to {scale_text(scale)}, where {flush}"
            return _Why(words, "scaler_collapse", without_a_scale(), evidence)
        if flushing and typical is not None:
            words = f"at the loss scale {scale_text(scale)} {flush}"
            return _Why(words, "grad_underflow", _larger(typical), evidence)
        return _Why(f"the loss scale {scale_text(scale)} does not explain it; {_CUT}{tail}", None, None, evidence)
    matrices = [t for t in weights if len(t.shape) >= 2 and t.examined]
    reached = typical is None or typical / reach <= FP16_FLUSH_AT
    if matrices and reached and all(t.dtype == "float16" for t in matrices):
        evidence |= {"scale": None, "flushed_below": FP16_FLUSH_AT}
        words = (
            f"weights are in fp16 and there is no loss scaler, so gradients up to {FP16_FLUSH_AT:.2g} become zero"
            f"{_beside(typical)}{tail}"
        )
        detail = "Keep the weights in fp32, train under fp16 autocast, and scale the loss with a GradScaler."
        return _Why(words, "grad_underflow", fresh_scaler(detail), evidence)
    return _Why(
        "nothing in the log says why; " + _CUT
        if summary.format == RUN_LOG
        else f"the checkpoint holds no loss scaler, and fp16 autocast without one leaves no trace; {_CUT}{tail}",
        None,
        None,
        evidence,
    )


def _beside(typical: float | None) -> str:
    return f", beside {typical:.2g} for one of average size before" if typical is not None else ""


def _larger(typical: float) -> Prescription:
    """Returns a scale at which a typical gradient is 2^10 times the flush threshold."""
    scale = 2.0 ** math.ceil(math.log2(2**10 * FP16_FLUSH_AT / typical))
    return Prescription(
        kind="init_scale",
        value=scale,
        status="not_run",
        reason=NOT_REPLAYED,
        detail=f"Start the scaler at {scale_text(scale)}, or train in bf16.",
    )


def _starving(summary: CheckpointSummary) -> dict[str, float | int | None]:
    """Returns the largest first moment, and how many steps without a gradient the moments show.

    Without a gradient m falls by beta1 a step and the root of v by the root of beta2, so their ratio falls by beta1 /
    sqrt(beta2). While gradients arrive, the largest of each are within a factor of ten of one another, which is 20
    steps with Adam's defaults.
    """
    firsts = [t for t in summary.tensors if t.role == "moment" and t.entry == "exp_avg" and not t.nonfinite]
    seconds = {(t.file, t.group, t.name): t for t in summary.tensors if t.role == "moment" and t.entry == "exp_avg_sq"}
    if not firsts:
        return {}
    largest = max((t.amax or 0.0 for t in firsts), default=0.0)
    betas = [g.betas for o in summary.optimizers for g in o.groups if len(g.betas) >= 2]
    pairs = [(t.amax, seconds[key].amax) for t in firsts if (key := (t.file, t.group, t.name)) in seconds]
    ratios = [math.sqrt(v) / m for m, v in pairs if m and v]
    found: dict[str, float | int | None] = {"largest_first_moment": largest}
    if betas and ratios and 0 < betas[0][0] < math.sqrt(betas[0][1]) < 1:
        rate = math.log(math.sqrt(betas[0][1]) / betas[0][0])
        found["steps_without_gradient"] = max(math.floor(math.log(min(ratios)) / rate), 0)
    return found


def _moments(evidence: dict[str, float | int | None]) -> str:
    largest, steps = evidence.get("largest_first_moment"), evidence.get("steps_without_gradient")
    if largest == 0:
        return "; every first moment in the optimizer is zero as well"
    if isinstance(steps, int) and steps >= TELLING_DECAY:
        return f"; the optimizer's moments have decayed for about {steps} steps"
    return ""


LOSS_CONSTANT = rule("AMP705", (*SCANNED, "health"))
CONSTANT_ENTRIES = LOSS_CONSTANT["entries"]
LEAST_LOSS = LOSS_CONSTANT["loss"]


@LOSS_CONSTANT.judges(CheckpointSummary)
def loss_constant(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges a loss that is constant to the last digit, up to the log's end."""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss)]
    if not entries:
        return
    last = entries[-1]
    value = last.loss
    if value is None or not thresholds[LEAST_LOSS] <= abs(value) < math.inf:
        return
    same = trailing_entries(entries, lambda e: e.loss == value)
    resting = all(e.learning_rate == 0 for e in same) or all(e.grad_norm == 0 for e in same)
    if len(same) < thresholds[CONSTANT_ENTRIES] or resting:
        return
    rounded = all(e.loss is not None and round(e.loss, 4) == e.loss for e in entries)
    message = (
        f"The loss is exactly {value:.17g} in the last {len(same)} entries, from step {same[0].step} on: the weights "
        "do not move, or the output does not depend on the input."
    )
    yield LOSS_CONSTANT.finding(
        "note" if rounded else "warning",
        message,
        where=Where(phase="loss", global_step=same[0].step),
        evidence={"loss": value, "first_step": same[0].step, "entries": len(same), "rounded": rounded},
    )


# AMP704: as severe as in `health` for the same step (AMP720).


SPIKE = rule("AMP704", SCANNED)
SPIKE_FACTOR = SPIKE["factor"]
SPIKE_DEVIATIONS = SPIKE["deviations"]
RETURNED = SPIKE["returned"]

WINDOW = 50  # entries before one that define what is usual (AMP704)
LEAST_WINDOW = 20
_PAST = 4 * LENGTH
"""Entries before the first spike that define what was usual: a window, and the steps in which it settles."""
LEAST_DEVIATION = 0.05  # least standard deviation of a logarithm: a log of constant norms has none (AMP704)


@SPIKE.judges(CheckpointSummary)
def _spike(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    losses = [(entry, value) for entry, value in series(summary, lambda e: e.loss) if 0 < value < math.inf]
    norms = [(entry, value) for entry, value in series(summary, lambda e: e.grad_norm) if 0 < value < math.inf]
    found = [
        (what, *spike)
        for what, values in (("loss", losses), ("gradient norm", norms))
        for spike in _outliers(values, thresholds)
    ]
    if not found:
        return
    what, entry, value, usual = max(found, key=lambda spike: spike[2] / spike[3])
    first = min(found, key=lambda spike: spike[1].step)[1].step
    before = [v for e, v in losses if e.step < first][-WINDOW:]
    after = [v for e, v in losses if e.step > first]
    lasting = (
        len(after) >= 5
        and len(before) >= 5
        and statistics.median(after[-5:]) > thresholds[RETURNED] * statistics.median(before)
    )
    evidence = {
        "step": entry.step,
        "value": value,
        "usual": usual,
        "spikes": [{"step": e.step, "what": w, "value": v, "usual": u} for w, e, v, u in found[:20]],
        "loss_before": statistics.median(before) if before else None,
        "loss_at_the_end": statistics.median(after[-5:]) if after else None,
    }
    message = (
        f"The {what} of step {entry.step} is {value:.3g}, {value / usual:.3g} times what was usual before it"
        f"{', and the loss has not come back since' if lasting else ''}; {len(found)} such "
        f"{'entry' if len(found) == 1 else 'entries'} in the log."
    )
    yield SPIKE.finding(
        "warning" if lasting or _jumps(summary, [spike[1].step for spike in found], thresholds) else "note",
        message,
        where=Where(phase="loss" if what == "loss" else "backward", global_step=entry.step),
        evidence=evidence,
    )


def _jumps(summary: CheckpointSummary, steps: Sequence[int], thresholds: Thresholds) -> bool:
    """Whether one of these steps exceeds all that was usual, so that `health` warns of it (AMP720)."""
    entries = [entry for entry, _ in series(summary, lambda e: e.loss if e.grad_norm is None else e.grad_norm)]
    first = next((at for at, entry in enumerate(entries) if entry.step >= min(steps)), 0)
    moment, spikes = StepState(), frozenset(steps)
    for entry in entries[max(0, first - _PAST) :]:
        if entry.step > max(spikes):
            break
        rate = () if entry.learning_rate is None else (entry.learning_rate,)
        line = StepLine(
            step=entry.step,
            loss=entry.loss,
            gradient_norm=entry.grad_norm,
            loss_scale=entry.scale,
            learning_rates=rate,
        )
        moment.hear(line)
        if entry.step in spikes and gradient_jump(moment, thresholds):
            return True
    return False


def _outliers(values: Series, thresholds: Thresholds) -> Iterator[tuple[LogEntry, float, float]]:
    """Yields (entry, value, median before it) of every value far above the entries before it."""
    for index in range(LEAST_WINDOW, len(values)):
        entry, value = values[index]
        before = [math.log(v) for _, v in values[max(0, index - WINDOW) : index]]
        middle = statistics.median(before)
        deviation = max(1.4826 * statistics.median(abs(v - middle) for v in before), LEAST_DEVIATION)
        above = math.log(value) - middle
        if above > max(math.log(thresholds[SPIKE_FACTOR]), thresholds[SPIKE_DEVIATIONS] * deviation):
            yield entry, value, math.exp(middle)


# -- the end of a log without a checkpoint, for `health` and `scan` --


_RULES = ((gradients_vanished, "gradient"), (loss_constant, "optimizer"))
"""Rules that `health` lacks, and what moved first."""


def at_the_end(entries: Sequence[LogEntry], thresholds: Thresholds) -> tuple[Finding, ...]:
    """Returns the findings on the last entries of a log: gradients that are zero, a loss that is constant."""
    summary = CheckpointSummary(format=RUN_LOG, tensors=(), log=tuple(entries))
    return tuple(
        replace(
            finding,
            where=replace(finding.where, step=finding.where.global_step, global_step=None),
            evidence={"first": first, **finding.evidence},
        )
        for find, first in _RULES
        for finding in find(summary, thresholds)
    )
