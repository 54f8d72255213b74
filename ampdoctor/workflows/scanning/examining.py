"""Examines one open checkpoint: its numbers, and the report on them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampdoctor.checkpoints import Checkpoint
from ampdoctor.checkpoints.measures.summary import Observer, summarize
from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.checkpoint_checks import checks_of
from ampdoctor.diagnosis.scaler.scaler_finding import scaler_numbers, shown_scaler
from ampdoctor.evidence.codec import from_plain
from ampdoctor.evidence.of_checkpoints.checkpoint import CheckpointSummary, LogEntry
from ampdoctor.evidence.of_checkpoints.tensor_rows import TensorRows
from ampdoctor.evidence.report import Check, ErrorNote, Finding, Report, verdict_of
from ampdoctor.evidence.report.scaler import ScalerArguments, ScalerSection
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.workflows.opening.request import Progress

_REMARK = "index"
"""Name of the checks that are about the layout, not the values."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of examining one checkpoint.

    Attributes:
        report: Its report.
        summary: The numbers behind the report.
        thresholds: What counted as harmful, as too many.
    """

    report: Report
    summary: CheckpointSummary
    thresholds: Thresholds

    def with_log(self, log: tuple[LogEntry, ...]) -> Examined:
        """Returns the same checkpoint, judged beside another training log."""
        report, summary = self.report, replace(self.summary, log=log)
        remarks = [check for check in report.checks if check.name == _REMARK]
        return Examined(_judged(report, summary, remarks, self.thresholds), summary, self.thresholds)


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
    errors = (*checkpoint.errors, *_unread(checkpoint, summary))
    report = Report(
        command="scan",
        target={
            "path": checkpoint.path,
            "format": checkpoint.format,
            "files": [{"path": file.path, "bytes": file.bytes} for file in checkpoint.files],
            "tensors": len(summary.tensors),
            "bytes": checkpoint.total_bytes,
            "global_step": summary.global_step,
        },
        verdict="healthy",
        complete=not errors,
        skipped=checkpoint.skipped,
        errors=errors,
        tensors=TensorRows(summary.tensors),
        thresholds=thresholds.listed(),
    )
    remarks = [Check(name=_REMARK, result=remark) for remark in checkpoint.remarks]
    return Examined(_judged(report, summary, remarks, thresholds), summary, thresholds)


def _unread(checkpoint: Checkpoint, summary: CheckpointSummary) -> Iterator[ErrorNote]:
    """What may be sick and was not read: tensors; and where no weight was read, weights in other formats."""
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


def in_bytes(progress: Progress | None) -> Observer | None:
    """Returns a workflow's progress as the observer of `summarize`."""
    return None if progress is None else functools.partial(progress, unit="B")


def _judged(report: Report, summary: CheckpointSummary, remarks: Sequence[Check], thresholds: Thresholds) -> Report:
    findings = judge(summary, thresholds)
    return replace(
        report,
        verdict=verdict_of(findings, settled=report.complete),
        findings=findings,
        checks=(*checks_of(summary, findings), *remarks),
        scaler=_scaling(summary, findings),
    )


def _scaling(summary: CheckpointSummary, findings: Sequence[Finding]) -> ScalerSection | None:
    """Returns the report's section on loss scaling: the file's scaler, and a fresh one if the file's cannot go on."""
    scaler = shown_scaler(summary, findings)
    if scaler is None:
        return None
    cures = [f.prescription.value for f in findings if f.prescription is not None and f.prescription.kind == "scaler"]
    recommended = from_plain(ScalerArguments, cures[0]) if cures else None
    return ScalerSection(current=scaler_numbers(scaler), recommended=recommended, change=bool(cures))
