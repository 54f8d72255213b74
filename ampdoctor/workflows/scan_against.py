"""`scan NEW --against OLD`: how a training's state changed between two checkpoints, and what did not change."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampdoctor.checkpoints.comparison import measure_change
from ampdoctor.checkpoints.found import find
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.scan.between import grown_beyond_start
from ampdoctor.diagnosis.scan.tensors import FP16_MAX
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.checkpoint_stats import ROLES, CheckpointChange, TensorChange, relative
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import Check, Finding, Report, finding_order, verdict_of
from ampdoctor.evidence.report_scan import ChangedCheckpoint, ChangedTensor, ChangeSection, RoleChange, TensorGrowth
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.workflows.requests import Progress
from ampdoctor.workflows.scan_checkpoint import examine, in_bytes

_LISTED = 10

_Growth = tuple[TensorGrowth, ...]
"""Rows of the section on growth, the one nearest to fp16's limit first."""


def compare(  # noqa: D417 - what is as for `scan` stands in one line
    new: str | os.PathLike[str],
    old: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    exact: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Report:
    """Examine a checkpoint, and compare it with an earlier one of the same training.

    Args:
        new: The newer checkpoint: a file or a folder, as for `open_checkpoint`.
        old: The older one.
        progress, jobs, exact, thresholds: As for `scan`.

    Returns:
        The report of a scan of the newer one, with the result of the comparison.

    Raises:
        CheckpointError: One of them cannot be read or is a folder of many, or they have no tensor in common.
        LimitExceededError: One asks for more than a safe bound.
    """
    with find(new).open() as newer, find(old).open() as older:
        examined = examine(newer, progress=progress, jobs=jobs, exact=exact, thresholds=thresholds)
        change, skipped = measure_change(newer, examined.summary, older, in_bytes(progress))
        if not change.tensors and not skipped:
            raise CheckpointError(f"{newer.path} and {older.path} have no tensor of one name and shape in common.")
        report = examined.report
        dated = [_dated(finding, change) for finding in report.findings]
        findings = tuple(sorted([*dated, *judge(change, thresholds)], key=finding_order))
        errors = (*report.errors, *(replace(note, what=f"{older.path}: {note.what}") for note in older.errors))
        growth = _growth(change, thresholds)
        return replace(
            report,
            target={
                **report.target,
                "location": shown_path(new),
                "against": {"path": older.path, "location": shown_path(old), "global_step": change.old_step},
            },
            verdict=verdict_of(findings, settled=not errors),
            complete=not errors,
            findings=findings,
            checks=(*_checks(change, findings, growth), *report.checks),
            skipped=(*report.skipped, *skipped),
            errors=errors,
            change=_section(change, growth),
        )


def _dated(finding: Finding, change: CheckpointChange) -> Finding:
    """Returns a finding of non-finite values, with what the older checkpoint says about when they appeared."""
    where = finding.where
    entry = (where.op or "").partition(":")[2]
    tensor = next((t for t in change.tensors if t.address == where.tensor and t.entry == entry), None)
    if where.nonfinite == "none" or tensor is None or not tensor.nonfinite:
        return finding
    if tensor.old_nonfinite:
        said = f"{tensor.old_nonfinite} of its values were not finite at {_moment(change, old=True)} already."
    else:
        said = f"It was finite at {_moment(change, old=True)}: this came between then and {_moment(change, old=False)}."
    dates = {
        "old_nonfinite": tensor.old_nonfinite,
        "appeared_between": None if tensor.old_nonfinite else [change.old_step, change.new_step],
    }
    return replace(finding, message=f"{finding.message} {said}", evidence={**finding.evidence, **dates})


def _moment(change: CheckpointChange, *, old: bool) -> str:
    step = change.old_step if old else change.new_step
    return f"step {step}" if step is not None else change.old if old else change.new


def _checks(change: CheckpointChange, findings: Sequence[Finding], growth: _Growth) -> Iterator[Check]:
    weights = [t for t in change.tensors if t.role == "weight" and t.elements]
    same = [t for t in weights if t.unchanged == t.elements]
    steps = change.steps
    if steps is not None and steps < 0:
        yield Check(
            name="order", result=f"{change.old} was saved after {change.new}: step {change.old_step}, {change.new_step}"
        )
    if weights:
        moved = 1 - sum(t.unchanged for t in weights) / sum(t.elements for t in weights)
        yield Check(
            name="weights that moved",
            result=(
                "none: all are equal"
                if len(same) == len(weights)
                else f"{len(weights) - len(same)} of {len(weights)}, {100 * moved:.3g} % of their elements"
            ),
            headroom={"relative_change": _relative(weights)},
        )
    frozen = [t for t in same if not t.moments]
    if frozen and len(frozen) < len(weights):
        yield Check(
            name="frozen weights", result=f"{len(frozen)} did not change and have no moments, {frozen[0].address} first"
        )
    codes = {finding.code for finding in findings}
    half = [t for t in weights if t.pure_half and t.moments]
    if half:
        yield Check(name="updates of 16-bit weights", result="found" if "AMP712" in codes else "ok")
    if growth:
        met = growth[0].meets_at
        yield Check(
            name="range growth",
            result="found" if "AMP710" in codes else _heading(growth[0]),
            headroom={"log2": growth[0].log2_growth, **({} if met is None else {"meets_at": met})},
        )
    elif weights:
        yield Check(
            name="range growth",
            result="ok",
            headroom={"old_amax": _largest(weights, old=True), "amax": _largest(weights)},
        )


def _heading(row: TensorGrowth) -> str:
    meets = row.meets_at
    when = f"; at this rate fp16's limit is met at step {math.ceil(meets)}" if meets is not None else ""
    return f"most in {row.tensor}, from {row.old_amax:.4g} to {row.amax:.4g}{when}"


def _growth(change: CheckpointChange, thresholds: Thresholds) -> _Growth:
    """Returns tensors beyond any initialisation that still grew, by when they would reach fp16's largest number."""
    rows = []
    steps = change.steps
    for t, before, now in grown_beyond_start(change, thresholds):
        log2_growth = math.log2(now) - math.log2(before)
        intervals = max(math.log2(FP16_MAX) - math.log2(now), 0.0) / log2_growth
        rows.append(
            TensorGrowth(
                tensor=t.address,
                old_amax=before,
                amax=now,
                log2_growth=log2_growth,
                intervals=intervals,
                meets_at=(change.new_step or 0) + intervals * steps if steps is not None and steps > 0 else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (row.intervals, row.tensor))[:_LISTED])


def _section(change: CheckpointChange, growth: _Growth) -> ChangeSection:
    return ChangeSection(
        old=ChangedCheckpoint(path=change.old, global_step=change.old_step, scale=change.old_scale),
        new=ChangedCheckpoint(path=change.new, global_step=change.new_step, scale=change.new_scale),
        steps=change.steps,
        roles={
            role: _role([t for t in change.tensors if t.role == role])
            for role in ROLES
            if any(t.role == role for t in change.tensors)
        },
        growth=growth,
        tensors=tuple(
            ChangedTensor(
                name=t.address,
                role=t.role,
                entry=t.entry,
                dtype=t.dtype,
                old_dtype=t.old_dtype,
                shape=t.shape,
                unchanged=t.unchanged / t.elements if t.elements else None,
                relative_change=t.relative_change,
                amax=t.amax,
                old_amax=t.old_amax,
                nonfinite=t.nonfinite,
                old_nonfinite=t.old_nonfinite,
            )
            for t in change.tensors
        ),
        appeared=change.appeared,
        vanished=change.vanished,
        reshaped=change.reshaped,
    )


def _role(tensors: Sequence[TensorChange]) -> RoleChange:
    elements = sum(t.elements for t in tensors)
    return RoleChange(
        tensors=len(tensors),
        elements=elements,
        unchanged=sum(t.unchanged for t in tensors) / elements if elements else None,
        relative_change=_relative(tensors),
        amax=_largest(tensors),
        old_amax=_largest(tensors, old=True),
    )


def _largest(tensors: Sequence[TensorChange], *, old: bool = False) -> float | None:
    found = [t.old_amax if old else t.amax for t in tensors]
    return max((amax for amax in found if amax is not None), default=None)


def _relative(tensors: Sequence[TensorChange]) -> float | None:
    return relative(math.hypot(*(t.change_norm for t in tensors)), math.hypot(*(t.old_norm for t in tensors)))
