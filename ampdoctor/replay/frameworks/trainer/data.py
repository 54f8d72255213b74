"""What the Hugging Face Trainer's updates take, in its order, from any of its updates on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampdoctor.replay.frameworks.schedules import place_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update of the Trainer takes.

    Attributes:
        batches: The micro-batches.
        items: Gives the number of items (tokens) in all of them, or None where the Trainer does not count them. A
            function, because the number is no data that a cast may round.
        number: Updates that were taken before it.
        epoch: Epochs that were gone through before it.
        first: It is the first of a replay.
        closes: The optimizer steps after it: not where an epoch of unknown length ends within an accumulation.
    """

    batches: list[Any]
    items: Callable[[], Any]
    number: int
    epoch: float
    first: bool
    closes: bool

    def place(self, trainer: Any) -> None:
        """Let the Trainer, and its schedule, be where this update begins."""
        trainer.state.global_step, trainer.state.epoch = self.number, self.epoch
        trainer.current_gradient_accumulation_steps = len(self.batches)
        scheduler = trainer.lr_scheduler
        if self.first and getattr(scheduler, "last_epoch", self.number) < self.number:
            place_schedule(scheduler, self.number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """A Trainer at the start of its training.

    Attributes:
        trainer: The Trainer.
        asks: What its loop passes to `get_batch_samples` beside iterator and count.
        begun: Updates that it had taken: those of the checkpoint from which it has resumed itself.
        resumed: That checkpoint's folder; None if it has not.
    """

    trainer: Any
    asks: tuple[Any, ...]
    begun: int
    resumed: str | None


def updates(loader: Any, position: Position, start: int = 0) -> Iterator[Update]:
    """Yields the updates as the Trainer's loop makes them, by its own rules for a training that goes on.

    Args:
        loader: The loader that Accelerate has prepared.
        position: The Trainer.
        start: Updates that a checkpoint holds; 0: those that the Trainer itself has resumed.
    """
    trainer = position.trainer
    args, state = trainer.args, trainer.state
    resumed = None if start else position.resumed
    number = begin = start or position.begun
    micro = args.gradient_accumulation_steps
    length = _length(loader)
    in_epoch = state.max_steps * micro if length is None else length
    per_epoch = max(math.ceil(in_epoch / micro), 1)
    skipped = 0 if args.ignore_data_skip else begin % per_epoch
    for epoch in range(begin // per_epoch, state.num_train_epochs):
        if number > begin:
            trainer.control = trainer.callback_handler.on_epoch_begin(args, state, trainer.control)
        elif resumed is not None and not skipped:
            _resume_random_state(trainer, resumed)
        source = _skipping(loader, skipped * micro)
        _set_epoch(source, epoch)
        drawn = iter(source)
        before = number
        for update in range(skipped, per_epoch):
            count = micro if update != per_epoch - 1 else in_epoch % micro or micro
            batches, items = trainer.get_batch_samples(drawn, count, *position.asks)
            if not batches:
                break
            if resumed is not None and number == begin and skipped:
                _resume_random_state(trainer, resumed)
            taken = update * micro + len(batches)
            closes = taken % micro == 0 or taken == in_epoch
            yield Update(
                batches=batches,
                items=_same(items),
                number=number,
                epoch=epoch + update * micro / in_epoch,
                first=number == begin,
                closes=closes,
            )
            number += closes
            if number >= state.max_steps:
                return
        if number == before:
            return  # no sample in an epoch: the Trainer stops too
        skipped = 0


def _same(value: Any) -> Callable[[], Any]:
    return lambda: value


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # of an iterable data set
        return None


def _skipping(loader: Any, batches: int) -> Any:
    if not batches:
        return loader
    from accelerate import skip_first_batches

    return skip_first_batches(loader, batches)


def _set_epoch(loader: Any, epoch: int) -> None:
    """As the Trainer does: of the loader, and of a sampler that Accelerate's wrapper hides."""
    hidden = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for one in (loader, hidden):
        go_to = getattr(one, "set_epoch", None)
        if go_to is not None:
            go_to(epoch)


def _resume_random_state(trainer: Any, folder: str) -> None:
    trainer._load_rng_state(folder)  # noqa: SLF001 what its own loop calls at this moment
