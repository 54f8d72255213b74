"""Rules on a checkpoint's optimizers: settings, second moments, step counters, epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampdoctor.diagnosis.catalogue import SCANNED, not_replayed, rule, short
from ampdoctor.diagnosis.scan.tensors import FP16_FLUSH_AT, MAX_LISTED, for_each, where_of
from ampdoctor.evidence.checkpoint_stats import (
    CheckpointSummary,
    OptimizerGroup,
    OptimizerSummary,
    TensorSummary,
    ZeroSecondMoment,
)
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds

DIVIDING_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "sum"})
"""Moments whose root divides the update: of Adam, RMSprop and Adadelta, Adagrad."""


each_optimizer = for_each(lambda summary: summary.optimizers)


OPTIMIZER_SETTINGS = rule("AMP505", SCANNED)


@OPTIMIZER_SETTINGS.judges(CheckpointSummary)
@each_optimizer
def _optimizer_settings(summary: CheckpointSummary, optimizer: OptimizerSummary, _: Thresholds) -> Iterator[Finding]:
    ruinous = [clause for group in optimizer.groups for clause in _ruinous(group)]
    odd = [clause for group in optimizer.groups for clause in _odd(group)]
    zeros = [t for t in summary.tensors if t.role == "moment" and t.entry in DIVIDING_MOMENTS and t.zeros]
    if zeros and any(group.epsilon == 0 for group in optimizer.groups):
        ruinous.append(f"eps is 0 and the second moment of {zeros[0].name} has zeros, so its update is 0 / 0")
    graded: tuple[tuple[Severity, list[str]], ...] = (("error", ruinous), ("warning", odd))
    for severity, wrong in graded:
        clauses = list(dict.fromkeys(wrong))
        if clauses:
            yield OPTIMIZER_SETTINGS.finding(
                severity,
                f"The optimizer's settings cannot be right: {'; '.join(clauses)}.",
                where=Where(phase="optimizer", global_step=summary.global_step, op="optimizer_state:param_groups"),
                cause="bad_checkpoint" if severity == "error" else None,
                evidence={"optimizer": optimizer.path, "wrong": clauses},
            )


def _ruinous(group: OptimizerGroup) -> list[str]:
    """Returns settings that make the next step write NaN or Inf into the weights."""
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value}" for name, value in named if value is not None and not math.isfinite(value)]
    clauses += [f"a beta is {beta:g}" for beta in group.betas if not beta < 1]
    return clauses


def _odd(group: OptimizerGroup) -> list[str]:
    named = (("lr", group.learning_rate), ("eps", group.epsilon), ("weight_decay", group.weight_decay))
    clauses = [f"{name} is {value:g}, below 0" for name, value in named if value is not None and -math.inf < value < 0]
    clauses += [f"a beta is {beta:g}, below 0" for beta in group.betas if beta < 0]
    return clauses


SECOND_MOMENT_FLUSHED = rule("AMP502", SCANNED)

_SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126}
"""Smallest normal number of the formats in which only a conversion loses an ordinary square."""


def explained(betas: Sequence[float], smallest: float) -> float | None:
    """Returns the largest first moment, beside a second moment of zero, that rounding in its own format explains.

    Adam's first moment m and second moment v are weighted sums over the same gradients. By Cauchy and Schwarz
    |m| <= c sqrt(v) with c^2 = (1 - b1)^2 / ((1 - b2)(1 - b1^2 / b2)), where b1^2 < b2: 7.3 for (0.9, 0.999). A v that
    was rounded to zero in every step has lost at most `smallest` (the smallest number of its format) a step, which adds
    up to smallest / (1 - b2).

    The bound is in units of gradients; None where the second moment forgets faster, so that there is none.
    """
    if len(betas) != 2:
        return None
    first, second = betas
    if not (0 <= first < 1 and 0 < second < 1 and first * first < second):
        return None
    return (1 - first) / (1 - second) * math.sqrt(smallest / (1 - first * first / second))


@SECOND_MOMENT_FLUSHED.judges(CheckpointSummary)
@each_optimizer
def _flushed(summary: CheckpointSummary, optimizer: OptimizerSummary, thresholds: Thresholds) -> Iterator[Finding]:
    epsilons = [group.epsilon for group in optimizer.groups if group.epsilon is not None]
    maxima = any(t.role == "moment" and t.entry == "max_exp_avg_sq" for t in summary.tensors)
    if not epsilons or maxima or not math.isfinite(max(epsilons)) or max(epsilons) < 0:
        return
    epsilon = max(epsilons)
    harmful = thresholds[SECOND_MOMENT_FLUSHED["update"]] * epsilon
    sick = [m for m in optimizer.starved if m.largest > harmful and not _by_itself(m, optimizer)]
    if not sick:
        return
    first, worst = sick[0], max(sick, key=lambda moment: moment.largest)
    starved, examined = sum(m.starved for m in sick), sum(m.examined for m in optimizer.starved)
    size = f"up to {worst.largest / epsilon:.2g}" if epsilon else "infinitely many"
    wide = first.dtype in _SMALLEST
    lost = f" {short(first.dtype)} does not lose squares of that size: they were in fp16 once." if wide else ""
    among = f", in {len(sick)} tensors, {first.name} first" if len(sick) > 1 else ""
    message = (
        f"{starved:,} of {examined:,} second moments in {short(worst.dtype)} are zero where the first is not{among}. "
        f"{worst.name} has {worst.largest:.2g} over eps {epsilon:g} there, an update of {size} learning rates.{lost}"
    )
    evidence = {
        "epsilon": epsilon,
        "largest_first_moment": worst.largest,
        "starved": starved,
        "examined": examined,
        "tensors": len(sick),
        "listed": [
            {"tensor": m.name, "starved": m.starved, "of": m.examined, "largest": m.largest} for m in sick[:MAX_LISTED]
        ],
    }
    yield SECOND_MOMENT_FLUSHED.finding(
        "error" if starved >= thresholds[SECOND_MOMENT_FLUSHED["starved"]] * examined else "warning",
        message,
        where=Where(
            phase="optimizer",
            global_step=summary.global_step,
            module=first.module,
            op=f"optimizer_state:{first.entry}",
            tensor=_place(first).tensor,
            file=first.file or None,
        ),
        also=tuple(map(_place, sick[1:])),
        cause="bad_checkpoint" if wide else "optimizer_precision",
        evidence=evidence,
        prescription=not_replayed(
            "optimizer",
            {"reset_state": [moment.name for moment in sick[:MAX_LISTED]]},
            "Drop the optimizer state of these parameters, and keep second moments in fp32 or bf16.",
        ),
    )


def _by_itself(moment: ZeroSecondMoment, optimizer: OptimizerSummary) -> bool:
    """Returns whether the format itself loses such squares, as narrow ones do, or both moments are not kept."""
    smallest = _SMALLEST.get(moment.dtype)
    if smallest is None:
        return False
    bounds = [explained(group.betas, smallest) for group in optimizer.groups]
    return not bounds or any(bound is None or moment.largest <= bound for bound in bounds)


def _place(tensor: TensorSummary | ZeroSecondMoment) -> Where:
    return replace(where_of(tensor), phase="optimizer")


STEP_COUNTERS = rule("AMP504", SCANNED)

STEP_LIMITS = {"bfloat16": 256.0, "float16": 2048.0}
"""Whole number to which 1 can no longer be added: 2 ** significant bits."""


def length_at(count: float, betas: Sequence[float]) -> float:
    """Returns the length of Adam's updates where the counter is stuck, over the correct one; 1.0 if it is not Adam."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or count <= 0:
        return 1.0
    first, second = (1.0 if beta == 0 else -math.expm1(count * math.log(beta)) for beta in betas)  # 1 - beta^count
    return math.sqrt(second) / first if first else math.inf  # no valid count: freed memory


def severity_of_standing(length: float, dtype: str, thresholds: Thresholds) -> Severity:
    """Returns how bad a stuck counter is, from `length_at` and the counter's format (without "torch.")."""
    off = abs(length - 1)
    if off >= thresholds[STEP_COUNTERS["update"]]:
        return "error"
    return "warning" if off > 1 / STEP_LIMITS[dtype] else "note"  # below that, the format itself rounds as much


def _counted(dtype: str) -> str:
    return f"Steps are counted in {short(dtype)}, which cannot add 1 to {STEP_LIMITS[dtype]:,g}"


def standing_words(dtype: str, count: float, length: float) -> str:
    """Formats the effect of a stuck counter."""
    return (
        f"{_counted(dtype)}: the count stands still at {count:,g}, and Adam's bias correction with it. "
        f"Updates stay {length:.3g} times as long as they should be."
    )


@STEP_COUNTERS.judges(CheckpointSummary)
@each_optimizer
def _in_half(summary: CheckpointSummary, optimizer: OptimizerSummary, thresholds: Thresholds) -> Iterator[Finding]:
    if not optimizer.steps:
        return
    last = optimizer.steps[-1][0]
    for dtype in optimizer.step_dtypes:
        limit = STEP_LIMITS.get(dtype)
        if limit is None:
            continue
        stored = [t for t in summary.tensors if t.entry == "step" and t.dtype == dtype]
        counters = [counter for counter in stored if _is_of(counter, optimizer, summary)]
        lengths = [1.0 if group.fused else length_at(last, group.betas) for group in optimizer.groups]
        length = max(lengths, key=lambda one: abs(one - 1), default=1.0)
        severity: Severity = "note"
        ends = "will stop there" if last < limit else "goes on where torch loads it, as fp32 for a fused optimizer"
        message = f"{_counted(dtype)}: the count is {last:,g} and {ends}."
        if last >= limit and not all(group.fused for group in optimizer.groups):
            severity, message = severity_of_standing(length, dtype, thresholds), standing_words(dtype, last, length)
        places = [_place(counter) for counter in counters] or [Where(phase="optimizer", op="optimizer_state:step")]
        yield STEP_COUNTERS.finding(
            severity,
            message,
            where=replace(places[0], global_step=summary.global_step),
            also=tuple(places[1:]),
            cause="bad_checkpoint" if severity == "error" else None,
            evidence={
                "optimizer": optimizer.path,
                "dtype": dtype,
                "step": last,
                "limit": limit,
                "update_length": length,
                "counters": len(counters),
            },
        )


def _is_of(counter: TensorSummary, optimizer: OptimizerSummary, summary: CheckpointSummary) -> bool:
    own = {counter.group, f"{counter.file}:{counter.group}"}
    return counter.role == "other" and (len(summary.optimizers) == 1 or optimizer.path in own)


EPSILON_LOST = rule("AMP503", SCANNED)


@EPSILON_LOST.judges(CheckpointSummary)
@each_optimizer
def _epsilon_lost(summary: CheckpointSummary, optimizer: OptimizerSummary, _: Thresholds) -> Iterator[Finding]:
    lost = [g for g in optimizer.groups if g.epsilon is not None and 0 <= g.epsilon <= FP16_FLUSH_AT and not g.fused]
    squares = [t for t in summary.tensors if t.role == "moment" and t.entry in DIVIDING_MOMENTS]
    weights = [t for t in summary.tensors if t.role == "weight" and not t.group]
    halves = [all(t.dtype == "float16" for t in tensors) for tensors in (squares, weights) if tensors]
    if not lost or len(halves) < 2 or not all(halves):
        return
    message = (
        f"eps {lost[0].epsilon:g} is zero in fp16, the dtype of the weights and second moments. "
        "Where a gradient's square is zero too, the update is 0 / 0 or infinite."
    )
    yield EPSILON_LOST.finding(
        "warning",
        message,
        where=Where(phase="optimizer", global_step=summary.global_step, op="optimizer_state:param_groups"),
        evidence={"optimizer": optimizer.path, "epsilon": lost[0].epsilon},
    )
