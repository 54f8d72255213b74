"""A run's batches: drawn once, from a position in the data, in the training's order, and copied for each replay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, RandomSampler

from ampdoctor.errors import FactoryError
from ampdoctor.hooks.nested import bytes_of, copy_batch
from ampdoctor.replay.frameworks.resuming import SkippingSampler, samples_indices
from ampdoctor.replay.training_run import START, takes_start

if TYPE_CHECKING:
    from ampdoctor.replay.training_run import TrainingRun


# -- skipping batches of a DataLoader by their indices, without loading --


def length_of(made: Any) -> int | None:
    """Returns the number of batches of an epoch; None if it is unknown or batches cannot be skipped."""
    return len(made) if samples_indices(made) or isinstance(made, Sequence) else None


def epochs_known_by(made: Any, *, data: bool = False) -> list[Any]:
    """Returns the objects with `set_epoch`: the loader, its samplers and, with `data`, its dataset."""
    batches = getattr(made, "batch_sampler", None)
    holders = [made, batches, getattr(made, "sampler", None), getattr(batches, "sampler", None)]
    holders += [getattr(made, "dataset", None)] if data else []
    once = {id(holder): holder for holder in holders if callable(getattr(holder, "set_epoch", None))}
    return list(once.values())


def shuffles_by_the_process(made: Any) -> bool:
    """Does a DataLoader shuffle by torch's global generator?"""
    if not isinstance(made, DataLoader):
        return False
    samplers = (made.sampler, getattr(made.batch_sampler, "sampler", None))
    return any(isinstance(sampler, RandomSampler) and sampler.generator is None for sampler in samplers)


def play(loader: DataLoader[Any]) -> None:
    """Draw the indices of a whole epoch in this process, so that a generator advances as in training."""
    skipping, _ = _skipping(loader, len(loader))
    vars(skipping).update(num_workers=0, timeout=0)
    for _ in skipping:
        raise AssertionError("nothing is left of an epoch that was passed over")


def _skipping(loader: DataLoader[Any], count: int) -> tuple[DataLoader[Any], SkippingSampler]:
    """Returns a shallow copy of a DataLoader that skips its first `count` batches, and the copy's sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = SkippingSampler(getattr(loader, name), count)
    made = copy.copy(loader)
    vars(made)[name] = sampler  # a DataLoader refuses the assignment
    return made, sampler


# -- drawing from a position in the data, over as many epochs as needed --
#
# The order is the training's: samplers get the epoch's number; earlier epochs are drawn if a generator must advance.

_END = object()
ORDER_UNKNOWN = (
    "the DataLoader shuffles by torch's global generator, whose state at an epoch's start no checkpoint holds: the "
    "batches may be others than the training's (with a generator of its own their order is known)"
)


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """The position in the data at which the batches start."""

    steps: int = 0  # optimizer steps before the run, for a function with the parameter `start`
    batches: int = 0  # micro-batches before the run, for all other sources
    state: Any = None  # the saved state of a loader that can load it
    epochs: bool = False  # start the next epoch when the source ends
    arrive: Callable[[], None] | None = None  # called at the position, before the next batch is drawn
    say: Callable[[str], None] = lambda _: None  # gets sentences on how the position was reached, and on doubts


def drawn(batches: Any, place: DataPosition) -> Iterator[Any]:
    """Returns an iterator over a run's batches from `place` on; raises FactoryError if they cannot be iterated."""
    if takes_start(batches):
        made = _iterator(batches(**{START: place.steps}))
        return made if place.arrive is None else _arriving(made, place.arrive)
    later = place.batches or place.epochs or place.state is not None or place.arrive is not None
    return _from(batches, place) if later else _iterator(_opened(batches))


def _opened(batches: Any) -> Any:
    return batches() if callable(batches) and not hasattr(batches, "__iter__") else batches


def _iterator(made: Any) -> Iterator[Any]:
    try:
        return iter(made)
    except TypeError:
        raise FactoryError(f"TrainingRun(batches=...) gave {type(made).__name__}, which is not iterable") from None


def _arriving(batches: Iterator[Any], arrive: Callable[[], None]) -> Iterator[Any]:
    """Calls `arrive` after the first batch, when the function has skipped to its start."""
    first = next(batches, _END)
    arrive()
    if first is not _END:
        yield first
        yield from batches


def _from(batches: Any, place: DataPosition) -> Iterator[Any]:
    epoch, source = _led_to(batches, place)
    if place.arrive is not None:
        place.arrive()
    whole = source is None
    while True:
        if source is None:
            source = _iterator(_told(_opened(batches), epoch))
        empty = True
        for batch in source:
            empty = False
            yield batch
        if not place.epochs or (whole and empty):
            return
        epoch, source, whole = epoch + 1, None, True


def _led_to(batches: Any, place: DataPosition) -> tuple[int, Iterator[Any] | None]:
    """Returns the epoch of the position, and the rest of it; None if it has not begun."""
    if place.state is not None:
        made = _opened(batches)
        made.load_state_dict(place.state)
        place.say("the batches go on from the state of their loader in the checkpoint")
        return 0, _iterator(made)
    epoch, left, dropped = 0, place.batches, 0
    while left:
        made = _told(_opened(batches), epoch)
        length = length_of(made)
        if length is not None and left >= length > 0:
            if samples_indices(made) and not epochs_known_by(made):
                play(made)
            left, epoch = left - length, epoch + 1
        elif length is not None:
            place.say(_said(place.batches, epoch, left))
            if shuffles_by_the_process(made):
                place.say(ORDER_UNKNOWN)
            return epoch, _without(made, left)
        else:
            source = _iterator(made)
            gone = sum(1 for _ in islice(source, left))
            left, dropped = left - gone, dropped + gone
            if not left:
                place.say(f"{dropped} batches were drawn and dropped, to come to the checkpoint's place in the data")
                return epoch, source
            if not gone:
                return epoch, source
            epoch += 1
    if place.batches:
        place.say(_said(place.batches, epoch, 0))
    return epoch, None


def _without(made: Any, count: int) -> Iterator[Any]:
    if samples_indices(made):
        skipping, sampler = _skipping(made, count)
        left = _iterator(skipping)
        sampler.begin()  # after the loader has started to iterate: a seed is drawn with the skipped indices
        return left
    return islice(_iterator(made), count, None)


def _said(batches: int, epoch: int, within: int) -> str:
    at = f"{within} batches into epoch {epoch}" if within else f"at the start of epoch {epoch}"
    return f"{batches} batches lie behind the checkpoint and were passed over unloaded: the replay begins {at}"


def _told(made: Any, epoch: int) -> Any:
    for holder in epochs_known_by(made, data=True):
        holder.set_epoch(epoch)
    return made


def loads_state(batches: Any) -> bool:
    """Can it continue from a saved state, like a StatefulDataLoader?"""
    return all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict", "__iter__"))


ROOM = 256 * 2**20
"""Bytes of batches that are kept even if they are not needed again: 8 batches of 32 MB."""
_GONE = object()  # replaces a released batch


class BatchBuffer:
    """The run's batches, each drawn when the user's loop would: a loader may use the training's random generators."""

    def __init__(self, run: TrainingRun) -> None:
        self.cut = False  # a batch was released to stay within `ROOM`; `rewind` draws from the start again
        self.size = 0  # bytes of the batches held
        self.place = DataPosition()  # set before the first batch is drawn
        self._batches: list[Any] = []
        self._sizes: list[int] = []
        self._run = run
        self._iterator: Iterator[Any] | None = None
        self._exhausted = False

    def draw(self, count: int) -> int:
        """Draw until there are `count` batches or the source ends; returns how many batches have been drawn."""
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
        """Release the batches whose indices are not `needed`, if all together take more than `ROOM`."""
        if self.size <= ROOM:
            return
        for index, batch in enumerate(self._batches):
            if batch is not _GONE and not needed(index):
                self._batches[index] = _GONE
                self.size -= self._sizes[index]
                self.cut = True

    @property
    def is_placed(self) -> bool:
        """Do the batches start after others, which the checkpoint's training has seen?"""
        told = takes_start(self._run.batches) and self.place.steps > 0
        return told or self.place.batches > 0 or self.place.state is not None

    def rewind(self) -> None:
        """Forget the drawn batches; the next draw opens the source again, with the random state of that moment."""
        self._batches.clear()
        self._sizes.clear()
        self._iterator = None
        self._exhausted = self.cut = False
        self.size = 0

    def close(self) -> None:
        """Release the iterator, with a DataLoader's workers."""
        self._iterator = None

    def __getitem__(self, index: int) -> Any:
        """Returns a fresh copy of batch `index`, which must have been drawn and not released."""
        batch = self._batches[index]
        if batch is _GONE:
            raise AssertionError(f"batch {index} was let go of")
        return copy_batch(batch)

    def __len__(self) -> int:
        return len(self._batches)
