"""Batches are drawn once, in the order of the user's loop, and handed out as copies as long as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.loop.nested import copy_batch, iter_tensors

if TYPE_CHECKING:
    from ampdoctor.replay.training_run import TrainingRun


ROOM = 256 * 2**20
"""Bytes of batches that are kept without asking whether they are needed again: 8 batches of 32 MB."""


_GONE = object()
"""In the place of a batch that was let go of."""


class BatchTape:
    """A lazily grown list of the run's batches.

    Drawing is lazy because a loader may draw from the same random generators as the training: the first pass draws
    each batch where the user's loop would.

    Args:
        run: Its `batches` are read.

    Attributes:
        cut: A batch was let go of, to keep within `ROOM`; `rewind` draws from the start again.
        size: Bytes of the batches that are held.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.cut = False
        self.size = 0
        self._batches: list[Any] = []
        self._sizes: list[int] = []
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
                batch = copy_batch(next(self._iterator))
            except StopIteration:
                self._exhausted = True
            else:
                self._batches.append(batch)
                self._sizes.append(sum(_bytes(tensor) for _, tensor in iter_tensors(batch)))
                self.size += self._sizes[-1]
        return len(self._batches)

    def keep(self, needed: Callable[[int], bool]) -> None:
        """Where the batches take more than `ROOM`, let go of those that are not needed.

        Args:
            needed: Told the index of a batch.
        """
        if self.size <= ROOM:
            return
        for index, batch in enumerate(self._batches):
            if batch is not _GONE and not needed(index):
                self._batches[index] = _GONE
                self.size -= self._sizes[index]
                self.cut = True

    def rewind(self) -> None:
        """Forget what was drawn: the source is opened again, in the random state of that moment."""
        self._batches.clear()
        self._sizes.clear()
        self._iterator = None
        self._exhausted = self.cut = False
        self.size = 0

    def close(self) -> None:
        """Let go of the iterator (a DataLoader's workers)."""
        self._iterator = None

    def __getitem__(self, index: int) -> Any:
        """A fresh copy of batch `index`; it must have been drawn, and not been let go of."""
        batch = self._batches[index]
        if batch is _GONE:
            raise AssertionError(f"batch {index} was let go of")
        return copy_batch(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def _open(self) -> Iterator[Any]:
        source = self._run.batches
        made = source() if isinstance(source, Callable) and not hasattr(source, "__iter__") else source  # type: ignore[arg-type]
        try:
            return iter(made)  # type: ignore[arg-type]
        except TypeError:
            raise FactoryError(f"TrainingRun(batches=...) gave {type(made).__name__}, which is not iterable") from None


def _bytes(tensor: torch.Tensor) -> int:
    """Of the stored elements; a sparse tensor's are in its values."""
    return tensor.coalesce().values().nbytes if tensor.layout is torch.sparse_coo else tensor.nbytes
