"""What a tool says of a run, and what a run is to a tool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from benchmarks.peers.loop import Loop
from fixtures.corpus import runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A tool's first alarm.

    Attributes:
        step: Optimizer step in which it was raised, from 0.
        module: Name in `named_modules()` that it names; "" for the root or code outside of all modules; None where it
            names no module.
        op: The op that it names, in its own spelling; None where it names none.
        causes: Causes of this project that its own word for the cause may mean; empty where it names none.
        said: Its own words, in one line.
    """

    step: int
    module: str | None = None
    op: str | None = None
    causes: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A run of the corpus, as a tool gets it.

    Attributes:
        name: Id in the corpus.
        checkpoint: The saved state that the run resumes from; None where it starts afresh.
        folder: An empty folder for whatever a tool writes.
        steps: How many steps the run takes before it ends, or raises by itself.
    """

    name: str
    checkpoint: Path | None
    folder: Path
    steps: int

    def loop(self) -> Loop:
        """Build the run's plain training loop."""
        return Loop(runs.make_run(self.name), self.checkpoint, self.steps)


class Tool(Protocol):
    """A tool, attached to a run as its own documentation says.

    The seam is here because the tools share nothing: some are hooks, some modes, some read files after the run.
    """

    def __call__(self, case: Case) -> Answer | None:
        """Train, and return the first alarm; None where the run ends without one."""


@contextmanager
def opened(name: str) -> Iterator[Case]:
    """Make the case, with its checkpoint written where the defect lies in saved state."""
    with TemporaryDirectory(prefix="diagnosis-") as folder:
        checkpoint = Path(folder) / "checkpoint.pt" if runs.has_checkpoint(name) else None
        if checkpoint is not None:
            runs.write_checkpoint(name, checkpoint)
        work = Path(folder) / "work"
        work.mkdir()
        yield Case(name, checkpoint, work, Loop(runs.make_run(name), checkpoint).lives())
