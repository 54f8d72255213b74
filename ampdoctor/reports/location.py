"""The file, and where it is known the line, that a finding is shown at: annotations and code scanning need one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

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
        return Location(_posix(source.file), source.line)
    if finding.where.file is not None:
        return Location(_within(_checkpoint(target), _posix(finding.where.file)))
    return Location(target_file(target))


def target_file(target: Mapping[str, Any]) -> str:
    """The file or folder that a report is about; for a factory its file, for a saved profile that; "." where none is.

    Of `package.module:function` it is `package/module.py`, which is where such a module lies in most repositories.
    """
    factory = target.get("factory")
    if _checkpoint_of_scan(target):
        return _checkpoint(target)
    if isinstance(factory, str) and ":" in factory and "profile" not in target:
        module = factory.rpartition(":")[0]
        return _posix(module) if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    return _posix(target.get("profile") or ".")


def _checkpoint_of_scan(target: Mapping[str, Any]) -> str | None:
    """The checkpoint that was scanned; None of several, where a finding's file says which one."""
    return None if "paths" in target else target.get("location") or target.get("path")


def _checkpoint(target: Mapping[str, Any]) -> str:
    path = _checkpoint_of_scan(target) or target.get("checkpoint")
    return _posix(path) if path else ""


def _within(checkpoint: str, file: str) -> str:
    """The path of a checkpoint's file; a checkpoint that is one file is that file, and an index lies beside them."""
    if not checkpoint or checkpoint == file or checkpoint.endswith(f"/{file}"):
        return checkpoint or file
    folder = checkpoint.rpartition("/")[0] if checkpoint.endswith(".json") else checkpoint
    return f"{folder}/{file}" if folder else file


def _posix(path: str) -> str:
    return PurePath(path).as_posix()
