"""The way back to a step: a snapshot now and then, and the random state of every step since.

A snapshot before each step would make the return free and every step dearer; without any, each return would be a
replay from the start. The distance between two snapshots depends on the length of the run, not on a clock: a report
must come out the same twice.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ampdoctor.workflows.proving.trials import AFTER

if TYPE_CHECKING:
    from ampdoctor.hooks.process_state import RandomState
    from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import Snapshot

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

    It holds one snapshot. Where it is to lead to some steps before the last one as well it holds two, which are never
    nearer to each other than that. A snapshot that it handed out lives as long as its receiver keeps it.

    Args:
        steps: Steps of the whole run.
        behind: Steps before the last one that it leads to as well.
    """

    steps: int
    behind: int = 0
    _states: dict[int, RandomState] = field(default_factory=dict)
    _session: Session | None = None
    _ring: deque[tuple[int, Snapshot]] = field(default_factory=deque)
    _last: RandomState | None = None
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
        self._last = self._states[step] = session.random_state(self._last)
        due = exact or self.is_due(session, step)
        if session is not self._session:
            self._ring.clear()
        self._let_go(step)
        if due:
            if not self.behind:
                self._ring.clear()  # never two of them
            elif len(self._ring) > 1:  # taken for a failure: the older one still leads far enough back
                self._ring.pop()
            self._ring.append((step, session.snapshot()))
            self._session, self._fired = session, False
        session.keep_steps(self._is_needed)

    def is_due(self, session: Session, step: int) -> bool:
        """Is a snapshot to be taken before this step?"""
        if self._fired or not self._ring or session is not self._session:
            return True
        return step - self._ring[-1][0] >= max(stretch(self.steps), self.behind)

    def random_state(self, step: int) -> RandomState:
        """Returns the generators' states at the start of a step, after its batches were drawn."""
        return self._states[step]

    def also(self, step: int, snapshot: Snapshot) -> None:
        """Keep the batches that a trial from this snapshot may need, as long as it lives.

        Args:
            step: The step that it stands before.
            snapshot: A snapshot that is held elsewhere.
        """
        self._given.append((step, weakref.ref(snapshot)))

    @property
    def nearest(self) -> Snapshot:
        """The last snapshot."""
        return self._nearest[1]

    @property
    def begin(self) -> int:
        """The first step that it leads to; 0 where no step has begun."""
        return self._ring[0][0] if self._ring else 0

    @property
    def farthest(self) -> Snapshot:
        """The snapshot before step `begin`."""
        return self._ring[0][1]

    @property
    def _nearest(self) -> tuple[int, Snapshot]:
        if not self._ring:
            raise AssertionError("no step has begun")
        return self._ring[-1]

    def to(self, step: int) -> Snapshot:
        """Returns the state before a step that has just run; the session is left where it is.

        Args:
            step: The last step that was passed to `passes`.
        """
        session, (at, snapshot) = self._session, self._nearest
        self._fired = True
        if session is not None and at < step:
            now = session.snapshot()
            snapshot.restore()
            for earlier in range(at, step):
                self._states[earlier].restore()
                session.step(earlier)
            self._states[step].restore()
            snapshot = session.snapshot()
            now.restore()
        self._given = [(at, given) for at, given in self._given if given() is not None]
        self._given.append((step, weakref.ref(snapshot)))
        return snapshot

    def _let_go(self, step: int) -> None:
        """Let go of what leads no further back than a later snapshot that is far enough back itself."""
        while len(self._ring) > 1 and self._ring[1][0] <= step - self.behind:
            self._ring.popleft()
        for old in [earlier for earlier in self._states if earlier < self.begin]:
            del self._states[old]

    def _is_needed(self, step: int) -> bool:
        """May this step's batches be needed again: on the way back, or by a trial from a snapshot in use?"""
        return step >= self.begin or any(at <= step <= at + TRIED for at, given in self._given if given() is not None)
