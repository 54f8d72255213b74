"""The sinks that there are, and what `--export KIND=TARGET` means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ampdoctor.errors import UsageError
from ampdoctor.health.sinks import to_csv, to_mlflow, to_openmetrics, to_tensorboard, to_trackio, to_wandb
from ampdoctor.health.sinks.sink import Kind, RunFacts, Sink

KINDS: tuple[Kind, ...] = (
    to_tensorboard.KIND,
    to_wandb.KIND,
    to_mlflow.KIND,
    to_trackio.KIND,
    to_openmetrics.KIND,
    to_csv.KIND,
)
"""A new sink is a file with a `KIND`, and its line here."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
"""How a URL begins; one letter and a colon are a disk of Windows."""


@dataclass(frozen=True, slots=True)
class Export:
    """A sink that was asked for.

    Attributes:
        kind: Of which kind.
        target: Where to; of a path the absolute one.
    """

    kind: Kind
    target: str

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.kind.name}={self.target}"

    @property
    def is_path(self) -> bool:
        """Whether the target is a path."""
        return self.kind.is_path and not self.kind.is_endpoint(self.target) and not is_url(self.target)

    def files(self, run: str = "") -> tuple[str, ...]:
        """Returns the files that it writes for a run of this name, as far as their names are known."""
        return self.kind.writes(self.target, run) if self.is_path else ()

    def begin(self, facts: RunFacts) -> Sink:
        """Makes the sink; its library is imported now."""
        return self.kind.begin(self.target, facts)


def is_url(target: str) -> bool:
    """Is a target the name of a thing elsewhere, as `s3://bucket/logs`, and no path?"""
    return _URL.match(target) is not None


def export_of(text: str) -> Export:
    """Returns the sink that an `--export` names.

    Raises:
        UsageError: There is no such kind, its target makes no sense or is none that can be written, or its library is
            not installed.
    """
    name, equals, target = text.partition("=")
    forms = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        raise UsageError(f"--export {text}: no such sink; there are {forms}")
    if not equals or not target.strip():
        raise UsageError(f"--export {text}: say where to: {kind.name}={kind.target}")
    refusal = _no_url(kind, target) or kind.refuse(target)
    if refusal is not None:
        raise UsageError(f"--export {text}: {refusal}")
    if kind.module is not None and find_spec(kind.module) is None:
        raise UsageError(f"--export {text}: {kind.module} is not installed: pip install 'ampdoctor[{kind.name}]'")
    asked = Export(kind, target)
    if asked.is_path:
        asked = Export(kind, str(Path(target).expanduser().absolute()))
    for file in asked.files():
        if os.path.exists(file) and not os.path.isfile(file):  # noqa: PTH110, PTH113 - these never raise
            what = "a folder" if os.path.isdir(file) else "no regular file"  # noqa: PTH112 - the same
            raise UsageError(f"--export {text}: cannot write {file}: it is {what}")
    return asked


def _no_url(kind: Kind, target: str) -> str | None:
    if not kind.is_path or not is_url(target) or (kind.takes_urls and not target.startswith("file:")):
        return None
    return f"it is a URL, and {kind.name} is written to a path of this machine"
