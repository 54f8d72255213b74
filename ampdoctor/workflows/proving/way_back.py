"""The way back to a step: a snapshot now and then, and the random state of every step.

A snapshot before each step would make the return free and every step dearer; without any, each return would be a
replay from the start. The distance between two snapshots depends on the length of the run, not on a clock: a report
must come out the same twice.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdoctor.workflows.proving.trials import AFTER

if TYPE_CHECKING:
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import RandomState, Snapshot

TRIED = AFTER + 1
"""Steps after a bad one that a trial may replay: one more than `AFTER` in case it leaves the bad one out."""


def stretch(steps: int) -> int:
    """Returns the number of steps from one snapshot to the next in a run of `steps`.

    A snapshot costs r steps, and a return replays half a stretch on average: steps * r / k + k / 2 is least at
    k = sqrt(2 r steps). Measured: r = 0.04 (46 million parameters with AdamW, 512 tokens a step, one CPU core), and
    more where a step is smaller. r = 1/8 gives sqrt(steps) / 2: each of the usual 8 steps, every 15th of 1,000, and at
    most 1 / sqrt(steps) of the run's steps for a return.

    Args:
        steps: Number of steps that are asked for.

    Returns:
        At least 1.
    """
    return max(1, math.isqrt(steps) // 2)


@dataclass(slots=True)
class WayBack:
    """Leads to the start of the step that has just run, from the nearest snapshot before it.

    It holds at most one snapshot; a snapshot that it handed out lives as long as its receiver keeps it.

    Args:
        steps: Steps of the whole run.
    """

    steps: int
    _states: list[RandomState] = field(default_factory=list)
    _session: Session | None = None
    _snapshot: Snapshot | None = None
    _at: int = 0
    _fired: bool = False
    _given: list[tuple[int, weakref.ref[Snapshot]]] = field(default_factory=list)

    def passes(self, session: Session, step: int, *, exact: bool = False) -> None:
        """Remember the random state of the next step, whose batches are drawn; take a snapshot if one is due.

        The step after one that had to be returned to gets a snapshot at once, because failures come in a row.

        Args:
            session: The run; a session other than the last one starts anew.
            step: The next step.
            exact: Take a snapshot in any case, because nothing between two of them could be replayed.
        """
        self._states.append(session.random_state(self._states[-1] if self._states else None))
        if exact or self._fired or session is not self._session or step - self._at >= stretch(self.steps):
            self._snapshot = None  # never two of them
            self._snapshot, self._session, self._at = session.snapshot(), session, step
            self._fired = False
        session.keep_steps(self._is_needed)

    def random_state(self, step: int) -> RandomState:
        """Returns the generators' states at the start of a step, after its batches were drawn."""
        return self._states[step]

    @property
    def nearest(self) -> Snapshot:
        """The last snapshot."""
        if self._snapshot is None:
            raise AssertionError("no step has begun")
        return self._snapshot

    def to(self, step: int) -> Snapshot:
        """Returns the state before a step that has just run; the session is left where it is.

        Args:
            step: The last step that was passed to `passes`.
        """
        session, snapshot = self._session, self.nearest
        self._fired = True
        if session is not None and self._at < step:
            now = session.snapshot()
            snapshot.restore()
            for earlier in range(self._at, step):
                self._states[earlier].restore()
                session.step(earlier)
            self._states[step].restore()
            snapshot = session.snapshot()
            now.restore()
        self._given = [(at, given) for at, given in self._given if given() is not None]
        self._given.append((step, weakref.ref(snapshot)))
        return snapshot

    def _is_needed(self, step: int) -> bool:
        """May this step's batches be needed again: on the way back, or by a trial from a snapshot in use?"""
        return step >= self._at or any(at <= step <= at + TRIED for at, given in self._given if given() is not None)
