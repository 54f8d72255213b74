"""The seam between a framework's own objects and a `TrainingRun`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ampdoctor.replay.training_run import TrainingRun


class Adapter(Protocol):
    """A framework whose objects a factory may return; a Protocol so that a new framework is one new file."""

    @property
    def name(self) -> str:
        """The framework's name, as in a sentence: "the Hugging Face Trainer"."""

    def claims(self, made: object) -> bool:
        """Is it what this framework makes? Nothing is imported for the question: what is not imported made nothing."""

    def run_of(self, made: Any) -> TrainingRun:
        """Returns the run whose step is the framework's own.

        Raises:
            FactoryError: It cannot be replayed (DeepSpeed's engine, FSDP, several processes); one sentence says what.
        """

    def at_entry(self, reached: Callable[[object], None]) -> AbstractContextManager[None]:
        """While inside, a script's call of the framework's entry (`Trainer.train`, `Trainer.fit`) trains nothing.

        Args:
            reached: Called with what `claims` claims in the entry's place; it raises.
        """
