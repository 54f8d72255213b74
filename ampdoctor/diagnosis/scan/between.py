"""Rules on two checkpoints of one run, and on a series of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.diagnosis.catalogue import SCANNED, figure, rule, scale_text, short
from ampdoctor.diagnosis.scan.tensors import FP16_MAX, MAX_LISTED, also_of, percent, where_of
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, Largest, TensorChange, Trend
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Thresholds


def weights_of(change: CheckpointChange) -> list[TensorChange]:
    """Returns the weights that have an element."""
    return [t for t in change.tensors if t.role == "weight" and t.elements]


def row_of(tensor: TensorChange) -> dict[str, Any]:
    """Returns a tensor's change as JSON values."""
    row: dict[str, Any] = {
        "tensor": tensor.address,
        "dtype": tensor.dtype,
        "unchanged": tensor.unchanged / tensor.elements,
        "relative_change": tensor.relative_change,
    }
    if tensor.reach is not None:
        row |= {
            "update_rms": tensor.reach.rms,
            "lands": tensor.reach.changed_by_one,
            "adds_up": tensor.reach.changed_by_many,
        }
    return row


def elements_of(tensors: Sequence[TensorChange]) -> int:
    """Returns the elements of all tensors together."""
    return sum(t.elements for t in tensors)


# -- extrapolation: when a figure that grows by a constant factor reaches a limit --


STEADY = 0.75
"""Least ratio of the later to the earlier rate of log2. Growth by a constant factor has a ratio of 1. Growth as any
power of the step has at most log2(3/2) / log2(2) = 0.585 over equal times from its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrend:
    """The trend of a figure."""

    rate: float  # log2 per step
    meets: float  # step at which it meets the limit at that rate
    since: int  # first step
    until: int  # last step seen

    @property
    def soon(self) -> bool:
        """Whether it meets the limit within as many steps as were seen."""
        return self.meets - self.until <= self.until - self.since


def course(points: Sequence[tuple[int, float]], limit: float) -> LinearTrend | None:
    """Extrapolates a steady growth of (step, positive value), ascending, to a limit; None if it slows or is there."""
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return None
    rising = points[-1][1] >= points[0][1]
    sign = 1.0 if rising else -1.0
    line = [(step, sign * math.log2(value)) for step, value in points]
    left = sign * math.log2(limit) - line[-1][1]
    earlier, later = _halves(line)
    if left <= 0 or earlier <= 0 or later < STEADY * earlier:
        return None
    rate = min(_slope(line), later)
    if rate <= 0:
        return None
    return LinearTrend(rate=sign * rate, meets=line[-1][0] + left / rate, since=line[0][0], until=line[-1][0])


def _halves(line: Sequence[tuple[int, float]]) -> tuple[float, float]:
    (start, first), (end, last) = line[0], line[-1]
    middle = (start + end) / 2
    at = last
    for (left, low), (right, high) in itertools.pairwise(line):
        if left <= middle <= right and right > left:
            at = low + (high - low) * (middle - left) / (right - left)
            break
    return (at - first) / (middle - start), (last - at) / (end - middle)


def _slope(line: Sequence[tuple[int, float]]) -> float:
    steps = [float(step) for step, _ in line]
    mean, level = sum(steps) / len(line), sum(value for _, value in line) / len(line)
    spread = sum((step - mean) ** 2 for step in steps)
    return sum((step - mean) * (value - level) for step, (_, value) in zip(steps, line, strict=True)) / spread


STAGNANT_WEIGHTS = rule("AMP712", SCANNED)
STILL = STAGNANT_WEIGHTS["stalled"]


def stagnates(tensor: TensorChange, thresholds: Thresholds) -> bool:
    """Returns whether a weight's updates are lost to rounding in its 16-bit format."""
    reach, still = tensor.reach, thresholds[STILL]
    return (
        tensor.pure_half
        and reach is not None
        and tensor.unchanged >= still * tensor.elements
        and reach.changed_by_many >= thresholds[STAGNANT_WEIGHTS["would_move"]]
        and reach.changed_by_one <= (1 - still) * reach.changed_by_many
    )


@STAGNANT_WEIGHTS.judges(CheckpointChange)
def _stagnant_weights(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    if not change.steps or change.steps < 0:
        return
    trained = [t for t in weights_of(change) if t.pure_half and t.moments]
    still = [t for t in trained if stagnates(t, thresholds)]
    if not still:
        return
    share = elements_of(still) / elements_of(trained)
    matrices = [t for t in still if len(t.shape) >= 2]
    severity: Severity = (
        "error" if share >= thresholds[STAGNANT_WEIGHTS["most"]] and matrices else "warning" if matrices else "note"
    )
    worst = max(matrices or still, key=lambda t: (t.elements, t.address))
    reach, fmt = worst.reach, short(worst.dtype)
    assert reach is not None  # noqa: S101 - stagnates() holds
    message = (
        f"{len(still)} of {len(trained)} trained {fmt} weights stand still: "
        f"{percent(worst.unchanged / worst.elements)} of {worst.address} did not change in {change.steps:,} steps. "
        f"For {percent(1 - reach.changed_by_one)} of the values an update of {reach.rms:.2g} is too small to reach the "
        f"next {fmt} number."
    )
    evidence = {
        "steps": change.steps,
        "share_of_trained_elements": share,
        "learning_rate": reach.learning_rate,
        "tensors": len(still),
        "listed": [row_of(t) for t in sorted(still, key=lambda t: -t.elements)[:MAX_LISTED]],
    }
    yield STAGNANT_WEIGHTS.finding(
        severity,
        message,
        where=where_of(worst, change.new_step),
        also=also_of(worst, still),
        cause="optimizer_precision",
        evidence=evidence,
    )


UNMOVED_WEIGHTS = rule("AMP713", SCANNED)


@UNMOVED_WEIGHTS.judges(CheckpointChange)
def _unmoved_weights(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    weights = weights_of(change)
    if not weights or not change.steps or change.steps < 0:
        return
    same = [t for t in weights if t.unchanged == t.elements and not t.nonfinite]
    least = thresholds[UNMOVED_WEIGHTS["would_move"]]
    idle = [t for t in same if t.moments and t.reach is not None and t.reach.changed_by_one >= least]
    if idle:
        worst = max(idle, key=lambda t: (t.elements, t.address))
        message = (
            f"{len(idle)} of {len(weights)} weights did not change in {change.steps:,} steps, {worst.address} first. "
            "The optimizer holds moments for them: one update would change "
            f"{percent(worst.reach.changed_by_one if worst.reach else 0)} of its values."
        )
    elif len(same) == len(weights) and not any(stagnates(t, thresholds) for t in same):
        worst = max(same, key=lambda t: (t.elements, t.address))
        message = f"No weight changed between step {change.old_step} and step {change.new_step}."
    else:
        return
    evidence = {"steps": change.steps, "tensors": len(idle or same), "listed": [row_of(t) for t in idle[:MAX_LISTED]]}
    yield UNMOVED_WEIGHTS.finding(
        "warning" if idle else "note",
        message,
        where=where_of(worst, change.new_step),
        also=also_of(worst, idle or same),
        evidence=evidence,
    )


CHANGED_STRUCTURE = rule("AMP714", SCANNED)


@CHANGED_STRUCTURE.judges(CheckpointChange)
def _changed_structure(change: CheckpointChange, _: Thresholds) -> Iterator[Finding]:
    retyped = {t.address: (t.old_dtype, t.dtype) for t in change.tensors if t.dtype != t.old_dtype and _named(t)}
    parts = [
        (("is", "are"), "gone", change.vanished),
        (("is", "are"), "new", change.appeared),
        (("has", "have"), "another shape", tuple(change.reshaped)),
        (("has", "have"), "another dtype", tuple(retyped)),
    ]
    said = [
        f"{len(names)} {verbs[len(names) > 1]} {what} ({names[0]}{' first' if len(names) > 1 else ''})"
        for verbs, what, names in parts
        if names
    ]
    if not said:
        return
    first, *others = (name for _, _, names in parts for name in names)
    yield CHANGED_STRUCTURE.finding(
        "note",
        f"Of the weights and buffers, {'; '.join(said)}, compared with {change.old}.",
        where=Where(phase="checkpoint", global_step=change.new_step, tensor=first),
        also=tuple(Where(phase="checkpoint", tensor=name) for name in others),
        evidence={
            "vanished": change.vanished[:MAX_LISTED],
            "appeared": change.appeared[:MAX_LISTED],
            "reshaped": {name: list(map(list, shapes)) for name, shapes in list(change.reshaped.items())[:MAX_LISTED]},
            "retyped": dict(list(retyped.items())[:MAX_LISTED]),
        },
    )


def _named(tensor: TensorChange) -> bool:
    return tensor.role in {"weight", "buffer", "ema"}


GROWING_RANGE = rule("AMP710", SCANNED)
BEYOND_START = GROWING_RANGE["start"]

LEAST_POINTS = 3  # fewer checkpoints do not show whether a growth slows down


def _growing_finding(rows: Sequence[tuple[str, Largest, float, LinearTrend]], step: int | None, unit: str) -> Finding:
    """Makes the finding for rows of address, latest magnitude, magnitude at the beginning and trend, at least one."""
    address, largest, before, heading = min(rows, key=lambda row: (row[3].meets, row[0]))
    severity: Severity = "warning" if any(now.cast_by_autocast for _, now, _, _ in rows) else "note"
    others = f" {len(rows) - 1} more tensors do so later." if len(rows) > 1 else ""
    message = (
        f"The largest value of {address} has grown from {figure(before)} at {unit} {heading.since:,} to "
        f"{figure(largest.amax)} at {unit} {heading.until:,}. At this rate it reaches fp16's largest, 65,504, at about "
        f"{unit} {math.ceil(heading.meets):,}.{others}"
    )
    evidence: dict[str, Any] = {
        "amax": largest.amax,
        "limit": FP16_MAX,
        "meets_at": heading.meets,
        "log2_per_1000": 1000 * heading.rate,
        "tensors": len(rows),
        "listed": [
            {"tensor": name, "amax": now.amax, "amax_before": then, "meets_at": seen.meets}
            for name, now, then, seen in sorted(rows, key=lambda row: (row[3].meets, row[0]))[:MAX_LISTED]
        ],
    }
    return GROWING_RANGE.finding(
        severity,
        message,
        where=replace(_place(address, largest), global_step=step),
        also=tuple(_place(name, now) for name, now, _, _ in rows if name != address),
        evidence=evidence,
    )


def _place(address: str, largest: Largest) -> Where:
    return Where(
        phase="checkpoint", module=largest.module, op=f"state:{largest.entry}", tensor=address, file=largest.file
    )


@GROWING_RANGE.judges(Trend)
def _growing_over_time(trend: Trend, thresholds: Thresholds) -> Iterator[Finding]:
    points = trend.dated
    if not points:
        return
    rows = []
    for address, now in points[-1].largest.items():
        amaxes = [(p.step or 0, p.largest[address].amax) for p in points if address in p.largest]
        seen = _since_start(amaxes, thresholds[BEYOND_START])
        heading = course(seen, FP16_MAX) if len(seen) >= LEAST_POINTS and seen[-1][1] > seen[0][1] else None
        if heading is not None and heading.soon:
            rows.append((address, now, seen[0][1], heading))
    if rows:
        yield _growing_finding(rows, points[-1].step, trend.unit)


def _since_start(seen: Sequence[tuple[int, float]], start: float) -> list[tuple[int, float]]:
    """Returns the latest points of a tensor that has left its initialisation, one per step."""
    kept: list[tuple[int, float]] = []
    for step, amax in reversed(seen):
        if amax < start:
            break
        if not kept or kept[-1][0] != step:
            kept.append((step, amax))
    return kept[::-1]


@GROWING_RANGE.judges(CheckpointChange)
def _growing_between(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    steps = change.steps
    if change.old_step is None or change.new_step is None or not steps or steps < 0:
        return
    rows = []
    for t, before, now in grown_beyond_start(change, thresholds):
        heading = course([(change.old_step, before), (change.new_step, now)], FP16_MAX)
        if heading is not None and heading.soon:
            cast = cast_by_autocast(t.role, t.shape, t.dtype)
            largest = Largest(amax=now, cast_by_autocast=cast, module=t.module, entry=t.entry, file=t.file)
            rows.append((t.address, largest, before, heading))
    if rows:
        yield _growing_finding(rows, change.new_step, "step")


def grown_beyond_start(change: CheckpointChange, thresholds: Thresholds) -> Iterator[tuple[TensorChange, float, float]]:
    """Yields tensors beyond any initialisation that still grew, with their largest magnitudes before and now."""
    start = thresholds[BEYOND_START]
    for t in change.tensors:
        if t.role not in {"weight", "buffer", "ema"} or t.amax is None or t.old_amax is None:
            continue
        if t.old_amax >= start and math.log2(t.amax) > math.log2(t.old_amax):  # by more than its rounding
            yield t, t.old_amax, t.amax


def cast_by_autocast(role: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Returns whether fp16 autocast would cast a tensor, or it is stored in fp16: beyond its range it is then Inf."""
    return dtype == "float16" or (role == "weight" and len(shape) >= 2 and dtype in {"float32", "float64"})


FALLING_LOSS_SCALE = rule("AMP711", SCANNED)


@FALLING_LOSS_SCALE.judges(Trend)
def _falling_loss_scale(trend: Trend, thresholds: Thresholds) -> Iterator[Finding]:
    points, unit = trend.dated, trend.unit
    scales = {p.step or 0: p.scale for p in points if p.scale is not None and 0 < p.scale < math.inf}
    seen = list(scales.items())
    top = max((scale for _, scale in seen), default=0.0)
    start = max((at for at, (_, scale) in enumerate(seen) if scale == top), default=0)
    seen = seen[start:]
    if len(seen) < LEAST_POINTS or math.log2(top) - math.log2(seen[-1][1]) < thresholds[FALLING_LOSS_SCALE["fall"]]:
        return
    heading = course(seen, 1.0)
    if heading is None or not heading.soon:
        return
    message = (
        f"The loss scale has fallen from {scale_text(top)} at {unit} {heading.since:,} to {scale_text(seen[-1][1])} at "
        f"{unit} {heading.until:,}. At this rate it is below 1 at about {unit} {math.ceil(heading.meets):,}."
    )
    yield FALLING_LOSS_SCALE.finding(
        "warning",
        message,
        where=Where(phase="checkpoint", global_step=heading.until, op="scaler_state"),
        evidence={
            "scales": [{"step": step, "scale": scale} for step, scale in seen],
            "meets_at": heading.meets,
            "log2_per_1000": 1000 * heading.rate,
        },
    )
