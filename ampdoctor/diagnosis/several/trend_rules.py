"""Rules on several checkpoints of one training (AMP710, AMP711): pure functions of their figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.checkpoint.blank_rules import MAX_LISTED
from ampdoctor.diagnosis.checkpoint.checkpoint_rules import FP16_MAX
from ampdoctor.diagnosis.checkpoint.scaler_rules import scale_text
from ampdoctor.diagnosis.several.growth import Course, course
from ampdoctor.evidence.of_checkpoints.trend import Largest, TrendPoint
from ampdoctor.evidence.report import Finding, Severity, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import BEYOND_START, SCALE_FALL
from ampdoctor.evidence.where import Where

LEAST_POINTS = 3
"""Checkpoints that it takes to see whether a growth slows down."""


def trend_findings(
    points: Sequence[TrendPoint], unit: str = "step", thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> tuple[Finding, ...]:
    """What is on its way to go wrong.

    Args:
        points: Checkpoints of one training, in order; those without a step are left out.
        unit: What their steps count, for the sentences.
        thresholds: What counts as grown, and as falling.
    """
    known = [point for point in points if point.step is not None]
    found = [*_growing(known, unit, thresholds), *_falling_scale(known, unit, thresholds)]
    return tuple(sorted(found, key=finding_order))


def growing_finding(rows: Sequence[tuple[str, Largest, float, Course]], step: int | None, unit: str) -> Finding:
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
    rule = RULES["AMP710"]
    return Finding(
        code=rule.code,
        name=rule.name,
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
        help=rule.page.action,
    )


def _growing(points: Sequence[TrendPoint], unit: str, thresholds: Thresholds) -> Iterator[Finding]:
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
        yield growing_finding(rows, points[-1].step, unit)


def _since_start(seen: Sequence[tuple[int, float]], start: float) -> list[tuple[int, float]]:
    """The latest points of a tensor that has left its initialisation; one a step."""
    kept: list[tuple[int, float]] = []
    for step, amax in reversed(seen):
        if amax < start:
            break
        if not kept or kept[-1][0] != step:
            kept.append((step, amax))
    return kept[::-1]


def _falling_scale(points: Sequence[TrendPoint], unit: str, thresholds: Thresholds) -> Iterator[Finding]:
    scales = {p.step or 0: p.scale for p in points if p.scale is not None and 0 < p.scale < math.inf}
    seen = list(scales.items())
    top = max((scale for _, scale in seen), default=0.0)
    start = max((at for at, (_, scale) in enumerate(seen) if scale == top), default=0)
    seen = seen[start:]
    if len(seen) < LEAST_POINTS or math.log2(top) - math.log2(seen[-1][1]) < thresholds[SCALE_FALL]:
        return
    heading = course(seen, 1.0)
    if heading is None or not heading.soon:
        return
    rule = RULES["AMP711"]
    message = (
        f"The loss scale has fallen from {scale_text(top)} at {unit} {heading.since} to {scale_text(seen[-1][1])} at "
        f"{unit} {heading.until}; at this rate it is below 1 at about {unit} {math.ceil(heading.meets)}."
    )
    yield Finding(
        code=rule.code,
        name=rule.name,
        severity="warning",
        message=message,
        where=Where(phase="checkpoint", global_step=heading.until, op="scaler_state"),
        evidence={
            "scales": [{"step": step, "scale": scale} for step, scale in seen],
            "meets_at": heading.meets,
            "binades_per_1000": 1000 * heading.rate,
        },
        help=rule.page.action,
    )
