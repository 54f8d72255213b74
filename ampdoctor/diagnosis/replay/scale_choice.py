"""Rules on the choice of a loss scale, and on ranges that leave no room for one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from ampdoctor.diagnosis.catalogue import RECOMMENDED, REPLAYED, figure, rule, scale_text
from ampdoctor.diagnosis.scan.between import LinearTrend, course
from ampdoctor.diagnosis.scan.tensors import FP16_MAX
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import FP32_SHARE, Thresholds
from ampdoctor.evidence.trace import Headroom

FORWARD_RANGE = rule("AMP302", RECOMMENDED)
FORWARD_HEADROOM = FORWARD_RANGE["headroom"]


def near_limit(thresholds: Thresholds) -> float:
    """Returns the magnitude from which activations are close to overflow in fp16 (AMP302)."""
    near: float = FP16_MAX / 2.0 ** thresholds[FORWARD_HEADROOM]
    return near


def forward_range(modules: Mapping[str, float], prescription: Prescription | None) -> Finding:
    """Makes the finding of AMP302; `modules` has the largest magnitude by module, of those near or beyond the limit."""
    worst = max(modules, key=lambda name: (modules[name], name))
    return FORWARD_RANGE.finding(
        "warning",
        f"activations reach {figure(modules[worst])}; fp16's largest value is 65,504. No loss scale helps a forward.",
        where=Where(phase="forward", module=worst),
        also=tuple(Where(phase="forward", module=name) for name in sorted(modules) if name != worst),
        cause="forward_overflow",
        evidence={"modules": dict(sorted(modules.items())), "limit": FP16_MAX},
        prescription=prescription,
    )


NO_COMMON_SCALE = rule("AMP303", RECOMMENDED)


def no_common_scale(
    modules: Sequence[str], share: float, scale: float, prescription: Prescription | None, thresholds: Thresholds
) -> Finding:
    """Makes the finding of AMP303: modules that the best scale does not serve, and their share of the parameters."""
    return NO_COMMON_SCALE.finding(
        "warning" if share > thresholds[FP32_SHARE] else "note",
        f"at {scale_text(scale)}, the best loss scale, the gradients of {len(modules)} modules lose more than in bf16 "
        f"({share:.1%} of the parameters)",
        where=Where(phase="backward", module=modules[0]),
        also=tuple(Where(phase="backward", module=name) for name in modules[1:]),
        evidence={"modules": list(modules), "share": share, "loss_scale": scale},
        prescription=prescription,
    )


SCALE_TOO_HIGH = rule("AMP405", REPLAYED)


def scale_too_high(
    scale: float,
    wanted: float,
    *,
    step: int,
    harmed: str | None,
    bound_by: str,
    prescription: Prescription | None,
    begun_again: int = 0,
) -> Finding:
    """Makes the finding of AMP405; `step` is the first harmed step, or the last that the scaler skips."""
    what = f"the scaler still skips step {step}, the last"
    if begun_again:
        what = f"a new scaler is made {begun_again} times, as in each epoch, and still skips step {step}, the last"
    if harmed is not None:
        what = f"{harmed} is not finite in step {step}, and nothing skips it"
    found = SCALE_TOO_HIGH.finding(
        "warning" if harmed is None and not begun_again else "error",
        f"at loss scale {scale_text(scale)} scaled gradients overflow fp16: {what}. "
        f"{scale_text(wanted)} is the largest that fits ({bound_by}).",
        where=Where(step=step, phase="backward", nonfinite="inf"),
        cause="grad_overflow",
        evidence={"loss_scale": scale, "largest_that_fits": wanted, "bound_by": bound_by, "harmed": harmed},
        prescription=prescription,
    )
    return replace(found, help=f"Make the GradScaler once, before the epochs. {found.help}") if begun_again else found


SCALER_COLLAPSE = rule("AMP406", REPLAYED)


def no_valid_scale(
    fits: float, *, bound_by: str, stuck: bool, step: int | None, prescription: Prescription | None
) -> Finding:
    """Makes the finding of AMP406; `stuck`: no step is taken at the end with the run's own scaling."""
    return SCALER_COLLAPSE.finding(
        "error" if stuck else "warning",
        f"unscaled gradients do not fit fp16: the largest loss scale that fits is {scale_text(fits)} ({bound_by})",
        where=Where(step=step, phase="backward", nonfinite="inf" if stuck else "none"),
        cause="scaler_collapse",
        evidence={"largest_that_fits": fits, "bound_by": bound_by},
        prescription=prescription,
    )


SHRINKING_HEADROOM = rule("AMP307", REPLAYED)

_SIGNIFICANT = 2.576
"""Standard deviations of Kendall's S that a growth must exceed, 1 % two-sided. Of 8 steps at most 3 of the 28 pairs may
fall, of 6 none, and fewer than 6 are never enough."""


def shrinking_headroom(seen: Iterable[Headroom], thresholds: Thresholds) -> Finding | None:
    """Makes the finding for outputs that soon overflow their format, if their trend continues (AMP307)."""
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
    module = last.module or "the model"
    more = f"; {len(others)} more do so later" if others else ""
    change = Prescription(
        kind="fp32_modules",
        value=[last.module],
        status="not_run",
        reason="the overflow lies ahead of the steps that were replayed",
        detail=f"run {last.module or 'the whole model'} in fp32",
    )
    return SHRINKING_HEADROOM.finding(
        "warning",
        f"the output of {module} has grown {2.0**way.rate:.3g}-fold a step from step {way.since} to step {way.until}, "
        f"to {figure(last.amax)}. At this rate it passes {last.format}'s largest value, {figure(last.limit)}, "
        f"in about {steps} step{'' if steps == 1 else 's'}{more}.",
        where=Where(step=way.until, phase="forward", module=last.module),
        also=tuple(Where(phase="forward", module=name) for name in others),
        evidence={
            "format": last.format,
            "amax": last.amax,
            "limit": last.limit,
            "log2_headroom": last.log2,
            "log2_per_step": way.rate,
            "steps_seen": len(rows),
            "passes_in_steps": steps,
        },
        prescription=change,
    )


def _heading(rows: Sequence[Headroom], thresholds: Thresholds) -> LinearTrend | None:
    """Returns the trend of an output that grows steadily, significantly and soon beyond its format."""
    if rows[-1].log2 > thresholds[SHRINKING_HEADROOM["near"]] or not _grows(rows):
        return None
    way = course([(row.step, row.amax) for row in rows], rows[-1].limit)
    if way is None or way.meets - way.until > thresholds[SHRINKING_HEADROOM["ahead"]] * (way.until - way.since):
        return None
    return way


def _grows(rows: Sequence[Headroom]) -> bool:
    """Mann and Kendall's test: more pairs of steps rise than by chance."""
    n = len(rows)
    rising = sum((after.amax > before.amax) - (after.amax < before.amax) for before, after in combinations(rows, 2))
    return rising > _SIGNIFICANT * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
