"""AMP307: a layer's output grows towards the end of its format."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.several.growth import Course, course
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import Threshold, Thresholds
from ampdoctor.evidence.trace import Headroom

NEAR = Threshold(
    code="AMP307",
    name="near",
    default=4.0,
    unit="binades",
    lowest=0.0,
    highest=8.0,
    why="Headroom below which a growth counts. In fp16 that is 4094: outputs that are this large stay so for a whole "
    "training (massive activations of language models), and one that still grows is past what an initialisation and "
    "the first steps do.",
)
AHEAD = Threshold(
    code="AMP307",
    name="ahead",
    default=4.0,
    unit="factor",
    lowest=0.0,
    highest=1000.0,
    why="How many times the steps of its course an output may be away from the limit. A line through 8 steps with "
    "residuals of s binades is significant from a growth of 2.8 s on; four times as many steps later it has grown by "
    "11 s and is off by 5 s: the step at which it meets the limit is right within a factor of 2.",
)
RULE = register(
    "AMP307",
    "shrinking-headroom",
    "A layer's output grows towards the end of its format",
    worst="warning",
    commands=REPLAYED,
    thresholds=(NEAR, AHEAD),
)

_SIGNIFICANT = 2.576
"""Standard deviations of Kendall's S that a growth must exceed, 1 % two-sided. Of 8 steps at most 3 of the 28 pairs may
fall, of 6 none, and fewer than 6 are never enough."""


def shrinking_headroom(seen: Iterable[Headroom], thresholds: Thresholds) -> Finding | None:
    """The finding for outputs that pass the end of their format soon, if they go on as they did (AMP307).

    Args:
        seen: The largest output of each module near its format's end, of the steps without harm, in their order.
        thresholds: How near, and how far ahead.
    """
    by_module: dict[tuple[str, str], list[Headroom]] = defaultdict(list)
    for one in seen:
        by_module[one.module, one.format].append(one)
    heading = [(way, rows) for rows in by_module.values() if (way := _heading(rows, thresholds)) is not None]
    if not heading:
        return None
    heading.sort(key=lambda pair: (pair[0].meets, pair[1][-1].module))
    (way, rows), others = heading[0], [rows[-1].module for _, rows in heading[1:]]
    last = rows[-1]
    steps = max(1, math.ceil(way.meets - way.until))
    module = f"module {last.module}" if last.module else "the root module"
    more = f"; {len(others)} more do so later" if others else ""
    change = Prescription(
        kind="fp32_modules",
        value=[last.module],
        status="not_run",
        reason="the overflow lies ahead of the steps that were replayed",
        detail=f"run {last.module or 'the whole model'} in fp32",
    )
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        message=f"the output of {module} has grown by {way.rate:.2g} binades a step from step {way.since} to step "
        f"{way.until}, to {last.amax:.4g}: at this rate it passes {last.format}'s {last.limit:.5g} in about {steps} "
        f"step{'' if steps == 1 else 's'}{more}",
        where=Where(step=way.until, phase="forward", module=last.module),
        also=tuple(Where(phase="forward", module=name) for name in others),
        evidence={
            "format": last.format,
            "amax": last.amax,
            "limit": last.limit,
            "headroom_binades": last.binades,
            "binades_per_step": way.rate,
            "steps_seen": len(rows),
            "passes_in_steps": steps,
        },
        help=RULE.page.action,
        prescription=change,
    )


def _heading(rows: Sequence[Headroom], thresholds: Thresholds) -> Course | None:
    """Where an output is heading, if it grows steadily, surely and soon beyond its format."""
    if rows[-1].binades > thresholds[NEAR] or not _grows(rows):
        return None
    way = course([(row.step, row.amax) for row in rows], rows[-1].limit)
    if way is None or way.meets - way.until > thresholds[AHEAD] * (way.until - way.since):
        return None
    return way


def _grows(rows: Sequence[Headroom]) -> bool:
    """Mann and Kendall's test: more pairs of steps rise than chance makes."""
    n = len(rows)
    rising = sum((after.amax > before.amax) - (after.amax < before.amax) for before, after in combinations(rows, 2))
    return rising > _SIGNIFICANT * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
