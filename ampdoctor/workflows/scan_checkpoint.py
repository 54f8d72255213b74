"""One checkpoint: the report on its numbers, or for `scan --list` its contents without reading its tensors."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.checkpoints.checkpoint import Checkpoint, TensorRef
from ampdoctor.checkpoints.found import find
from ampdoctor.checkpoints.scalers import number
from ampdoctor.checkpoints.series import SavedCheckpoint
from ampdoctor.checkpoints.stored_tensor import dtype_name
from ampdoctor.checkpoints.tensor_statistics import NOTHING_TO_EXAMINE, Observer, summarize
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.scan.checks import checks_of
from ampdoctor.diagnosis.scan.scaler import scaler_numbers, shown_scaler
from ampdoctor.evidence.checkpoint_stats import ROLES, CheckpointSummary
from ampdoctor.evidence.json_records import from_plain
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import Check, ErrorNote, Finding, Report, Skipped, finding_order, verdict_of
from ampdoctor.evidence.report_scaler import ScalerArguments, ScalerSection
from ampdoctor.evidence.report_scan import (
    ListedGroup,
    ListedLog,
    ListedMember,
    ListedOptimizer,
    ListedRole,
    ListedTensor,
    StructureSection,
)
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.workflows.requests import Progress
from ampdoctor.workflows.scan_log import LogBeside, log_beside

_REMARK = "index"
"""Name of the checks that are about the layout, not the values."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of examining one checkpoint: its report, and the numbers and thresholds behind it."""

    report: Report
    summary: CheckpointSummary
    thresholds: Thresholds
    log: LogBeside | None = None

    def with_log(self, log: LogBeside) -> Examined:
        """Returns the same checkpoint, judged beside another training log."""
        report, summary = self.report, replace(self.summary, log=log.looked.tail)
        remarks = [check for check in report.checks if check.name == _REMARK]
        return Examined(_judged(report, summary, remarks, self.thresholds, log), summary, self.thresholds, log)


def examine(
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    exact: bool = False,
    thresholds: Thresholds = DEFAULT_THRESHOLDS,
) -> Examined:
    """Examine one open checkpoint; arguments and errors are those of `scan`."""
    summary = summarize(checkpoint, in_bytes(progress), jobs=jobs, exact=exact)
    log, no_logs = log_beside(checkpoint.folders, thresholds)
    summary = replace(summary, log=None if log is None else log.looked.tail)
    errors = (*checkpoint.errors, *_unread(checkpoint, summary))
    report = Report(
        command="scan",
        target=_target(checkpoint, len(summary.tensors)),
        verdict="healthy",
        complete=not errors,
        skipped=(*checkpoint.skipped, *_empty_files(checkpoint), *no_logs),
        errors=errors,
        tensors=summary.tensors,
        thresholds=thresholds.listed(),
    )
    remarks = [Check(name=_REMARK, result=remark) for remark in checkpoint.remarks]
    return Examined(_judged(report, summary, remarks, thresholds, log), summary, thresholds, log)


def _target(checkpoint: Checkpoint, tensors: int) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "files": [{"path": file.path, "bytes": file.bytes} for file in checkpoint.files],
        "tensors": tensors,
        "bytes": checkpoint.total_bytes,
        "global_step": checkpoint.global_step,
    }


def _unread(checkpoint: Checkpoint, summary: CheckpointSummary) -> Iterator[ErrorNote]:
    """Yields errors for unread tensors, which may be sick; if no weight was read, also for weights in other formats."""
    by_reason: dict[str, list[str]] = {}
    for one in checkpoint.unread:
        by_reason.setdefault(one.reason, []).append(one.what)
    if not any(tensor.role == "weight" for tensor in summary.tensors):
        for one in checkpoint.skipped:
            if one.kind == "other_weights":
                by_reason.setdefault(one.reason, []).append(one.what)
    if summary.lost and not summary.tensors and not summary.scalers:
        by_reason["it holds no tensor, and only its other numbers were looked at"] = [checkpoint.path]
    for reason, names in by_reason.items():
        more = f", nor were {len(names) - 1} more" if len(names) > 1 else ""
        yield ErrorNote(what=names[0], kind="unread", message=f"{names[0]} was not examined{more}: {reason}.")


def _empty_files(checkpoint: Checkpoint) -> Iterator[Skipped]:
    """Yields the files of which no value was examined: alone, each would be an error."""
    holding = {ref.file for ref in checkpoint if ref.dtype.is_floating_point or ref.dtype.is_complex}
    holding |= {scaler.file for scaler in checkpoint.scalers} | {one.file for one in checkpoint.lost}
    for part in checkpoint.parts:
        contents = part.sections
        told = contents.optimizers or contents.skipped or contents.loss is not None
        if not told and holding.isdisjoint(file.name for file in part.files):
            yield Skipped(what=part.name, reason=NOTHING_TO_EXAMINE)


def in_bytes(progress: Progress | None) -> Observer | None:
    """Returns a workflow's progress as the observer of `summarize`."""
    return None if progress is None else functools.partial(progress, unit="B")


def _judged(
    report: Report, summary: CheckpointSummary, remarks: Sequence[Check], thresholds: Thresholds, log: LogBeside | None
) -> Report:
    of_log = [] if log is None else log.findings_beside(summary, thresholds)
    own = [_at_its_step(finding, summary) for finding in judge(summary, thresholds)]
    findings = tuple(sorted([*own, *of_log], key=finding_order))
    return replace(
        report,
        verdict=verdict_of(findings, settled=report.complete),
        findings=findings,
        checks=(*checks_of(summary, findings), *([] if log is None else [log.check(of_log)]), *remarks),
        scaler=_scaling(summary, findings),
    )


def _at_its_step(finding: Finding, summary: CheckpointSummary) -> Finding:
    """Returns the finding with the step of its file, which may be another than that of the file beside it."""
    where = finding.where
    return replace(finding, where=replace(where, global_step=summary.step_of(where.file))) if summary.steps else finding


def _scaling(summary: CheckpointSummary, findings: Sequence[Finding]) -> ScalerSection | None:
    """Returns the section on loss scaling: the file's scaler, and a fresh one if the file's cannot be continued."""
    scaler = shown_scaler(summary, findings)
    if scaler is None:
        return None
    cures = [f.prescription.value for f in findings if f.prescription is not None and f.prescription.kind == "scaler"]
    recommended = from_plain(ScalerArguments, cures[0]) if cures else None
    return ScalerSection(current=scaler_numbers(scaler), recommended=recommended, change=bool(cures))


# -- `scan --list`: the contents, without reading tensors --

_SHORT = 8
"""Longest list of numbers among hyperparameters (`betas`) that is shown. Text may be private and is not shown."""


def list_structure(path: str | os.PathLike[str]) -> Report:
    """List a checkpoint's contents, or a folder's checkpoints, without reading a tensor; errors as for `scan`."""
    found = find(path)
    if len(found.members) > 1:
        return Report(
            command="scan",
            target={
                "path": found.name,
                "location": shown_path(path),
                "format": f"{len(found.members)} checkpoints",
                "count": len(found.members),
            },
            verdict="not_judged",
            structure=StructureSection(members=tuple(map(_member, found.members))),
        )
    with found.open() as checkpoint:
        checkpoint.require_unchanged()
        return Report(
            command="scan",
            target={"path": checkpoint.path, "location": shown_path(path), **_target(checkpoint, len(checkpoint))},
            verdict="not_judged",
            complete=not checkpoint.errors,
            skipped=checkpoint.skipped,
            errors=checkpoint.errors,
            structure=_structure(checkpoint),
        )


def _structure(checkpoint: Checkpoint) -> StructureSection:
    refs = list(checkpoint)
    return StructureSection(
        tensors=tuple(_tensor(ref) for role in ROLES for ref in refs if ref.role == role),
        roles={
            role: _total([ref for ref in refs if ref.role == role])
            for role in ROLES
            if any(ref.role == role for ref in refs)
        },
        optimizers=tuple(_optimizers(checkpoint)),
        scalers=tuple({"key": s.key, "file": s.file, **scaler_numbers(s)} for s in checkpoint.scalers),
        unsafe_globals=tuple(checkpoint.unsafe_globals),
        log=_log(checkpoint),
    )


def _member(member: SavedCheckpoint) -> ListedMember:
    return ListedMember(
        name=member.name, step=member.step, unit=member.unit, placed=member.placed, files=tuple(member.files)
    )


def _tensor(ref: TensorRef) -> ListedTensor:
    return ListedTensor(
        role=ref.role,
        name=ref.name,
        group=ref.group,
        entry=ref.entry,
        dtype=dtype_name(ref.dtype),
        shape=tuple(ref.shape),
        bytes=ref.nbytes,
        file=ref.file,
    )


def _total(refs: Sequence[TensorRef]) -> ListedRole:
    dtypes = Counter(dtype_name(ref.dtype) for ref in refs)
    return ListedRole(
        tensors=len(refs),
        elements=sum(ref.stored.numel for ref in refs),
        bytes=sum(ref.nbytes for ref in refs),
        dtypes=dict(dtypes),
    )


def _optimizers(checkpoint: Checkpoint) -> Iterator[ListedOptimizer]:
    for path, optimizer in checkpoint.optimizers().items():
        groups = [group for group in optimizer["param_groups"] if isinstance(group, Mapping)]
        yield ListedOptimizer(path=path, parameters=len(optimizer["state"]), groups=tuple(map(_group, groups)))


def _group(group: Mapping[Any, Any]) -> ListedGroup:
    params = group.get("params")
    shown = {key: _value(item) for key, item in group.items() if isinstance(key, str) and key != "params"}
    settings = {key: item for key, item in shown.items() if item is not None}
    return ListedGroup(parameters=len(params) if isinstance(params, list | tuple) else None, settings=settings)


def _value(item: Any) -> Any:
    """Returns a hyperparameter as a JSON value; None if it is not one."""
    if isinstance(item, bool):
        return item
    if isinstance(item, list | tuple):
        parts = [_value(part) for part in item[:_SHORT]]
        return parts if len(item) <= _SHORT and None not in parts else None
    if isinstance(item, int) and abs(item) < 2**63:
        return item
    return number(item)


def _log(checkpoint: Checkpoint) -> ListedLog | None:
    log, _ = log_beside(checkpoint.folders, DEFAULT_THRESHOLDS)
    if log is None:
        return None
    return ListedLog(entries=log.run.steps, first_step=log.run.first_step, last_step=log.run.last_step)
