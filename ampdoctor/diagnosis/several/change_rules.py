"""Rules on a checkpoint and an earlier one of the same training (AMP710, AMP712 to AMP714)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue import RULES
from ampdoctor.diagnosis.checkpoint.blank_rules import MAX_LISTED
from ampdoctor.diagnosis.checkpoint.checkpoint_rules import FP16_MAX
from ampdoctor.diagnosis.several.growth import course
from ampdoctor.diagnosis.several.trend_rules import growing_finding
from ampdoctor.evidence.of_checkpoints.change import CheckpointChange, TensorChange
from ampdoctor.evidence.of_checkpoints.trend import Largest
from ampdoctor.evidence.report import Finding, Severity, finding_order
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.thresholds.scan_thresholds import BEYOND_START, IDLE_WOULD_MOVE, MOST, STILL, WOULD_MOVE
from ampdoctor.evidence.where import Where

_HALF = frozenset({"float16", "bfloat16"})


def change_findings(change: CheckpointChange, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> tuple[Finding, ...]:
    """What did not move although it should have, what grows, and what differs in structure.

    Args:
        change: From the older checkpoint to the newer one.
        thresholds: What counts as standing still, and as grown.
    """
    rules = (_stagnant, _perhaps_stagnant, _unmoved, _growing)
    found = [*(finding for rule in rules for finding in rule(change, thresholds)), *_structure(change)]
    return tuple(sorted(found, key=finding_order))


def _stagnates(tensor: TensorChange, thresholds: Thresholds) -> bool:
    """Whether a weight's updates are lost to rounding in its 16-bit format."""
    reach, still = tensor.reach, thresholds[STILL]
    return (
        tensor.pure_half
        and reach is not None
        and tensor.unchanged >= still * tensor.elements
        and reach.adds_up >= thresholds[WOULD_MOVE]
        and reach.lands <= (1 - still) * reach.adds_up
    )


def _weights(change: CheckpointChange) -> list[TensorChange]:
    return [t for t in change.tensors if t.role == "weight" and t.elements]


def _stagnant(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    if not change.steps or change.steps < 0:
        return
    trained = [t for t in _weights(change) if t.pure_half and t.moments]
    still = [t for t in trained if _stagnates(t, thresholds)]
    if not still:
        return
    share = _elements(still) / _elements(trained)
    matrices = [t for t in still if len(t.shape) >= 2]
    severity: Severity = "error" if share >= thresholds[MOST] and matrices else "warning" if matrices else "note"
    worst = max(matrices or still, key=lambda t: (t.elements, t.address))
    reach = worst.reach
    assert reach is not None  # noqa: S101 - _stagnates() holds
    message = (
        f"{len(still)} of {len(trained)} trained {worst.dtype} weights stand still: in {worst.address} "
        f"{_percent(worst.unchanged / worst.elements)} of the values did not change in {change.steps} steps, because "
        f"an update of {reach.rms:.2g} is less than half the distance to the next {worst.dtype} number for "
        f"{_percent(1 - reach.lands)} of them."
    )
    evidence = {
        "steps": change.steps,
        "share_of_trained_elements": share,
        "learning_rate": reach.learning_rate,
        "tensors": len(still),
        "listed": [_row(t) for t in sorted(still, key=lambda t: -t.elements)[:MAX_LISTED]],
    }
    yield _finding("AMP712", severity, worst, message, evidence, change, still, cause="optimizer_precision")


def _perhaps_stagnant(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    """Files without optimizer state: what stands still may be frozen, or copied from fp32 weights that move."""
    matrices = [t for t in _weights(change) if t.dtype in _HALF and t.old_dtype == t.dtype and len(t.shape) >= 2]
    partly = [t for t in matrices if thresholds[STILL] * t.elements <= t.unchanged < t.elements]
    if any(t.moments for t in change.tensors) or not partly:
        return
    if _elements(partly) < thresholds[MOST] * _elements(matrices):
        return
    if not change.steps or change.steps < 0:
        return
    worst = max(partly, key=lambda t: (t.unchanged / t.elements, t.address))
    message = (
        f"In {len(partly)} of {len(matrices)} {worst.dtype} matrices most values did not change in {change.steps} "
        f"steps ({_percent(worst.unchanged / worst.elements)} in {worst.address}): either the updates are lost to "
        f"rounding, or these are copies of fp32 weights that moved little. Without optimizer state this cannot be told."
    )
    evidence = {"steps": change.steps, "tensors": len(partly), "listed": [_row(t) for t in partly[:MAX_LISTED]]}
    yield _finding("AMP712", "note", worst, message, evidence, change, partly)


def _unmoved(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
    weights = _weights(change)
    if not weights or not change.steps or change.steps < 0:
        return
    same = [t for t in weights if t.unchanged == t.elements and not t.nonfinite]
    least = thresholds[IDLE_WOULD_MOVE]
    idle = [t for t in same if t.moments and t.reach is not None and t.reach.lands >= least]
    if idle:
        worst = max(idle, key=lambda t: (t.elements, t.address))
        message = (
            f"{len(idle)} of {len(weights)} weights did not change at all in {change.steps} steps, {worst.address} "
            f"first, although the optimizer holds moments for them and one update would change "
            f"{_percent(worst.reach.lands if worst.reach else 0)} of its values."
        )
    elif len(same) == len(weights) and not any(_stagnates(t, thresholds) for t in same):
        worst = max(same, key=lambda t: (t.elements, t.address))
        message = f"No weight changed between step {change.old_step} and step {change.new_step}."
    else:
        return
    evidence = {"steps": change.steps, "tensors": len(idle or same), "listed": [_row(t) for t in idle[:MAX_LISTED]]}
    yield _finding("AMP713", "warning" if idle else "note", worst, message, evidence, change, idle or same)


def _growing(change: CheckpointChange, thresholds: Thresholds) -> Iterator[Finding]:
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
        yield growing_finding(rows, change.new_step, "step")


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


def _place(tensor: TensorChange) -> Where:
    return Where(
        phase="checkpoint",
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=tensor.address,
        file=tensor.file,
    )


def _structure(change: CheckpointChange) -> Iterator[Finding]:
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
    rule = RULES["AMP714"]
    yield Finding(
        code=rule.code,
        name=rule.name,
        severity="note",
        message=f"Of the weights and buffers, {'; '.join(said)}, compared with {change.old}.",
        where=Where(phase="checkpoint", global_step=change.new_step, tensor=first),
        also=tuple(Where(phase="checkpoint", tensor=name) for name in others),
        evidence={
            "vanished": change.vanished[:MAX_LISTED],
            "appeared": change.appeared[:MAX_LISTED],
            "reshaped": {name: list(map(list, shapes)) for name, shapes in list(change.reshaped.items())[:MAX_LISTED]},
            "retyped": dict(list(retyped.items())[:MAX_LISTED]),
        },
        help=rule.page.action,
    )


def _named(tensor: TensorChange) -> bool:
    return tensor.role in {"weight", "buffer", "ema"}


def _finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    code: str,
    severity: Severity,
    tensor: TensorChange,
    message: str,
    evidence: dict[str, Any],
    change: CheckpointChange,
    among: Sequence[TensorChange],
    *,
    cause: str | None = None,
) -> Finding:
    """A finding about all of those `among` which `tensor` is the one to show."""
    rule = RULES[code]
    return Finding(
        code=code,
        name=rule.name,
        severity=severity,
        message=message,
        where=replace(_place(tensor), global_step=change.new_step),
        also=tuple(_place(other) for other in among if other is not tensor),
        cause=cause,
        evidence=evidence,
        help=rule.page.action,
    )


def _row(tensor: TensorChange) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tensor": tensor.address,
        "dtype": tensor.dtype,
        "unchanged": tensor.unchanged / tensor.elements,
        "relative_change": tensor.relative_change,
    }
    if tensor.reach is not None:
        row |= {"update_rms": tensor.reach.rms, "lands": tensor.reach.lands, "adds_up": tensor.reach.adds_up}
    return row


def _elements(tensors: Sequence[TensorChange]) -> int:
    return sum(t.elements for t in tensors)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
