"""The way back to a step: a snapshot now and then, and the random state of every step.

A snapshot before each step would make the return free and every step dearer; none at all would make the return a replay
from the start. The length of the stretch between two is a fixed function of the length of the run, not of a clock: a
report must come out the same twice.
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
"""Steps after a bad one that a trial may replay: one more than `AFTER` where it leaves the bad one out."""


def stretch(steps: int) -> int:
    """Steps from one snapshot to the next in a run of `steps`.

    A snapshot costs r steps, and a return replays half a stretch on average: steps * r / k + k / 2 is least at
    k = sqrt(2 r steps). Measured: r = 0.04 (46 million parameters with AdamW, 512 tokens a step, one CPU core), and
    more where a step is smaller. r = 1/8 gives sqrt(steps) / 2: each of the usual 8 steps, every 15th of 1,000, and at
    most 1 / sqrt(steps) of the run's steps for a return.

    Args:
        steps: Steps that are asked for.

    Returns:
        At least 1.
    """
    return max(1, math.isqrt(steps) // 2)


@dataclass(slots=True)
class WayBack:
    """Leads to the start of the step that has just run, from the nearest snapshot before it.

    At most one snapshot is held here; those that were handed out live as long as whoever asked keeps them.

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
        """Step `step` is about to run, its batches are drawn: remember its random state, take a snapshot if it is time.

        After a step that had to be gone back to, the next one gets a snapshot at once: failures come in a row.

        Args:
            session: The run; another one than before starts anew.
            step: The next step.
            exact: Take a snapshot in any case: nothing between two of them could be replayed.
        """
        self._states.append(session.random_state(self._states[-1] if self._states else None))
        if exact or self._fired or session is not self._session or step - self._at >= stretch(self.steps):
            self._snapshot = None  # never two of them
            self._snapshot, self._session, self._at = session.snapshot(), session, step
            self._fired = False
        session.keep_steps(self._is_needed)

    def random_state(self, step: int) -> RandomState:
        """The generators at the start of a step, after its batches were drawn."""
        return self._states[step]

    @property
    def nearest(self) -> Snapshot:
        """The last snapshot that was taken."""
        if self._snapshot is None:
            raise AssertionError("no step has begun")
        return self._snapshot

    def to(self, step: int) -> Snapshot:
        """The state before a step, which has just run; the session is left where it is.

        Args:
            step: The last step that `passes` was told of.
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
        """Batches of this step may be asked for again: on the way back, or by a trial from a snapshot still in use."""
        return step >= self._at or any(at <= step <= at + TRIED for at, given in self._given if given() is not None)
