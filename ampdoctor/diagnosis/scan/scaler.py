"""Rules on a checkpoint's loss scaler, and the history of its scale in the log."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from ampdoctor.diagnosis.catalogue import NOT_REPLAYED, SCANNED, Finder, rule
from ampdoctor.diagnosis.scan.tensors import FP16_FLUSH_AT, FP16_MAX
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE, CheckpointSummary, LogEntry, ScalerState
from ampdoctor.evidence.location import NonFinite, Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.thresholds import Thresholds

FRESH_SCALER: Mapping[str, float | int] = MappingProxyType(
    {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
)  # GradScaler's own defaults
LOGGED_NORMS = 10  # latest gradient norms of the log whose median represents the run's


def scale_text(scale: float) -> str:
    """Formats a loss scale: "65536", "2^-18", "0.3"."""
    if scale > 0 and math.isfinite(scale) and math.frexp(scale)[0] == 0.5 and not 1 <= scale <= 2**24:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:.10g}"


def plain(value: float) -> str:
    """Formats a setting."""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def starting_scale(what: str, own: float | None) -> str:
    """Formats where a run starts: "the run starts at 65536", or "the run has no scaler"."""
    return f"{what} starts at {scale_text(own)}" if own is not None else f"{what} has no scaler"


Judged: TypeAlias = Callable[[CheckpointSummary, ScalerState, Thresholds], Iterator[Finding]]


def each_living(find: Judged) -> Finder[CheckpointSummary]:
    """Returns a rule for all scalers that are not dead: of a dead one, nothing else matters."""

    @functools.wraps(find)
    def judged(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
        for scaler in summary.scalers:
            if not scaler.dead:
                yield from find(summary, scaler, thresholds)

    return judged


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
    return Prescription(kind="scaler", value=dict(FRESH_SCALER), status="not_run", reason=NOT_REPLAYED, detail=detail)


def without_a_scale() -> Prescription:
    """Returns the change for a scale below 1: a fresh scaler would overflow again, as a scale of 1 does.

    A file does not show whether values overflow or batches were bad, which no format cures.
    """
    alone = "If you must stay in fp16: a fresh scaler, once what overflows at a scale of 1 is mended."
    return Prescription(
        kind="dtype",
        value="bfloat16",
        status="not_run",
        reason=NOT_REPLAYED,
        detail="train in bf16, without a GradScaler; if bad batches made the scale fall, leave those out instead "
        "(ampdoctor bisect-nan shows which)",
        alternatives=(fresh_scaler(alone),),
    )


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
    """Returns the scaler that the report shows: a GAN's checkpoint has two.

    It is the scaler of the worst finding (they are sorted), else the scaler with the smallest scale.
    """
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
        yield SCALER_SETTINGS.finding(
            "warning",
            f"The loss scaler's settings cannot work: {'; '.join(wrong.values())}.",
            where=place_of(summary, scaler),
            evidence={**scaler_numbers(scaler), "wrong": list(wrong.values())},
            prescription=_with(better) if wrong.keys() & better.keys() else None,
        )


def _with(better: Mapping[str, float]) -> Prescription:
    arguments = ", ".join(f"{name}={plain(value)}" for name, value in better.items())
    return Prescription(
        kind="scaler", value=better, status="not_run", reason=NOT_REPLAYED, detail=f"GradScaler({arguments})"
    )


DEAD_SCALER = rule("AMP401", SCANNED, ruins_checkpoint=True)


def dead_words(scale: float) -> str:
    """Formats the effect of a dead scale, as the rest of a sentence."""
    if math.isfinite(scale):
        return (
            f"{scale_text(scale)}, so 1/scale is infinite: the next step without an overflow writes Inf or NaN into "
            "the weights"
        )
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
COLLAPSED_ERROR = COLLAPSED_SCALER["relative_error"]
FALLING = COLLAPSED_SCALER["falls"]

JUST_FALLEN = 10
"""Clean steps since the last change up to which a scale is falling. Where nearly every step overflows, there are fewer
between two back-offs. A scale at rest has any number of clean steps up to the growth interval, and seldom so few."""
_SELDOM = 20  # these steps are at most one in so many of a growth interval
FP16_SPACING = 2.0**-24
"""Distance between neighbours in fp16's subnormal range; the rounding error has a standard deviation of this over
sqrt(12)."""


def typical_gradient(log: Iterable[LogEntry], weights: int) -> float:
    """Returns the average magnitude of a gradient element: the norm spread evenly over `weights` elements.

    The norm is the median of the log's last `LOGGED_NORMS` finite positive ones, else 1, where most runs clip.
    """
    norms = [e.grad_norm for e in log if e.grad_norm is not None and 0 < e.grad_norm < math.inf]
    norm = statistics.median(norms[-LOGGED_NORMS:]) if norms else 1.0
    return norm / math.sqrt(max(weights, 1))


def collapse_severity(scaler: ScalerState, element: float, step: int | None, thresholds: Thresholds) -> Severity:
    """Returns how bad a scale below 1 is: an error if it still falls, or if such a loss has harmed trainings.

    `element` is from `typical_gradient`; `step` is the number of steps that the training has made, if it is known.
    """
    harmful = _error_of(scaler, element) >= thresholds[COLLAPSED_ERROR]
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
    falling = _is_falling(scaler, summary.global_step, thresholds)
    message = (
        f"The loss scale has collapsed to {scale_text(scaler.scale)}: gradients up to {flushed_below:.3g} become zero "
        f"in fp16, and one of average size ({element:.2g}) loses {100 * error:.3g} % to rounding; {_growth(scaler)}"
        f"{f', and gradients overflowed {_ago(scaler)}' if falling else ''}."
    )
    evidence = {
        "flushed_below": flushed_below,
        "typical_gradient": element,
        "relative_error": error,
        "weights": weights,
    }
    yield COLLAPSED_SCALER.finding(
        collapse_severity(scaler, element, summary.global_step, thresholds),
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
    return f"it would take {max(steps, 0)} steps without an overflow to grow back to 1"


SCALE_AT_FLOOR = rule("AMP408", SCANNED)


@SCALE_AT_FLOOR.judges(CheckpointSummary)
@each_living
def _scale_at_floor(summary: CheckpointSummary, scaler: ScalerState, _: Thresholds) -> Iterator[Finding]:
    floor = scaler.min_scale
    if floor is None or not 0 < scaler.scale <= floor or is_static(scaler):
        return
    just = scaler.growth_tracker <= 0
    message = (
        f"The loss scale {scale_text(scaler.scale)} is at its floor of {scale_text(floor)}"
        f"{', where an overflow has just put it' if just else f'; {scaler.growth_tracker} steps went well since'}: "
        "at the next one it cannot give way."
    )
    yield SCALE_AT_FLOOR.finding(
        "warning" if just else "note",
        message,
        where=place_of(summary, scaler),
        evidence={**scaler_numbers(scaler), "min_scale": floor},
    )


SCALE_WITHOUT_BOUND = rule("AMP409", SCANNED)
HIGHEST_SETTLED = SCALE_WITHOUT_BOUND["scale"]


@SCALE_WITHOUT_BOUND.judges(CheckpointSummary)
@each_living
def _scale_without_bound(summary: CheckpointSummary, scaler: ScalerState, thresholds: Thresholds) -> Iterator[Finding]:
    if scaler.scale < thresholds[HIGHEST_SETTLED] or is_static(scaler):
        return
    largest = FP16_MAX / scaler.scale
    message = (
        f"The loss scale is {scale_text(scaler.scale)} and no step overflows: either every gradient in fp16 is "
        f"below {largest:.2g}, or none is computed in fp16, and the scaler has nothing to do."
    )
    yield SCALE_WITHOUT_BOUND.finding(
        "note",
        message,
        where=place_of(summary, scaler),
        evidence={**scaler_numbers(scaler), "largest_gradient": largest},
    )


# -- the history of a loss scale in a training log --


LEAST_SETTLING = 100
"""Steps without a backoff that end a first descent (hysteresis and noise cause shorter rests in it), and the least
steps that it may take, whatever the growth interval."""
SLOW_REST = 10
"""Clean steps after which a backoff is a slow one. Far above a fitting scale, nearly every step backs off."""
SLOW_BACKOFFS = 8
"""Slow backoffs that no first descent has.

Gradients whose largest values have a power-law tail of index a overflow 2^a times as seldom at half the scale: from one
step in 10 to one in a growth interval of N are log2(N / 10) / a halvings, 7.6 with the default N at a = 1, where norms
cease to have a mean. Measured in 300 simulated descents each, hysteresis 1 or 2: at most 3 with norms that scatter by
0.7 powers of two (log-normal), 7 by 2.5.
"""
DEFAULT_INTERVAL = 2000  # GradScaler's growth interval
History = list[tuple[LogEntry, float]]


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """A loss scale's history in a log.

    `scaler` is the checkpoint's first, else inferred from the log. `starts` are the pieces of the history, each with a
    first scale of its own. `settled` is the part of each piece after its first descent; [] while that lasts.
    """

    scaler: ScalerState | None
    starts: list[History]
    settled: list[History]


def scale_history(summary: CheckpointSummary) -> ScaleHistory:
    """Reads the scale's history from a checkpoint's log."""
    entries = sorted(summary.log, key=lambda entry: entry.step)
    history = [(e, e.scale) for e in entries if e.scale is not None and 0 < e.scale < math.inf]
    scaler = summary.scalers[0] if summary.scalers else _inferred(history)
    starts = _starts_of(history, scaler)
    return ScaleHistory(scaler, starts, [_settled_part(one, scaler) for one in starts])


def _inferred(history: History) -> ScalerState | None:
    """Infers a scaler's interval from the log: no growth comes sooner after the change before it.

    None without a growth after another change. Where entries are missing, it is the shortest possible time.
    """
    interval, changed = math.inf, None
    for (before, scale), (entry, after) in itertools.pairwise(history):
        if changed is not None and scale < after <= 2 * scale:
            interval = min(interval, before.step - changed + 1)
        if after != scale:
            changed = entry.step
    if math.isinf(interval):
        return None
    return ScalerState(scale=history[-1][1], growth_interval=max(int(interval), 1))


def _starts_of(history: History, scaler: ScalerState | None) -> list[History]:
    """Splits the history at jumps up that growths cannot explain: another scaler starts there."""
    starts: list[History] = [history[:1]] if history else []
    growth = math.log2(scaler.growth_factor) if scaler is not None and scaler.growth_factor > 1 else 1.0
    for (before, scale), (entry, after) in itertools.pairwise(history):
        growths = 1 + (max(entry.step - before.step - 1, 0) // interval_of(scaler))
        if math.log2(after) - math.log2(scale) > growth * growths * (1 + 1e-6):
            starts.append([])
        starts[-1].append((entry, after))
    return starts


def _settled_part(start: History, scaler: ScalerState | None) -> History:
    """Returns the part of a piece after its first descent; [] while it lasts.

    The descent ends with a growth, a long rest, or when there was time for a growth. A fall with clean stretches
    between many of its backoffs is not a first descent: all counts from the first of them. Where entries are missing,
    only those between which the scale stays are known to be clean, and a drop between two counts as one backoff.
    """
    until = start[0][0].step + max(interval_of(scaler), LEAST_SETTLING)
    resting = 0
    slow: list[int] = []
    settled: int | None = None
    for index in range(1, len(start)):
        old, (entry, new) = start[index - 1][1], start[index]
        if new > old or entry.step >= until:
            settled = index - 1
        elif new < old:
            if start[index - 1][0].step - start[resting][0].step >= SLOW_REST:
                slow.append(resting)
            resting = index
        elif entry.step - start[resting][0].step >= LEAST_SETTLING:
            settled = resting
        if settled is not None:
            break
    if len(slow) >= SLOW_BACKOFFS:
        return start[slow[0] :]
    return [] if settled is None else start[settled:]


def interval_of(scaler: ScalerState | None) -> int:
    """Returns the clean steps after which it grows; torch's default if unknown."""
    return scaler.growth_interval if scaler is not None and scaler.growth_interval > 0 else DEFAULT_INTERVAL


# AMP403: by its own counter or by the log.


FROZEN_SCALER = rule("AMP403", SCANNED)
FROZEN_INTERVALS = FROZEN_SCALER["intervals"]

HIGHEST_CAP = 2.0**24  # Apex's largest scale: a scale there or above may be capped


@FROZEN_SCALER.judges(CheckpointSummary)
@each_living
def _frozen_scaler(summary: CheckpointSummary, scaler: ScalerState, _: Thresholds) -> Iterator[Finding]:
    if 0 < scaler.growth_interval <= scaler.growth_tracker:
        yield FROZEN_SCALER.finding(
            "warning",
            f"The loss scale cannot grow: {scaler.growth_tracker} clean steps are counted and it grows when exactly "
            f"{scaler.growth_interval} are, so not before the next overflow.",
            where=place_of(summary, scaler),
            evidence=scaler_numbers(scaler),
        )


@FROZEN_SCALER.judges(CheckpointSummary)
def standing_scale(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    """Judges a scale that used to grow and stays constant without an overflow.

    Only where every step is logged: between two entries a healthy scale may grow and fall back. A stored scaler's own
    counter shows it already.
    """
    history = scale_history(summary)
    if summary.scalers or history.scaler is None or not history.starts:
        return
    start, interval = history.starts[-1], history.scaler.growth_interval
    scale, last = start[-1][1], start[-1][0].step
    rest = 1
    while rest < len(start) and start[-rest - 1][1] == scale and start[-rest - 1][0].step == last - rest:
        rest += 1
    first = start[-rest][0].step
    norms = [e.grad_norm for e in summary.log if e.grad_norm is not None and first <= e.step <= last]
    if (
        last - first < thresholds[FROZEN_INTERVALS] * interval
        or scale >= HIGHEST_CAP
        or not all(map(math.isfinite, norms))
    ):
        return
    yield FROZEN_SCALER.finding(
        "note",
        f"The loss scale has stayed at {scale_text(scale)} from step {first} to {last} without an overflow; before, it "
        f"grew after {interval} steps.",
        where=Where(phase="scaler", global_step=first, op="scaler_state"),
        evidence={"scale": scale, "first_step": first, "last_step": last, "growth_interval": interval},
    )


MISSING_SCALER = rule("AMP410", SCANNED)
MOSTLY_FLUSHED = MISSING_SCALER["zeros"]

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer"})  # state that is zero where no gradient ever arrived


@MISSING_SCALER.judges(CheckpointSummary)
def _missing_scaler(summary: CheckpointSummary, thresholds: Thresholds) -> Iterator[Finding]:
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group and len(t.shape) >= 2 and t.examined]
    moments = [t for t in summary.tensors if t.role == "moment" and t.entry in FIRST_MOMENTS and len(t.shape) >= 2]
    if not weights or not moments or any(t.dtype != "float16" for t in weights):
        return
    if summary.scalers or any(entry.scale is not None for entry in summary.log):
        return
    halves = all(t.dtype == "float16" for t in moments)
    zeros = statistics.median(t.zeros / max(t.counted, 1) for t in moments)
    flushed = halves and zeros >= thresholds[MOSTLY_FLUSHED]
    where = (
        "its moments too, so its gradients were not scaled by a GradScaler, which refuses fp16 weights"
        if halves
        else "the state of their scaler was not saved, or their scale is fixed"
    )
    message = f"An fp16 model's training state is without a loss scaler: weights are in fp16, and {where}."
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
