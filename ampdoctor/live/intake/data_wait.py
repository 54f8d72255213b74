"""How long a loop waits for its DataLoaders, heard at the one door that all their iterators go through."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter  # a script may put another in its place
from typing import Any

from ampdoctor.hooks.torch_internals import replaced


class _Here(threading.local):
    """What a thread has waited: a loop does not wait for what another thread draws ahead of it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches = 0
        self.inside = False


class DataWait:
    """Adds up the time in the `__next__` of DataLoaders' iterators, by thread."""

    def __init__(self) -> None:
        self._here = _Here()
        self._marks: dict[str, tuple[float, int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, waits are heard; afterwards the door is as it was."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original, here, listens = _BaseDataLoaderIter.__next__, self._here, [True]

        @functools.wraps(original)
        def drawn(iterator: Any) -> Any:
            if here.inside or not listens:  # a dataset that draws from a loader of its own: that is in the time already
                return original(iterator)
            here.inside, began = True, perf_counter()
            try:
                return original(iterator)
            finally:
                here.seconds += perf_counter() - began
                here.batches += 1
                here.inside = False

        with replaced(_BaseDataLoaderIter, "__next__", drawn):
            try:
                yield
            finally:
                listens.clear()  # whoever has wrapped ours keeps it

    def since(self, optimizer: str) -> float | None:
        """Returns the seconds that this thread has waited since it was asked for the same optimizer.

        None where it has drawn nothing since, or was not asked before: the loop may have its data from elsewhere.
        """
        here = self._here
        seconds, batches = self._marks.get(optimizer, (0.0, here.batches))
        self._marks[optimizer] = here.seconds, here.batches
        return here.seconds - seconds if here.batches > batches else None
