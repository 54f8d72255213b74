"""Draws batches once, in the order of the user's loop, and hands out copies as long as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ampdoctor.hooks.nested import bytes_of, copy_batch
from ampdoctor.replay.positioning.place import DataPlace, drawn
from ampdoctor.replay.positioning.start import takes_start

if TYPE_CHECKING:
    from ampdoctor.replay.training_run import TrainingRun


ROOM = 256 * 2**20
"""Bytes of batches that are kept whether or not they are needed again: 8 batches of 32 MB."""


_GONE = object()
"""Stands in for a batch that was released."""


class BatchTape:
    """The run's batches, drawn as they are asked for.

    A loader may draw from the same random generators as the training. The first pass therefore draws each batch at the
    moment at which the user's loop would draw it.

    Args:
        run: The run whose `batches` are drawn.

    Attributes:
        cut: True if a batch was released to keep within `ROOM`; `rewind` draws from the start again.
        size: Bytes of the batches that are held.
        place: Where the batches begin; to be set before the first is drawn.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.cut = False
        self.size = 0
        self.place = DataPlace()
        self._batches: list[Any] = []
        self._sizes: list[int] = []
        self._run = run
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False

    def draw(self, count: int) -> int:
        """Draw until the tape holds `count` batches or the source has no more.

        Returns:
            How many batches the tape holds.

        Raises:
            FactoryError: The source is not iterable.
        """
        while len(self._batches) < count and not self._exhausted:
            if self._iterator is None:
                self._iterator = drawn(self._run.batches, self.place)
            try:
                batch = copy_batch(next(self._iterator))
            except StopIteration:
                self._exhausted = True
            else:
                self._batches.append(batch)
                self._sizes.append(bytes_of(batch))
                self.size += self._sizes[-1]
        return len(self._batches)

    def keep(self, needed: Callable[[int], bool]) -> None:
        """Release the batches that are not needed, if all together take more than `ROOM`.

        Args:
            needed: Takes the index of a batch.
        """
        if self.size <= ROOM:
            return
        for index, batch in enumerate(self._batches):
            if batch is not _GONE and not needed(index):
                self._batches[index] = _GONE
                self.size -= self._sizes[index]
                self.cut = True

    @property
    def is_placed(self) -> bool:
        """Do the batches begin behind others, which a checkpoint's training has seen?"""
        told = takes_start(self._run.batches) and self.place.steps > 0
        return told or self.place.batches > 0 or self.place.state is not None

    def rewind(self) -> None:
        """Forget the drawn batches; the next draw opens the source again, in the random state of that moment."""
        self._batches.clear()
        self._sizes.clear()
        self._iterator = None
        self._exhausted = self.cut = False
        self.size = 0

    def close(self) -> None:
        """Release the iterator (a DataLoader's workers)."""
        self._iterator = None

    def __getitem__(self, index: int) -> Any:
        """Returns a fresh copy of batch `index`, which must have been drawn and not released."""
        batch = self._batches[index]
        if batch is _GONE:
            raise AssertionError(f"batch {index} was let go of")
        return copy_batch(batch)

    def __len__(self) -> int:
        return len(self._batches)
