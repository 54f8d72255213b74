"""The files that findings and reports speak of, by the names that ignores and baselines know them by.

A path is relative to the working directory where it lies below it, else absolute, whichever path of it or above it was
scanned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.evidence.paths import checkpoint_path, file_within, scanned_path
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.where import Where


def checkpoint_file(where: Where, target: Mapping[str, Any]) -> str | None:
    """The checkpoint's file that an address lies in, else the checkpoint; None where there is none.

    Args:
        where: An address.
        target: That of the report.
    """
    return scanned_path(target) if where.file is None else file_within(checkpoint_path(target), where.file)


def files_of(where: Where, target: Mapping[str, Any]) -> list[str]:
    """The checkpoint's file and the lines of the user's code that an address speaks of."""
    lines = (line.file for line in (where.source, where.forward_source) if line is not None)
    return [name for name in (checkpoint_file(where, target), *lines) if name is not None]


def examined(report: Report) -> list[str]:
    """The files and folders of the report's target."""
    target = report.target
    named = [entry for key in ("files", "members") for entry in target.get(key) or () if isinstance(entry, dict)]
    inside = [entry.get("path") or entry.get("name") for entry in named]
    names = [checkpoint_path(target), *(target.get("paths") or ())]
    names += [file_within(checkpoint_path(target), name) for name in inside if isinstance(name, str)]
    factory = target.get("factory")
    names += [factory, factory.rpartition(":")[0]] if isinstance(factory, str) else []
    return [name for name in names if isinstance(name, str)]
