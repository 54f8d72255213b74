"""Rules on a checkpoint's loss scaler."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ampdoctor.diagnosis.catalogue import SCANNED, not_replayed, rule, scale_text
from ampdoctor.diagnosis.health.loss_rules import CUT, GRADIENTS_VANISHED
from ampdoctor.diagnosis.scan.tensors import FP16_FLUSH_AT, for_each
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, CheckpointSummary, LogTail, ScalerState
from ampdoctor.evidence.location import NonFinite, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds

FRESH_SCALER: Mapping[str, float | int] = MappingProxyType(
    {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
)  # GradScaler's own defaults


def plain(value: float) -> str:
    """Formats a setting."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def starting_scale(what: str, own: float | None) -> str:
    """Formats where a run starts: "the run starts at 65536", or "the run has no scaler"."""
    return f"{what} starts at {scale_text(own)}" if own is not None else f"{what} has no scaler"


each_living = for_each(lambda summary: [scaler for scaler in summary.scalers if not scaler.dead])
"""Of a dead scaler, nothing but that matters."""


def is_static(scaler: ScalerState) -> bool:
    """Returns whether both factors are 1: a fixed scale, which neither grows nor backs off."""
    return scaler.growth_factor == scaler.backoff_factor == 1


def place_of(summary: CheckpointSummary, scaler: ScalerState, nonfinite: NonFinite = "none") -> Where:
    """Returns the address of one of a checkpoint's scalers."""
    return Where(
        phase="checkpoint",
        global_step=summary.global_step,
        op="scaler_state",
        nonfinite=nonfinite,
        tensor=scaler.key,
        file=scaler.file or None,
    )


def fresh_scaler(detail: str = "Resume with a fresh scaler instead of the stored state.") -> Prescription:
    """Returns the change to a GradScaler with its own defaults."""
    return not_replayed("scaler", dict(FRESH_SCALER), detail)


def without_a_scale() -> Prescription:
    """Returns the change for a scale below 1: a fresh scaler would overflow again, as a scale of 1 does."""
    alone = "If you must stay in fp16: a fresh scaler, once what overflows at a scale of 1 is mended."
    detail = (
        "train in bf16, without a GradScaler; if bad batches made the scale fall, leave those out instead "
        "(ampdoctor bisect-nan shows which)"
    )
    return not_replayed("dtype", "bfloat16", detail, (fresh_scaler(alone),))


def scaler_numbers(scaler: ScalerState) -> dict[str, Any]:
    """Returns a scaler's state as JSON values."""
    return {
        "scale": scaler.scale,
        "growth_factor": scaler.growth_factor,
        "backoff_factor": scaler.backoff_factor,
        "growth_interval": scaler.growth_interval,
        "growth_tracker": scaler.growth_tracker,
    }


def shown_scaler(summary: CheckpointSummary, findings: Sequence[Finding]) -> ScalerState | None:
    """Returns the scaler that the report shows: of the worst finding, else that with the smallest scale."""
    of = {(scaler.key, scaler.file or None): scaler for scaler in reversed(summary.scalers)}
    told = (of.get((f.where.tensor or "", f.where.file)) for f in findings if f.where.op == "scaler_state")
    spoken_of = next((scaler for scaler in told if scaler is not None), None)
    return spoken_of or min(summary.scalers, key=lambda s: -math.inf if s.dead else s.scale, default=None)


SCALER_SETTINGS = rule("AMP404", SCANNED)


def wrong_settings(scaler: ScalerState) -> dict[str, str]:
    """Returns a clause on each setting that cannot work, by GradScaler argument (or "growth_tracker")."""
    wrong = {}
    if not 0 < scaler.backoff_factor < 1 and not is_static(scaler):
        wrong["backoff_factor"] = f"backoff_factor {scaler.backoff_factor:g} is not between 0 and 1"
    if not 1 <= scaler.growth_factor < math.inf:
        wrong["growth_factor"] = f"growth_factor {scaler.growth_factor:g} is not a number of at least 1"
    if scaler.growth_interval <= 0:
        wrong["growth_interval"] = f"growth_interval {scaler.growth_interval} never comes round"
    if scaler.scale < 0:
        wrong["init_scale"] = f"scale {scale_text(scaler.scale)} is negative"
    if scaler.growth_tracker < 0:
        wrong["growth_tracker"] = f"the count of clean steps {scaler.growth_tracker} is negative"
    return wrong


@SCALER_SETTINGS.judges(CheckpointSummary)
@each_living
def _scaler_settings(summary: CheckpointSummary, scaler: ScalerState, _: Thresholds) -> Iterator[Finding]:
    wrong = wrong_settings(scaler)
    if wrong:
        own = {**scaler_numbers(scaler), "init_scale": scaler.scale}
        better = {name: fresh if name in wrong else own[name] for name, fresh in FRESH_SCALER.items()}
        arguments = ", ".join(f"{name}={plain(value)}" for name, value in better.items())
        cure = not_replayed("scaler", better, f"GradScaler({arguments})")
        yield SCALER_SETTINGS.finding(
            "warning",
            f"The loss scaler's settings cannot work: {'; '.join(wrong.values())}.",
            where=place_of(summary, scaler),
            evidence={**scaler_numbers(scaler), "wrong": list(wrong.values())},
            prescription=cure if wrong.keys() & better.keys() else None,
        )


DEAD_SCALER = rule("AMP401", SCANNED, ruins_checkpoint=True)


def dead_words(scale: float) -> str:
    """Formats the effect of a dead scale, as the rest of a sentence."""
    if math.isfinite(scale):
        harm = "the next step without an overflow writes Inf or NaN into the weights"
        return f"{scale_text(scale)}, and 1/scale is Inf: {harm}"
    return f"{scale_text(scale)}: every step is skipped for ever"


@DEAD_SCALER.judges(CheckpointSummary)
def _dead_scaler(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    for scaler in summary.scalers:
        if scaler.dead:
            yield DEAD_SCALER.finding(
                "error",
                f"The loss scale is {dead_words(scaler.scale)}.",
                where=place_of(summary, scaler, nonfinite="nan" if math.isnan(scaler.scale) else "inf"),
                cause="bad_checkpoint",
                evidence={**scaler_numbers(scaler), "limit": DEAD_SCALE},
                prescription=fresh_scaler(),
            )


COLLAPSED_SCALER = rule("AMP402", SCANNED, ruins_checkpoint=True)
FALLING = COLLAPSED_SCALER["falls"]

JUST_FALLEN = 10
"""Clean steps since the last change up to which a scale is falling. Where nearly every step overflows, there are fewer
between two back-offs. A scale at rest has any number of clean steps up to the growth interval, and seldom so few."""
_SELDOM = 20  # these steps are at most one in so many of a growth interval
FP16_SPACING = 2.0**-24
"""Distance between neighbours in fp16's subnormal range; rounding errors deviate by this over sqrt(12)."""


def typical_gradient(log: LogTail | None, weights: int) -> float:
    """Returns the average magnitude of a gradient element: the log's median norm, or 1, over `weights` elements."""
    norm = statistics.median(log.norms) if log is not None and log.norms else 1.0
    return norm / math.sqrt(max(weights, 1))


def collapse_severity(scaler: ScalerState, element: float, step: int | None, thresholds: Thresholds) -> Severity:
    """Returns how bad a scale below 1 is after `step` steps: an error if it still falls, or its rounding is harmful."""
    harmful = _error_of(scaler, element) >= thresholds[COLLAPSED_SCALER["relative_error"]]
    return "error" if harmful or _is_falling(scaler, step, thresholds) else "warning"


def _error_of(scaler: ScalerState, element: float) -> float:
    """Returns the relative error with which fp16 rounds an element at the scaler's scale."""
    return min(FP16_SPACING / math.sqrt(12) / (element * scaler.scale), 1.0)


def _weights(summary: CheckpointSummary, scaler: ScalerState) -> int:
    """Returns the number of weight elements, in the scaler's own file if there are any."""
    main = [t for t in summary.tensors if t.role == "weight" and not t.group]
    return sum(t.examined for t in [t for t in main if t.file == scaler.file] or main)


@COLLAPSED_SCALER.judges(CheckpointSummary)
@each_living
def _collapsed_scaler(summary: CheckpointSummary, scaler: ScalerState, thresholds: Thresholds) -> Iterator[Finding]:
    if not scaler.collapsed:
        return
    weights = _weights(summary, scaler)
    element = typical_gradient(summary.log, weights)
    error = _error_of(scaler, element)
    flushed_below = FP16_FLUSH_AT / scaler.scale
    falling = _is_falling(scaler, summary.step_of(scaler.file), thresholds)
    message = (
        f"The loss scale has collapsed to {scale_text(scaler.scale)}: gradients up to {flushed_below:.3g} become zero "
        f"in fp16. One of average size ({element:.2g}) loses {100 * error:.3g} % to rounding; {_growth(scaler)}"
        f"{f'. Gradients overflowed {_ago(scaler)}' if falling else ''}."
    )
    evidence = {
        "flushed_below": flushed_below,
        "typical_gradient": element,
        "relative_error": error,
        "weights": weights,
    }
    yield COLLAPSED_SCALER.finding(
        collapse_severity(scaler, element, summary.step_of(scaler.file), thresholds),
        message,
        where=place_of(summary, scaler),
        cause="scaler_collapse",
        evidence={**scaler_numbers(scaler), **evidence},
        prescription=without_a_scale(),
    )


def _falls_below_one(scaler: ScalerState) -> float:
    if not 0 < scaler.backoff_factor < 1:
        return 0.0
    return math.log(scaler.scale) / math.log(scaler.backoff_factor)


def _is_falling(scaler: ScalerState, step: int | None, thresholds: Thresholds) -> bool:
    """Whether the scale has just fallen: it was not set by the user, nor grew with the last step."""
    interval = scaler.growth_interval
    if _falls_below_one(scaler) < thresholds[FALLING]:
        return False
    if step == 0 or (step is not None and interval > 0 and scaler.growth_tracker == step % interval):
        return False
    return scaler.growth_tracker <= (min(JUST_FALLEN, interval // _SELDOM) if interval > 0 else JUST_FALLEN)


def _ago(scaler: ScalerState) -> str:
    count = max(scaler.growth_tracker, 0)
    return "one step ago" if count == 1 else f"{count} steps ago" if count else "in the last step"


def _growth(scaler: ScalerState) -> str:
    if not 1 < scaler.growth_factor < math.inf or scaler.growth_interval <= 0:
        return "with its settings it never grows back"
    doublings = math.ceil(-math.log(scaler.scale) / math.log(scaler.growth_factor))
    steps = doublings * scaler.growth_interval - scaler.growth_tracker
    return f"it would take {max(steps, 0):,} steps without an overflow to grow back to 1"


SCALE_AT_FLOOR = rule("AMP408", SCANNED)


@SCALE_AT_FLOOR.judges(CheckpointSummary)
@each_living
def _scale_at_floor(summary: CheckpointSummary, scaler: ScalerState, _: Thresholds) -> Iterator[Finding]:
    floor = scaler.min_scale
    if floor is None or not 0 < scaler.scale <= floor or is_static(scaler):
        return
    just = scaler.growth_tracker <= 0
    since = "an overflow has just put it there" if just else f"{scaler.growth_tracker:,} steps went well since"
    message = (
        f"The loss scale {scale_text(scaler.scale)} is at its minimum, {scale_text(floor)}: {since}. "
        "After the next overflow it cannot fall."
    )
    yield SCALE_AT_FLOOR.finding(
        "warning" if just else "note",
        message,
        where=place_of(summary, scaler),
        evidence={**scaler_numbers(scaler), "min_scale": floor},
    )


FROZEN_SCALER = rule("AMP403", SCANNED)


@FROZEN_SCALER.judges(CheckpointSummary)
@each_living
def _frozen_scaler(summary: CheckpointSummary, scaler: ScalerState, _: Thresholds) -> Iterator[Finding]:
    if 0 < scaler.growth_interval <= scaler.growth_tracker:
        yield FROZEN_SCALER.finding(
            "warning",
            f"The loss scale cannot grow before the next overflow. It grows after exactly {scaler.growth_interval:,} "
            f"clean steps, and the count is {scaler.growth_tracker:,} already.",
            where=place_of(summary, scaler),
            evidence=scaler_numbers(scaler),
        )


MISSING_SCALER = rule("AMP410", SCANNED)

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})  # state that is zero where no gradient ever arrived


@MISSING_SCALER.judges(CheckpointSummary)
def _missing_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group and len(t.shape) >= 2 and t.examined]
    moments = [t for t in summary.tensors if t.role == "moment" and t.entry in FIRST_MOMENTS and len(t.shape) >= 2]
    if not weights or not moments or any(t.dtype != "float16" for t in weights):
        return
    if summary.scalers or (summary.log is not None and summary.log.scale is not None):
        return
    halves = all(t.dtype == "float16" for t in moments)
    zeros = statistics.median(t.zeros / max(t.counted, 1) for t in moments)
    flushed = halves and zeros >= thresholds[MISSING_SCALER["zeros"]]
    why = (
        "The moments are in fp16 too, so no GradScaler scaled the gradients: it refuses fp16 weights."
        if halves
        else "Its scaler's state was not saved, or its scale is fixed."
    )
    message = f"The weights are in fp16, and the checkpoint holds no loss scaler. {why}"
    if flushed:
        message += f" In half of the matrices at least {100 * zeros:.3g} % of the first moments are exactly zero."
    yield MISSING_SCALER.finding(
        "warning" if flushed else "note",
        message,
        where=Where(
            phase="checkpoint", global_step=summary.global_step, op="scaler_state", file=weights[0].file or None
        ),
        cause="grad_underflow" if flushed else None,
        evidence={"weights": len(weights), "moments_dtype": moments[0].dtype, "zero_first_moments": zeros},
    )


# -- AMP702: gradients that are zero at the end of the log, explained by the checkpoint beside it --
#
# Of the causes only a loss scale so small, or missing, that all of them flush in fp16 leaves traces in a checkpoint.


def explained_zeros(finding: Finding, summary: CheckpointSummary, thresholds: Thresholds) -> Finding:
    """Returns the log's finding with the cause that the checkpoint shows; a note stays as it is."""
    if finding.severity == "note":
        return finding
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    elements = sum(t.examined for t in weights)
    log = summary.log or LogTail()
    typical = statistics.median(log.norms) / math.sqrt(elements) if log.norms and elements else None
    numbers: dict[str, float | None] = {"typical_gradient_before": typical}
    scale = summary.scalers[0].scale if summary.scalers else log.scale
    bound = FP16_FLUSH_AT if scale is None else FP16_FLUSH_AT / scale if scale > 0 else math.inf
    flushing = typical is None or bound >= typical / thresholds[GRADIENTS_VANISHED["reach"]]
    flush = f"gradients up to {bound:.2g} become zero"
    beside = _beside(typical)
    matrices = [t for t in weights if len(t.shape) >= 2 and t.examined]
    cause: str | None = None
    cure: Prescription | None = None
    if scale is not None:
        numbers |= {"scale": scale, "flushed_below": bound}
        if scale < 1 and flushing:
            cause, cure = "scaler_collapse", without_a_scale()
            why = f"the loss scale has collapsed to {scale_text(scale)}, where {flush} in fp16{beside}"
        elif flushing and typical is not None:
            cause, cure = "grad_underflow", _larger(typical)
            why = f"at the loss scale {scale_text(scale)} {flush} in fp16{beside}"
        else:
            why = f"the loss scale {scale_text(scale)} does not explain it; {CUT}"
    elif matrices and flushing and all(t.dtype == "float16" for t in matrices):
        numbers |= {"scale": None, "flushed_below": bound}
        detail = "Keep the weights in fp32, train under fp16 autocast, and scale the loss with a GradScaler."
        cause, cure = "grad_underflow", fresh_scaler(detail)
        why = f"weights are in fp16 and there is no loss scaler, so {flush}{beside}"
    else:
        why = f"the checkpoint holds no loss scaler, and fp16 autocast without one leaves no trace; {CUT}"
    return replace(
        finding,
        severity="error" if cause else finding.severity,
        message=f"{finding.message.partition(': ')[0]}: {why}.",
        cause=cause,
        evidence={**finding.evidence, **numbers},
        prescription=cure,
    )


def _beside(typical: float | None) -> str:
    return f", beside {typical:.2g} for one of average size before" if typical is not None else ""


def _larger(typical: float) -> Prescription:
    """Returns a scale at which a typical gradient is 2^10 times the flush threshold."""
    scale = 2.0 ** math.ceil(math.log2(2**10 * FP16_FLUSH_AT / typical))
    return not_replayed("init_scale", scale, f"Start the scaler at {scale_text(scale)}, or train in bf16.")
