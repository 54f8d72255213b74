"""The file, and where it is known the line, that a finding is shown at: annotations and code scanning need one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ampdoctor.evidence.paths import checkpoint_path, file_within, path_in_repository, posix, scanned_path
from ampdoctor.evidence.report import Finding


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a file.

    Attributes:
        file: Path with `/`, relative to the working directory where it lies below it.
        line: 1-based; None where no source line is known.
    """

    file: str
    line: int | None = None


def location_of(finding: Finding, target: Mapping[str, Any]) -> Location:
    """The user's line that a finding speaks of, else the checkpoint's file, else what was examined."""
    source = finding.where.source or finding.where.forward_source
    if source is not None:
        return Location(posix(source.file), source.line)
    return Location(file_in(finding.where.file, target))


def in_repository(at: Location, target: Mapping[str, Any]) -> Location:
    """The place as GitHub takes it, who knows nothing of a working directory: from the repository's root."""
    return replace(at, file=path_in_repository(at.file, target))


def file_in(file: str | None, target: Mapping[str, Any]) -> str:
    """The checkpoint's file of that name, else what was examined."""
    return target_file(target) if file is None else file_within(checkpoint_path(target), posix(file))


def target_file(target: Mapping[str, Any]) -> str:
    """The file or folder that a report is about; for a factory its file, for a saved profile that; "." where none is.

    Of `package.module:function` it is `package/module.py`, which is where such a module lies in most repositories.
    """
    factory = target.get("factory")
    if scanned_path(target):
        return checkpoint_path(target)
    if isinstance(factory, str) and ":" in factory and "profile" not in target:
        module = factory.rpartition(":")[0]
        return posix(module) if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    return posix(target.get("profile") or ".")
