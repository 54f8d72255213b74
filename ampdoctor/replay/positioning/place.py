"""Draws a run's batches from a place in the data on, over as many epochs as are asked for.

The order is that of the training: an epoch's sampler, told the epoch's number where it wants to know it, and the
epochs before it drawn as far as a shuffling generator has to move on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.positioning.loaders import (
    Skipping,
    epochs_known_by,
    length_of,
    play,
    samples_indices,
    shuffles_by_the_process,
)
from ampdoctor.replay.positioning.start import START, takes_start

_END = object()
ORDER_UNKNOWN = (
    "the DataLoader shuffles by torch's global generator, whose state at an epoch's start no checkpoint holds: the "
    "batches may be others than the training's (with a generator of its own their order is known)"
)


def _nothing(_: str) -> None:
    return None


@dataclass(slots=True, kw_only=True)
class DataPlace:
    """Where the batches begin.

    Attributes:
        steps: Optimizer steps that lie behind the run, for a function that takes `start`.
        batches: Micro-batches that lie behind it, for whatever else gives batches.
        state: A loader's saved state, for one that can load it.
        epochs: Open what ends again, as the next epoch.
        arrive: Called at the place, before what comes next is drawn.
        say: Told, in a sentence each, how the place was come to, and where it may be another than the training's.
    """

    steps: int = 0
    batches: int = 0
    state: Any = None
    epochs: bool = False
    arrive: Callable[[], None] | None = None
    say: Callable[[str], None] = _nothing

    @property
    def at_the_start(self) -> bool:
        """Is it just the first batch of a single epoch?"""
        return not (self.batches or self.epochs or self.state is not None or self.arrive is not None)


def drawn(batches: Any, place: DataPlace) -> Iterator[Any]:
    """Returns an iterator over the batches from the place on.

    Args:
        batches: The `batches` of a run.
        place: Where they begin.

    Raises:
        FactoryError: They cannot be iterated.
    """
    if takes_start(batches):
        made = _iterator(batches(**{START: place.steps}))
        return made if place.arrive is None else _arriving(made, place.arrive)
    return _iterator(_opened(batches)) if place.at_the_start else _from(batches, place)


def _opened(batches: Any) -> Any:
    return batches() if callable(batches) and not hasattr(batches, "__iter__") else batches


def _iterator(made: Any) -> Iterator[Any]:
    try:
        return iter(made)
    except TypeError:
        raise FactoryError(f"TrainingRun(batches=...) gave {type(made).__name__}, which is not iterable") from None


def _arriving(batches: Iterator[Any], arrive: Callable[[], None]) -> Iterator[Any]:
    """A function's own way to the place is gone when its first batch is there."""
    first = next(batches, _END)
    arrive()
    if first is not _END:
        yield first
        yield from batches


def _from(batches: Any, place: DataPlace) -> Iterator[Any]:
    """Yields the batches from the place on, epoch after epoch if wanted."""
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


def _led_to(batches: Any, place: DataPlace) -> tuple[int, Iterator[Any] | None]:
    """Returns the epoch of the place, and what is left of it; None where it has not begun."""
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
    """Returns what is left of an epoch behind its first batches, of which none is loaded."""
    if samples_indices(made):
        skipping = Skipping(made, count)
        left = _iterator(skipping.loader)
        skipping.begin()
        return left
    return islice(_iterator(made), count, None)


def _said(batches: int, epoch: int, within: int) -> str:
    at = f"{within} batches into epoch {epoch}" if within else f"at the start of epoch {epoch}"
    return f"{batches} batches lie behind the checkpoint and were passed over unloaded: the replay begins {at}"


def _told(made: Any, epoch: int) -> Any:
    """Returns what gives an epoch's batches, told which epoch it is."""
    for holder in epochs_known_by(made, data=True):
        holder.set_epoch(epoch)
    return made


def loads_state(batches: Any) -> bool:
    """Can it go on from a saved state, as a StatefulDataLoader can?"""
    return all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict", "__iter__"))
