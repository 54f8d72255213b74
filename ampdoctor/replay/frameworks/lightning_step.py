"""One optimizer step of Lightning's Trainer, taken by its own loops."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.resuming import RandomPlace, Update, beginning_at, pass_over, place_schedule

# -- the Trainer's updates, in its order, from any of them on --


@dataclass(slots=True, kw_only=True, eq=False)
class Position:
    """A Trainer at the start of its training."""

    fetcher: Callable[[Any], Any]  # makes the fetcher of an epoch's batches from the Trainer's combined loader
    set_epoch: Callable[[Any, int], None]  # of a loader's sampler
    random: RandomPlace
    length: float  # batches in an epoch; infinite if unknown
    accumulate: Callable[[int], int]  # micro-batches of an update, by epoch
    max_epochs: int  # -1: no end
    max_steps: int  # -1: no end
    steps: int = 1  # optimizer steps in an update: several if each of several optimizers steps
    epoch: int = 0  # of the start: not 0 if the Trainer itself has resumed a checkpoint
    index: int = 0  # batches of this epoch that it counts as seen
    number: int = 0  # updates that it counts

    def updates(self, loader: Any, start: int = 0) -> Iterator[Update]:
        """Yields the updates from the Trainer's combined loader; `start` counts the optimizer steps in a checkpoint."""
        epoch, index, number, skipped = self.epoch, self.index, self.number, 0
        begin = start // self.steps if start else number
        if start and math.isinf(self.length):
            epoch = index = number = 0  # the end of an epoch is unknown: all batches are drawn
        elif start:
            number = begin
            epoch, index = self._place(number)
            skipped = index
        if self._is_over(epoch, number):
            limit = f"max_epochs={self.max_epochs}" if self.max_steps < 0 else f"max_steps={self.max_steps}"
            raise FactoryError(
                f"the checkpoint stands at step {number * self.steps}, where Trainer({limit}) ends: "
                f"raise the limit to replay what comes next"
            )
        if start and epoch:
            self._pass_over(loader, epoch)
        opened = False
        while not self._is_over(epoch, number):
            fetched = self._fetched(loader, epoch, skipped, anew=opened or bool(start and epoch))
            opened, empty = True, True
            for batches, closes in self._grouped(fetched, epoch, index):
                empty, first = False, number == begin
                if number >= begin:
                    yield Update(batches=batches, epoch=epoch, index=index, number=number, closes=closes, first=first)
                index += len(batches)
                number += 1
                if 0 <= self.max_steps <= number * self.steps:
                    return
            if empty:
                return
            epoch, index, skipped = epoch + 1, 0, 0

    def _is_over(self, epoch: int, number: int) -> bool:
        return 0 <= self.max_epochs <= epoch or 0 <= self.max_steps <= number * self.steps

    def _place(self, number: int) -> tuple[int, int]:
        for epoch in itertools.count():
            per_epoch = math.ceil(self.length / self.accumulate(epoch))
            if number < per_epoch:
                return epoch, number * self.accumulate(epoch)
            number -= per_epoch
        raise AssertionError("an endless count has ended")

    def _fetched(self, loader: Any, epoch: int, skipped: int, *, anew: bool) -> Any:
        loaders = loader.flattened
        for one in loaders:
            self.set_epoch(one, epoch)

        def make() -> Any:
            return iter(self.fetcher(loader))

        with beginning_at(loaders, skipped) as left:
            fetcher = make() if anew else self.random.open(make)
        for _ in range(left):
            next(fetcher, None)
        return fetcher

    def _pass_over(self, loader: Any, epochs: int) -> None:
        self.random.restore_own()
        for epoch in range(epochs):
            for one in loader.flattened:
                self.set_epoch(one, epoch)
                pass_over(one, None if math.isinf(self.length) else int(self.length))

    def _grouped(self, fetcher: Any, epoch: int, index: int) -> Iterator[tuple[list[Any], bool]]:
        """Yields the micro-batches of each update, and whether the epoch ends with it."""
        group: list[Any] = []
        for batch, _, _ in iter(partial(next, fetcher, None), None):  # a `for` over it would start anew
            group.append(batch)
            index += 1
            closes = fetcher.done or index == self.length
            if closes or index % self.accumulate(epoch) == 0:
                yield group, closes
                group = []
            if closes:
                return


class _Given:
    """Replaces the data fetcher of the Trainer's loop with the batches of an update."""

    def __init__(self, update: Update) -> None:
        self._batches = list(update.batches)
        self._closes = update.closes
        self._index = update.index
        self.fetched = 0

    @property
    def done(self) -> bool:
        return self._closes and not self._batches

    def __iter__(self) -> _Given:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._index += 1
        return self._batches.pop(0), self._index - 1, 0


def counted(trainer: Any) -> tuple[Any, ...]:
    """Returns what a step changes beside the model, so that a walk from the step reaches it before it reaches data."""
    epoch = trainer.fit_loop.epoch_loop
    progress = (
        trainer.fit_loop.epoch_progress,
        epoch.batch_progress,
        epoch.scheduler_progress,
        epoch.automatic_optimization.optim_progress,
        epoch.manual_optimization.optim_step_progress,
    )
    schedules = [vars(config.scheduler) for config in trainer.lr_scheduler_configs]
    return *(leaf for one in progress for leaf in _leaves(one)), *schedules, *map(vars, trainer.callbacks)


def _leaves(progress: Any) -> Iterator[dict[str, Any]]:
    yield vars(progress)
    for field in dataclasses.fields(progress):
        value = getattr(progress, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value)


def take_update(
    trainer: Any,
    moved: tuple[Any, ...],  # noqa: ARG001 a walk from the step finds it here
    batch: Update,
    scaler: Any,
    autocast: Any,
) -> torch.Tensor | None:
    """Take one optimizer step by the Trainer's own loops, with all hooks of module and callbacks."""
    plugin, loop = trainer.precision_plugin, trainer.fit_loop
    if getattr(plugin, "scaler", None) is not None:
        plugin.scaler = scaler
    else:
        plugin.optimizer_step = partial(_step_after_backward, plugin)
    if type(plugin).__name__ == "Precision":
        plugin.forward_context = autocast
    _place(trainer, batch)
    epochs, epoch, given = loop.epoch_progress.current, loop.epoch_loop, _Given(batch)
    if batch.first or batch.index == 0:
        if epochs.started <= batch.epoch:
            loop.on_advance_start()
        if batch.index == 0:
            epoch.reset()
        epoch.on_run_start(given)
    with _losses(trainer) as losses:
        for _ in batch.batches:
            try:
                epoch.advance(given)
                epoch.on_advance_end(given)
            except StopIteration:  # the module's on_train_batch_start has ended the epoch
                break
            finally:
                epoch.on_iteration_done()
    if batch.closes:
        loop.on_advance_end()
        loop.on_iteration_done()
    return torch.stack(losses).sum() if losses else None


def _step_after_backward(plugin: Any, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """As the plugin's own, but runs forward and backward before the optimizer's step, as other loops do.

    Lightning passes them to the optimizer as a closure, which the optimizer calls first: code that checks the gradients
    at the start of a step would see none.
    """
    run = partial(plugin._wrap_closure, model, optimizer, closure)  # noqa: SLF001 what the plugin's own step calls
    with torch.enable_grad():
        results = [run()]
    return optimizer.step(closure=lambda: results.pop() if results else run(), **kwargs)


def _place(trainer: Any, update: Update) -> None:
    loop = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress.current
    for counter in ("ready", "started", "processed", "completed"):
        setattr(batches.current, counter, update.index)
    batches.is_last_batch = False
    epochs.processed = epochs.completed = update.epoch
    if update.index:
        epochs.ready = epochs.started = update.epoch + 1
    if not update.first or trainer.global_step >= update.number:
        return
    automatic = trainer.lightning_module.automatic_optimization
    if automatic:
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        _place_schedules(trainer, update)
    else:  # the module steps its optimizers and schedules itself
        steps = loop.epoch_loop.manual_optimization.optim_step_progress.total
    steps.ready = steps.completed = update.number * (1 if automatic else len(trainer.optimizers))
    loop.epoch_loop._batches_that_stepped = update.number  # noqa: SLF001 what loggers are told


def _place_schedules(trainer: Any, update: Update) -> None:
    """Advance the schedules to the update: Lightning steps them after a skipped step too."""
    for config in trainer.lr_scheduler_configs:
        taken = (update.number if config.interval == "step" else update.epoch) // config.frequency
        if not config.reduce_on_plateau and getattr(config.scheduler, "last_epoch", taken) < taken:
            place_schedule(config.scheduler, taken)


@contextmanager
def _losses(trainer: Any) -> Iterator[list[torch.Tensor]]:
    epoch = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization
    optimization = epoch.automatic_optimization if automatic else epoch.manual_optimization
    found: list[torch.Tensor] = []
    run = optimization.run

    def collecting(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        loss = output.get("loss")
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            found.append(loss.detach().reshape(()))
        return output

    optimization.run = collecting
    try:
        yield found
    finally:
        del optimization.run
