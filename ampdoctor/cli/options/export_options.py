"""The option that says where a log goes beside the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from ampdoctor.cli.options.completing import export_completions
from ampdoctor.health.sinks.export import KINDS, Export, export_of

_KINDS = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Where the numbers and the alerts of a log go."""

    export: Annotated[
        list[str],
        typer.Option(
            "--export",
            metavar="KIND=TARGET",
            help=f"Also show the log's numbers and alerts there; may be repeated: {_KINDS}.",
            autocompletion=export_completions,
        ),
    ] = field(default_factory=list)

    def exports(self) -> tuple[Export, ...]:
        """Return what was asked for.

        Raises:
            UsageError: One makes no sense, or its library is not installed.
        """
        return tuple(export_of(text) for text in self.export)


def files_of(exports: Iterable[Export]) -> tuple[str, ...]:
    """Return the files that exports write in folders that are there: those in others take nobody's place."""
    return tuple(file for one in exports for file in one.files() if Path(file).parent.is_dir())
