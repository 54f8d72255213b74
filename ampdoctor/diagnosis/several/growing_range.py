"""AMP710: a weight or buffer grows towards fp16's limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.several.growth import Course, course
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX, MAX_LISTED
from ampdoctor.evidence.checkpoint_stats import CheckpointChange, Largest, TensorChange, Trend
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Severity
from ampdoctor.evidence.thresholds import Threshold, Thresholds

BEYOND_START = Threshold(
    code="AMP710",
    name="start",
    default=8.0,
    unit="magnitude",
    lowest=0.0,
    highest=65504.0,
    why="Magnitude above which a growth counts: no initialisation reaches it (the largest of 10^9 normal numbers is "
    "6.1), so that what grows there no longer grows out of its start.",
)
RULE = register(
    "AMP710",
    "growing-range",
    "A weight or buffer grows towards fp16's limit",
    worst="warning",
    commands=SCANNED,
    thresholds=(BEYOND_START,),
)

LEAST_POINTS = 3
"""Checkpoints that it takes to see whether a growth slows down."""


def _growing_finding(rows: Sequence[tuple[str, Largest, float, Course]], step: int | None, unit: str) -> Finding:
    """The finding for tensors that grow towards fp16's limit.

    Args:
        rows: Address, latest magnitude, the magnitude at the course's beginning, and the course; at least one.
        step: Step of the latest checkpoint.
        unit: What steps count.
    """
    address, largest, before, heading = min(rows, key=lambda row: (row[3].meets, row[0]))
    severity: Severity = "warning" if any(now.cast_by_autocast for _, now, _, _ in rows) else "note"
    others = f" {len(rows) - 1} more tensors do so later." if len(rows) > 1 else ""
    message = (
        f"The largest magnitude of {address} has grown from {before:.4g} at {unit} {heading.since} to "
        f"{largest.amax:.4g} at {unit} {heading.until}; at this rate it meets fp16's 65504 at about {unit} "
        f"{math.ceil(heading.meets)}.{others}"
    )
    evidence: dict[str, Any] = {
        "amax": largest.amax,
        "limit": FP16_MAX,
        "meets_at": heading.meets,
        "binades_per_1000": 1000 * heading.rate,
        "tensors": len(rows),
        "listed": [
            {"tensor": name, "amax": now.amax, "amax_before": then, "meets_at": seen.meets}
            for name, now, then, seen in sorted(rows, key=lambda row: (row[3].meets, row[0]))[:MAX_LISTED]
        ],
    }
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity=severity,
        message=message,
        where=Where(
            phase="checkpoint",
            global_step=step,
            module=largest.module,
            op=f"state:{largest.entry}",
            tensor=address,
            file=largest.file,
        ),
        also=tuple(
            Where(phase="checkpoint", module=now.module, op=f"state:{now.entry}", tensor=name, file=now.file)
            for name, now, _, _ in rows
            if name != address
        ),
        evidence=evidence,
        help=RULE.page.action,
    )


@RULE.judges(Trend)
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
    """The latest points of a tensor that has left its initialisation; one a step."""
    kept: list[tuple[int, float]] = []
    for step, amax in reversed(seen):
        if amax < start:
            break
        if not kept or kept[-1][0] != step:
            kept.append((step, amax))
    return kept[::-1]


@RULE.judges(CheckpointChange)
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
    """Tensors that were beyond any initialisation and still grew, with their largest magnitudes before and now."""
    start = thresholds[BEYOND_START]
    for t in change.tensors:
        if t.role not in {"weight", "buffer", "ema"} or t.amax is None or t.old_amax is None:
            continue
        if t.old_amax >= start and math.log2(t.amax) > math.log2(t.old_amax):  # by more than its rounding
            yield t, t.old_amax, t.amax


def cast_by_autocast(role: str, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether fp16 autocast would cast a tensor, or it is stored in fp16: beyond its range it is then Inf."""
    return dtype == "float16" or (role == "weight" and len(shape) >= 2 and dtype in {"float32", "float64"})
