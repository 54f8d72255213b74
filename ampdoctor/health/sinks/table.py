"""The sinks that there are, and what `--export KIND=TARGET` means."""

from __future__ import annotations

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

    def begin(self, facts: RunFacts) -> Sink:
        """Makes the sink; its library is imported now."""
        return self.kind.begin(self.target, facts)


def export_of(text: str) -> Export:
    """Returns the sink that an `--export` names.

    Raises:
        UsageError: There is no such kind, its target makes no sense, or its library is not installed.
    """
    name, equals, target = text.partition("=")
    forms = ", ".join(f"{kind.name}={kind.target}" for kind in KINDS)
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        raise UsageError(f"--export {text}: no such sink; there are {forms}")
    if not equals or not target.strip():
        raise UsageError(f"--export {text}: say where to: {kind.name}={kind.target}")
    refusal = kind.refuse(target)
    if refusal is not None:
        raise UsageError(f"--export {text}: {refusal}")
    if kind.module is not None and find_spec(kind.module) is None:
        raise UsageError(f"--export {text}: {kind.module} is not installed: pip install 'ampdoctor[{kind.name}]'")
    path = kind.is_path and not kind.is_endpoint(target)
    return Export(kind, str(Path(target).expanduser().absolute()) if path else target)
