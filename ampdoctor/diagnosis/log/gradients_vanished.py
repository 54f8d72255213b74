"""AMP702: gradients that read zero from some step on, when, and what the checkpoint says of why.

Three things make every gradient zero while the loss is not: a loss scale so small, or missing, that all of them flush
in fp16; a graph that is cut; and an output that no longer depends on the weights. Only the first leaves traces in a
checkpoint: the scale itself, or fp16 weights without one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampdoctor.diagnosis.catalogue.checkpoint_finding import NOT_REPLAYED, checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.log.log_series import MOMENTUM_STEPS, loss_fell
from ampdoctor.diagnosis.scaler.scaler_finding import LOGGED_NORMS, fresh_scaler, scale_text, without_a_scale
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_FLUSH_AT
from ampdoctor.evidence.checkpoint_stats import RUN_LOG, CheckpointSummary, LogEntry
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

LEAST_ZEROS = Threshold(
    code="AMP702",
    name="entries",
    default=3,
    unit="entries",
    lowest=1,
    highest=1_000_000,
    why="Entries of a gradient norm of exactly 0 at the log's end: one or two may be a batch without a loss.",
)
WITHIN_REACH = Threshold(
    code="AMP702",
    name="reach",
    default=16.0,
    unit="factor",
    lowest=1.0,
    highest=1e6,
    why="A flush threshold within this factor below the typical gradient explains zeros: the elements of a gradient "
    "are spread over more than that.",
)
RULE = register(
    "AMP702",
    "gradients-vanished",
    "The logged gradient norm is exactly zero up to the end",
    worst="error",
    commands=(*SCANNED, "health"),
    thresholds=(LEAST_ZEROS, WITHIN_REACH),
)

TELLING_DECAY = 50
"""Steps of decay from which the moments say that no gradient arrived."""
_CUT = "a graph that was cut (detach, no_grad, frozen weights) and an output that is constant look alike"


@dataclass(frozen=True, slots=True)
class _Why:
    words: str
    cause: str | None
    prescription: Prescription | None
    evidence: dict[str, float | int | None]


@RULE.judges(CheckpointSummary)
def gradients_vanished(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """One finding where the log's gradient norms are zero up to its end."""
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
    if learns and not earlier:  # a norm that never was anything else was not measured, or rounded away
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
    yield checkpoint_finding(
        summary,
        RULE,
        severity,
        message,
        evidence=evidence,
        phase="backward",
        global_step=first.step,
        cause=None if finished else why.cause,
        prescription=None if finished else why.prescription,
    )


def _trailing(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """The entries at the end whose norm is 0 or not finite."""
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
    """A scale at which a typical gradient lies 10 binades above the flush threshold."""
    scale = 2.0 ** math.ceil(math.log2(2**10 * FP16_FLUSH_AT / typical))
    return Prescription(
        kind="init_scale",
        value=scale,
        status="not_run",
        reason=NOT_REPLAYED,
        detail=f"Start the scaler at {scale_text(scale)}, or train in bf16.",
    )


def _starving(summary: CheckpointSummary) -> dict[str, float | int | None]:
    """The largest first moment, and how many steps without a gradient it and the second moment tell of.

    Without a gradient m falls by beta1 a step and the root of v by the root of beta2, so their ratio falls by
    beta1 / sqrt(beta2). While gradients arrive the largest of each are within a factor of ten of one another, which is
    20 steps with Adam's defaults.
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
