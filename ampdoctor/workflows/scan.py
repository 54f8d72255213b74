"""`scan`: the health of a checkpoint, without the model's code and without running anything that lies in it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints import Checkpoint, open_checkpoint
from ampdoctor.checkpoints.family import members
from ampdoctor.checkpoints.measures.summary import Observer, summarize
from ampdoctor.diagnosis.checkpoint_checks import checks_of
from ampdoctor.diagnosis.checkpoint_rules import diagnose
from ampdoctor.diagnosis.scaler_rules import scaler_numbers
from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint import CheckpointSummary
from ampdoctor.evidence.report import Check, Finding, Report, Verdict
from ampdoctor.workflows.request import Progress
from ampdoctor.workflows.scan_folder import Examined, scan_family


def scan(
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    jobs: int | None = None,
    exact: bool = False,
    every_member: bool = False,
) -> Report:
    """Examine a checkpoint, or a folder of many of one training.

    Args:
        path: A file or a folder, as for `open_checkpoint`, or a folder of such.
        progress: Told (tensor, bytes done, bytes in all) after each block that was read.
        jobs: Threads that read and examine; None: as many as torch uses.
        exact: Sort every element by magnitude; otherwise an even sample of each tensor beyond 2^20 elements, which
            concerns the shares that a cast would flush, never what is non-finite, largest, negative or saturated.
        every_member: Of many checkpoints read each, not only as many as it takes to find the first sick one.

    Returns:
        A report whose verdict is `sick` where a finding is an error, `inconclusive` where none is but something that
        should have been there could not be read, else `healthy`. Two scans of one file give equal reports. Of many
        checkpoints it is that of the first sick one, of the last where none is, with their trend.

    Raises:
        CheckpointError: It cannot be read, is refused, changed meanwhile, or holds nothing to examine.
        LimitExceededError: It asks for more than a safe bound.
        UsageError: `every_member` was asked of a single checkpoint.
    """

    def look(checkpoint: Checkpoint, member: str = "") -> Examined:
        return examine(checkpoint, progress=_of_member(progress, member), jobs=jobs, exact=exact)

    family = members(path)
    if family is not None and len(family) > 1:
        return scan_family(Path(path).name or str(path), family, look, every_member=every_member)
    if every_member:
        raise UsageError(f"--all reads every checkpoint of a folder of many, and {Path(path).name} is not one")
    with open_checkpoint(path) if family is None else family[0].open() as checkpoint:
        return look(checkpoint).report


def examine(
    checkpoint: Checkpoint, *, progress: Progress | None = None, jobs: int | None = None, exact: bool = False
) -> Examined:
    """Examine one open checkpoint; arguments and errors are those of `scan`."""
    summary = summarize(checkpoint, in_bytes(progress), jobs=jobs, exact=exact)
    findings = diagnose(summary)
    remarks = tuple(Check(name="index", result=remark) for remark in checkpoint.remarks)
    complete = not checkpoint.errors
    sick = any(finding.severity == "error" for finding in findings)
    verdict: Verdict = "sick" if sick else "healthy" if complete else "inconclusive"
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
        verdict=verdict,
        complete=complete,
        findings=findings,
        checks=(*checks_of(summary, findings), *remarks),
        skipped=checkpoint.skipped,
        errors=checkpoint.errors,
        scaler=_scaling(summary, findings),
    )
    return Examined(report=report, summary=summary)


def _of_member(progress: Progress | None, member: str) -> Progress | None:
    """The progress of one of many checkpoints says which one it is."""
    if progress is None or not member:
        return progress

    def told(what: str, done: int, total: int | None, *, unit: str = "") -> None:
        progress(f"{member}: {what}", done, total, unit=unit)

    return told


def in_bytes(progress: Progress | None) -> Observer | None:
    """The observer of `summarize` for the progress of a workflow."""
    return None if progress is None else functools.partial(progress, unit="B")


def _scaling(summary: CheckpointSummary, findings: Sequence[Finding]) -> Mapping[str, Any] | None:
    """The report's section on loss scaling: what is in the file, and a fresh scaler where that cannot go on."""
    if not summary.scalers:
        return None
    cures = [f.prescription.value for f in findings if f.prescription is not None and f.prescription.kind == "scaler"]
    return {
        "current": scaler_numbers(summary.scalers[0]),
        "recommended": cures[0] if cures else None,
        "change": bool(cures),
        "bound_by": None,
        "predicted": None,
        "observed": None,
    }
