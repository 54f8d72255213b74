"""The interface between a replay and its probes.

It lets `probes/` be written, tested and switched on one by one, and lets the engine know nothing of what they look for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ampdoctor.loop.watched import Watched


class Probe(Protocol):
    """Watches a replay."""

    def attach(self, run: Watched) -> AbstractContextManager[None]:
        """Install hooks; they live as long as this context and are gone afterwards, also after an exception."""
        ...

    def during(self, step: int) -> AbstractContextManager[None]:
        """Surround one step; modes that must see every op are entered here."""
        ...

    def finish(self, step: int, loss: Any) -> None:
        """End a step; a host sync belongs here.

        Args:
            step: The step.
            loss: What the step returned: a 0-dim tensor, a number or None. If the user's code ended the step with an
                exception, perhaps because it saw a non-finite value: that `UserCodeError`.
        """
        ...
