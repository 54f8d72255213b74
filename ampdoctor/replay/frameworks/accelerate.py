"""The parts of a run whose step is the loop of Accelerate's documentation, with the results of `prepare`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.resuming import (
    RandomPlace,
    Update,
    length_of,
    pass_over,
    place_schedule,
    without_first,
)
from ampdoctor.replay.snapshot import arguments_of, format_of_weights

if TYPE_CHECKING:
    from collections.abc import Callable


_REFUSED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


def accelerate_parts(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    dataloader: Any,
    *,
    scheduler: Any,
    loss: Callable[[Any, Any], Any] | None,
    max_grad_norm: float | None,
) -> dict[str, Any]:
    """Returns the arguments of `TrainingRun` for objects that an Accelerator has prepared."""
    _refuse(accelerator, optimizer)
    precision, autocast = _precision(accelerator, model)
    wanted = accelerator.mixed_precision
    notes: list[str] = []
    if wanted in ("fp16", "bf16") and not accelerator.native_amp:
        notes.append(f"Accelerator(mixed_precision={wanted!r}) computes in {precision} on a CPU, without a scaler")
    random = RandomPlace.of([dataloader])
    begun = getattr(dataloader, "iteration", 0)
    return {
        "model": model,
        "batches": partial(updates, dataloader, accelerator.gradient_state, random, begun),
        "loss": _loss if loss is None else loss,
        "optimizer": optimizer.optimizer,
        "precision": precision,
        "autocast": autocast,
        "scaler": arguments_of(accelerator.scaler),
        "max_grad_norm": max_grad_norm,
        "step": partial(take_update, accelerator, optimizer, scheduler),
        "notes": tuple(notes),
    }


def _refuse(accelerator: Any, optimizer: Any) -> None:
    kind = accelerator.distributed_type.value
    what = kind if kind in _REFUSED else None
    if accelerator.num_processes > 1:
        what = f"{accelerator.num_processes} processes"
    elif accelerator.mixed_precision == "fp8":
        what = "FP8"
    if what is not None:
        raise FactoryError(
            f"the Accelerator trains with {what}, which is not replayed: one process, one device, no FP8"
        )
    if type(optimizer).__name__ != "AcceleratedOptimizer":
        raise FactoryError(
            f"the optimizer is {type(optimizer).__name__}, which Accelerator.prepare has not prepared: "
            f"hand over what prepare returned"
        )


def _precision(accelerator: Any, model: Any) -> tuple[str, bool]:
    if accelerator.native_amp:
        return accelerator.mixed_precision, True
    weights = format_of_weights(model)
    return weights, weights == "fp32"


def _loss(model: Any, batch: Any) -> torch.Tensor:
    made = (
        model(**batch)
        if isinstance(batch, Mapping)
        else model(*batch)
        if isinstance(batch, tuple | list)
        else model(batch)
    )
    loss = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", made)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise FactoryError(
            "the model does not return its loss: say what it is, with --loss or from_accelerate(loss=...)"
        )
    return loss


def updates(loader: Any, state: Any, random: RandomPlace, begun: int, start: int = 0) -> Iterator[Update]:
    """Yields the updates, epoch after epoch, in the order of a loop over the prepared loader."""
    random.restore_own()
    micro, length = state.num_steps, length_of(loader)
    closing = state.sync_with_dataloader
    number, epoch, skipped = 0, begun, 0
    if length is not None and length > 0:
        taken = start * micro
        per_epoch = math.ceil(length / micro) * micro if closing else length
        number, epoch, skipped = start, begun + taken // per_epoch, taken % per_epoch
        for gone in range(begun, epoch):
            _set_epoch(loader, gone)
            pass_over(loader, None)
    group: list[Any] = []
    while True:
        _set_epoch(loader, epoch)
        empty = True
        for batch, last in _ahead(without_first(loader, skipped)):
            empty = False
            group.append(batch)
            if len(group) == micro or (last and closing):
                if number >= start:
                    yield Update(batches=group, number=number, closes=last, first=number == start)
                group, number = [], number + 1
        if empty:
            return
        epoch, skipped = epoch + 1, 0


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


def _ahead(batches: Any) -> Iterator[tuple[Any, bool]]:
    waiting: list[Any] = []
    for batch in batches:
        if waiting:
            yield waiting.pop(), False
        waiting.append(batch)
    if waiting:
        yield waiting.pop(), True


class _Loader:
    """Replaces the loader, which is drawn elsewhere: tells Accelerate whether the loop is at its last batch."""

    def __init__(self) -> None:
        self.end_of_dataloader = False
        self.remainder = -1


def take_update(
    accelerator: Any, optimizer: Any, scheduler: Any, *, run: Any, model: Any, batch: Update, scaler: Any, autocast: Any
) -> torch.Tensor:
    """Take one optimizer step as in Accelerate's documentation; returns the mean of the losses."""
    if accelerator.scaler is not None:
        accelerator.scaler = optimizer.scaler = scaler
    around = torch.enable_grad if accelerator.native_amp else autocast
    if batch.first and batch.number and scheduler is not None:
        _place(scheduler, batch.number)
    losses: list[torch.Tensor] = []
    state, place = accelerator.gradient_state, _Loader()
    accelerator.step = 0
    optimizer.optimizer.zero_grad(set_to_none=True)
    kept = state._dataloader_references_ref  # noqa: SLF001 the very list, so that nothing seems to have moved
    state.dataloader_references = [None, place]
    try:
        for index, inputs in enumerate(batch.batches):
            place.end_of_dataloader = batch.closes and index == len(batch.batches) - 1
            with accelerator.accumulate(model):
                with around():
                    loss = run.loss(model, inputs)
                losses.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients and run.max_grad_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), run.max_grad_norm)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
    finally:
        state._dataloader_references_ref = kept  # noqa: SLF001
    return torch.stack(losses).mean()


def _place(scheduler: Any, number: int) -> None:
    inner = getattr(scheduler, "scheduler", scheduler)
    if getattr(inner, "last_epoch", number) < number:
        place_schedule(inner, number)


# -- Accelerate's state of the process: device, precision, position in an accumulation --

_CLASSES = ("PartialState", "AcceleratorState", "GradientState")


@contextmanager
def own_state() -> Iterator[None]:
    """Inside, it is empty; at exit it is restored."""
    kept = [(shared, dict(shared)) for shared in shared_states()]
    for shared, _ in kept:
        shared.clear()
    try:
        yield
    finally:
        for shared in shared_states():
            shared.clear()
        for shared, before in kept:
            shared.update(before)


def shared_states() -> list[dict[str, Any]]:
    """Returns the dictionaries of that state; [] if Accelerate is not imported."""
    module = sys.modules.get("accelerate.state")
    found = (getattr(module, name, None) for name in _CLASSES)
    return [cls._shared_state for cls in found if cls is not None]
