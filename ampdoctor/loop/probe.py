"""The seam between a replay and what watches it.

The seam is here so that `probes/` can be written, tested and switched on one by one, and so that the engine knows
nothing of what they look for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ampdoctor.loop.watched import Watched


class Probe(Protocol):
    """Watches a replay."""

    def attach(self, run: Watched) -> AbstractContextManager[None]:
        """Hooks live as long as this context; they are gone afterwards, also after an exception."""
        ...

    def during(self, step: int) -> AbstractContextManager[None]:
        """Surrounds one step: modes that must see every op are entered here."""
        ...

    def finish(self, step: int, loss: Any) -> None:
        """The step has ended; the place for a host sync.

        Args:
            step: The step.
            loss: What the step returned: a 0-dim tensor, a number or None; a `UserCodeError` where the user's code
                ended it with an exception, perhaps because it saw a non-finite value.
        """
        ...
