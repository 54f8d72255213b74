"""The file of a finding, and its line if known: annotations and code scanning need one."""

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
        file: Path with `/`, relative to the working directory if it lies below it.
        line: 1-based; None if no source line is known.
    """

    file: str
    line: int | None = None


def location_of(finding: Finding, target: Mapping[str, Any]) -> Location:
    """Returns the user's line of a finding, else the checkpoint's file, else what was examined."""
    source = finding.where.source or finding.where.forward_source
    if source is not None:
        return Location(posix(source.file), source.line)
    return Location(file_in(finding.where.file, target))


def in_repository(at: Location, target: Mapping[str, Any]) -> Location:
    """Returns the place from the repository's root, because GitHub knows nothing about a working directory."""
    return replace(at, file=path_in_repository(at.file, target))


def file_in(file: str | None, target: Mapping[str, Any]) -> str:
    """Returns the checkpoint's file of that name, else what was examined."""
    return target_file(target) if file is None else file_within(checkpoint_path(target), posix(file))


def target_file(target: Mapping[str, Any]) -> str:
    """Returns the file or folder of a report; for a factory its file, for a saved profile that profile; else ".".

    For `package.module:function` it is `package/module.py`, which is where such a module lies in most repositories.
    """
    factory = target.get("factory")
    if scanned_path(target):
        return checkpoint_path(target)
    if isinstance(factory, str) and ":" in factory and "profile" not in target:
        module = factory.rpartition(":")[0]
        return posix(module) if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    return posix(target.get("profile") or ".")
