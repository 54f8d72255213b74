"""The files of findings and reports, under the names that ignores and baselines use.

A path is relative to the working directory if it lies below it, else absolute. It does not matter through which path
the file was scanned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.paths import checkpoint_path, file_within, scanned_path
from ampdoctor.evidence.report import Report


def checkpoint_file(where: Where, target: Mapping[str, Any]) -> str | None:
    """Returns the checkpoint's file with the address, else the checkpoint; None if there is none."""
    return scanned_path(target) if where.file is None else file_within(checkpoint_path(target), where.file)


def files_of(where: Where, target: Mapping[str, Any]) -> list[str]:
    """Returns the files of an address: the checkpoint's file, and those with the lines of the user's code."""
    lines = (line.file for line in (where.source, where.forward_source) if line is not None)
    return [name for name in (checkpoint_file(where, target), *lines) if name is not None]


def examined(report: Report) -> list[str]:
    """Returns the files and folders of the report's target."""
    target = report.target
    named = [entry for key in ("files", "members") for entry in target.get(key) or () if isinstance(entry, dict)]
    inside = [entry.get("path") or entry.get("name") for entry in named]
    names = [checkpoint_path(target), *(target.get("paths") or ())]
    names += [file_within(checkpoint_path(target), name) for name in inside if isinstance(name, str)]
    factory = target.get("factory")
    names += [factory, factory.rpartition(":")[0]] if isinstance(factory, str) else []
    return [name for name in names if isinstance(name, str)]
