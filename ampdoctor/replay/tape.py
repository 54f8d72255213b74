"""Batches are drawn once, in the order of the user's loop, and handed out as copies ever after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.nested import copy_batch

if TYPE_CHECKING:
    from ampdoctor.replay.training_run import TrainingRun


class BatchTape:
    """A lazily grown list of the run's batches.

    Drawing is lazy because a loader may draw from the same random generators as the training: the first pass draws
    each batch where the user's loop would.

    Args:
        run: Its `batches` are read.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._batches: list[Any] = []
        self._run = run
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False

    def draw(self, count: int) -> int:
        """Make sure that `count` batches are on the tape, as far as the source has them.

        Returns:
            How many batches the tape holds.

        Raises:
            FactoryError: The source is no iterable.
        """
        while len(self._batches) < count and not self._exhausted:
            if self._iterator is None:
                self._iterator = self._open()
            try:
                self._batches.append(copy_batch(next(self._iterator)))
            except StopIteration:
                self._exhausted = True
        return len(self._batches)

    def close(self) -> None:
        """Let go of the iterator (a DataLoader's workers)."""
        self._iterator = None

    def __getitem__(self, index: int) -> Any:
        """A fresh copy of batch `index`; it must have been drawn."""
        return copy_batch(self._batches[index])

    def __len__(self) -> int:
        return len(self._batches)

    def _open(self) -> Iterator[Any]:
        source = self._run.batches
        made = source() if isinstance(source, Callable) and not hasattr(source, "__iter__") else source  # type: ignore[arg-type]
        try:
            return iter(made)  # type: ignore[arg-type]
        except TypeError:
            raise FactoryError(f"TrainingRun(batches=...) gave {type(made).__name__}, which is not iterable") from None
