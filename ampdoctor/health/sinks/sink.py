"""`Sink`: where a run's numbers are shown or stored; each kind is a file, and a line in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from ampdoctor.evidence.report import Finding


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of a run; it is a Protocol because a user's own object may be one.

    A name is that of a metric, as `metrics.py` lists them. If the run has several optimizers and it is not the first,
    the optimizer's name and a slash come before it; for a layer or a reason, a slash and its name come after it. Steps
    come in the order of the log, which is not always that of their numbers. An exception in a method ends the sink, and
    nothing else.
    """

    def log(self, metrics: Mapping[str, float], step: int, *, time_ms: int) -> None:
        """Takes numbers of a step, NaN and infinities among them; the time is since 1970."""

    def alert(self, finding: Finding, step: int, *, time_ms: int) -> None:
        """Takes a finding."""

    def flush(self) -> None:
        """Makes everything given so far visible; called about once a second while numbers come."""

    def close(self) -> None:
        """Ends the sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that a sink shows."""

    name: str  # for people
    run_id: str = ""  # the run's own
    version: str = ""  # of the ampdoctor that wrote the log; "" for another tool's log
    precision: str = ""  # the format that it computes in; "" where it is unknown
    world_size: int = 1  # number of processes

    def as_config(self) -> dict[str, str | int]:
        """Returns the known facts as a run's configuration, under names of ours."""
        known = asdict(self).items()
        return {f"ampdoctor/{key}": value for key, value in known if key != "name" and value != ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkType:
    """A kind of sink; `--export NAME=TARGET` asks for it."""

    name: str
    target: str  # a word for what comes after the `=`
    help: str
    begin: Callable[[str, RunFacts], Sink]  # it alone imports the library
    module: str | None = None  # the library that it needs
    is_path: bool = False  # the target is a path, relative to where the command was typed
    often: bool = True  # takes each step; False: one a second, which stands for those since the last
    writes: Callable[[str, str], tuple[str, ...]] = lambda _target, _run: ()  # files of a path, for a run's name


def title_of(finding: Finding) -> str:
    """Returns an alert's title, short enough for all sinks."""
    return f"{finding.code} {finding.name}"[:63]


def text_of_alert(finding: Finding, step: int) -> str:
    """Returns an alert's text below its title."""
    return " ".join(part for part in (f"Step {step}: {finding.message}", finding.help) if part)
