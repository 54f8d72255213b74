"""One process of several, as torchrun starts them: rank 0 speaks, and every other keeps its report in a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.live.log.facts import launched

_NUMBER = re.compile("[0-9]{1,9}")
"""Of a process; `int` itself refuses thousands of digits with an error of its own."""


def rank_of(environment: Mapping[str, str] | None = None) -> int:
    """The rank of this process as torchrun, Slurm or Open MPI has it; 0 where it is the only one.

    Raises:
        UsageError: They are set and are no numbers of a process group.
    """
    known = os.environ if environment is None else environment
    rank, size = known.get("RANK"), known.get("WORLD_SIZE")
    if not rank or not size:
        return launched(known).rank
    if not (_NUMBER.fullmatch(rank) and _NUMBER.fullmatch(size) and int(rank) < int(size)):
        raise UsageError(f"RANK={rank} and WORLD_SIZE={size} name no process of a group: unset them, or run torchrun")
    return int(rank)


def rank_file(rank: int, output: str | None, log: str | None = None) -> str:
    """Where a rank other than 0 keeps its report: with its log, else beside the `--output` of rank 0, or here."""
    if log is not None:
        return str(Path(log) / f"report.rank{rank}.jsonl")
    return str(Path(output or "").parent / f"rank{rank}.jsonl")


def own_file(file: str, rank: int) -> str:
    """A file of this rank alone: `ranges.npz` of rank 0 is `ranges.rank1.npz` of rank 1."""
    path = Path(file)
    return file if rank == 0 else str(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"))


def of_rank(report: Report, rank: int) -> Report:
    """The report with the rank in the address of each finding."""
    if rank == 0:
        return report

    def placed(finding: Finding) -> Finding:
        return replace(finding, where=replace(finding.where, rank=rank))

    return replace(
        report,
        findings=tuple(map(placed, report.findings)),
        suppressed=tuple(replace(one, finding=placed(one.finding)) for one in report.suppressed),
    )
