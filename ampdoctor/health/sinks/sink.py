"""`Sink`: where a run's numbers are shown, stored or watched over; each kind is a file, and a line in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ampdoctor.evidence.report import Finding


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of a run; it is a Protocol because a user's own object may be one.

    A name is that of a metric, as `metrics.py` lists them; that of an optimizer and a slash before it, where the run
    has several and it is not the first; a slash and a layer (or a reason) after it, where it is of one. Steps come in
    the order of the log, which is not always that of their numbers; what a method raises ends the sink, and nothing
    else.
    """

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """Numbers of a step, at a time since 1970; NaN and the infinities are numbers as well."""

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:
        """Something was noticed."""

    def flush(self) -> None:
        """What was given so far is to be seen now; called about once a second while numbers come."""

    def close(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a sink says of a run beside its numbers.

    Attributes:
        name: For people.
        run_id: The run's own.
        version: Of the ampdoctor that wrote the log; "" for a log of another tool.
        precision: The format that it computes in; "" where that is not known.
        world_size: Number of its processes.
    """

    name: str
    run_id: str = ""
    version: str = ""
    precision: str = ""
    world_size: int = 1

    def as_config(self) -> dict[str, str | int]:
        """Returns what is known, as the configuration of a run under names of ours."""
        known: dict[str, str | int] = {
            "run_id": self.run_id,
            "version": self.version,
            "precision": self.precision,
            "world_size": self.world_size,
        }
        return {f"ampdoctor/{key}": value for key, value in known.items() if value != ""}


def _anything(_target: str) -> str | None:
    return None


def _nothing(_target: str, _run: str) -> tuple[str, ...]:
    return ()


def _never(_target: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of sink.

    Attributes:
        name: What stands before the `=` of `--export`.
        target: What stands after it, in a word.
        help: What it is, in a sentence.
        begin: Makes a sink of a target; its library is imported there and nowhere else.
        module: The library that it needs; None for none.
        is_path: The target is a path, and is meant from where the command was typed.
        takes_urls: A target may be a URL as well, which the library understands.
        often: Each step may be given to it; one that asks a server gets a step a second, which stands for those since.
        writes: The files that a target comes to, which is a path, for a run of a name, as far as they are known.
        refuse: Says why a target makes no sense; None where it makes some.
        is_endpoint: Whether a target is no place to write to but one to be asked at, as long as a training runs.
    """

    name: str
    target: str
    help: str
    begin: Callable[[str, RunFacts], Sink]
    module: str | None = None
    is_path: bool = False
    takes_urls: bool = False
    often: bool = True
    writes: Callable[[str, str], tuple[str, ...]] = _nothing
    refuse: Callable[[str], str | None] = _anything
    is_endpoint: Callable[[str], bool] = _never


def title_of(finding: Finding) -> str:
    """Returns an alert's title, short enough for where titles are."""
    return f"{finding.code} {finding.name}"[:63]


def text_of_alert(finding: Finding, step: int) -> str:
    """Returns what an alert says below its title."""
    return " ".join(part for part in (f"Step {step}: {finding.message}", finding.help) if part)
