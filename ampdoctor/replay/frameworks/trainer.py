"""The parts of a run with the Hugging Face Trainer's own step and batches."""

from __future__ import annotations

import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.resuming import Reached, Update, length_of, place_schedule, without_first
from ampdoctor.replay.snapshot import arguments_of, format_of_weights

# -- the Trainer's updates, in its order, from any of them on --


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """A Trainer at the start of its training."""

    trainer: Any
    asks: tuple[Any, ...]  # its loop's arguments for `get_batch_samples` after iterator and count
    begun: int  # updates before the start: those of the checkpoint that the Trainer itself has resumed
    resumed: str | None  # that checkpoint's folder


def updates(loader: Any, position: Position, start: int = 0) -> Iterator[Update]:
    """Yields the updates as the Trainer's loop makes them, by its own rules for a resumed training."""
    trainer = position.trainer
    args, state = trainer.args, trainer.state
    resumed = None if start else position.resumed
    number = begin = start or position.begun
    micro = args.gradient_accumulation_steps
    length = length_of(loader)
    in_epoch = state.max_steps * micro if length is None else length
    per_epoch = max(math.ceil(in_epoch / micro), 1)
    skipped = 0 if args.ignore_data_skip else begin % per_epoch
    for epoch in range(begin // per_epoch, state.num_train_epochs):
        if number > begin:
            trainer.control = trainer.callback_handler.on_epoch_begin(args, state, trainer.control)
        elif resumed is not None and not skipped:
            _resume_random_state(trainer, resumed)
        source = without_first(loader, skipped * micro)
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


def _set_epoch(loader: Any, epoch: int) -> None:
    hidden = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)  # inside Accelerate's wrapper
    for one in (loader, hidden):
        go_to = getattr(one, "set_epoch", None)
        if go_to is not None:
            go_to(epoch)


def _resume_random_state(trainer: Any, folder: str) -> None:
    trainer._load_rng_state(folder)  # noqa: SLF001 what its own loop calls at this moment


_SCREEN = {"ProgressCallback", "PrinterCallback", "NotebookProgressCallback"}
"""Callbacks that display a training's progress."""


def trainer_parts(trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `TrainingRun` for a Trainer, which stays at the start of its training."""
    _refuse(trainer)
    notes = _without_reports(trainer)
    asks = _enter(trainer, arguments)
    _refuse(trainer)  # again, as train() may make Accelerate's plugins
    wrapped = trainer.optimizer
    position = Position(
        trainer=trainer, asks=asks, begun=trainer.state.global_step, resumed=_resumed_from(trainer, arguments)
    )
    precision, autocast = _precision(trainer)
    return {
        "model": trainer.model,
        "batches": functools.partial(updates, trainer.callback_handler.train_dataloader, position),
        "optimizer": getattr(wrapped, "optimizer", wrapped),
        "precision": precision,
        "autocast": autocast,
        "scaler": arguments_of(trainer.accelerator.scaler),
        "step": functools.partial(take_update, trainer),
        "notes": notes,
    }


def _refuse(trainer: Any) -> None:
    args = trainer.args
    several = args.world_size if args.world_size > 1 else args.n_gpu
    what = None
    if getattr(trainer, "is_deepspeed_enabled", False):
        what = "DeepSpeed's engine"
    elif getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_fsdp_xla_enabled", False):
        what = "FSDP"
    elif several > 1:
        what = f"{several} devices"
    elif trainer.accelerator.mixed_precision == "fp8":
        what = "FP8"
    if what is not None:
        raise FactoryError(f"the Trainer trains with {what}, which is not replayed: one process, one device, no FP8")
    if not hasattr(trainer, "get_batch_samples"):
        version = sys.modules["transformers"].__version__
        raise FactoryError(f"the Trainer of transformers {version} is not replayed: it takes 4.46 or newer")


def _without_reports(trainer: Any) -> tuple[str, ...]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    handler = trainer.callback_handler
    left = sorted(type(callback).__name__ for callback in handler.callbacks if isinstance(callback, trackers))
    handler.callbacks = [
        callback
        for callback in handler.callbacks
        if not isinstance(callback, trackers) and type(callback).__name__ not in _SCREEN
    ]
    return (f"nothing is reported to a tracker: {', '.join(left)} left out of the Trainer's callbacks",) if left else ()


def _enter(trainer: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Call `train()` up to its first update; returns its arguments for `get_batch_samples` after iterator and count."""
    asks: list[tuple[Any, ...]] = []

    def stop(_iterator: Any, _count: int, *rest: Any) -> None:
        asks.append(rest)
        raise Reached

    trainer.get_batch_samples = stop
    try:
        trainer.train(**arguments)
    except Reached as error:
        traceback.clear_frames(error.__traceback__)  # its frames hold an iterator that was not started
    finally:
        del trainer.get_batch_samples
    if not asks:
        raise FactoryError("the Trainer's train() ended before its first update: there is nothing to replay")
    return asks[0]


def _resumed_from(trainer: Any, arguments: dict[str, Any]) -> str | None:
    folder = arguments.get("resume_from_checkpoint")
    if folder is True:
        from transformers.trainer_utils import get_last_checkpoint

        folder = get_last_checkpoint(trainer.args.output_dir)  # type: ignore[no-untyped-call]
    return str(folder) if folder else None


def _precision(trainer: Any) -> tuple[str, bool]:
    if trainer.accelerator.native_amp:
        return trainer.accelerator.mixed_precision, True
    weights = format_of_weights(trainer.model)
    if weights != "fp32":
        return weights, False
    return "tf32" if trainer.args.tf32 else "fp32", True


def take_update(trainer: Any, batch: Update, scaler: Any, autocast: Any) -> torch.Tensor:
    """Take one update as the Trainer's loop does: `training_step` for each micro-batch, then clip and step."""
    accelerator, model = trainer.accelerator, trainer.model_wrapped
    if accelerator.scaler is not None:
        accelerator.scaler = trainer.optimizer.scaler = scaler
    if not accelerator.native_amp:
        trainer.autocast_smart_context_manager = lambda cache_enabled=True: autocast()  # noqa: ARG005 the Trainer's own
    _place(trainer, batch)
    _tell(trainer, "on_step_begin")
    total: torch.Tensor | None = None
    for index, inputs in enumerate(batch.batches):
        last = index == len(batch.batches) - 1
        accelerator.gradient_state._set_sync_gradients(last and batch.closes)  # noqa: SLF001 as the Trainer does
        with nullcontext() if last else accelerator.no_sync(model=model):
            loss = trainer.training_step(model, inputs, batch.items())
        total = loss if total is None else total + loss
        if not (last and batch.closes):
            _tell(trainer, "on_substep_end")
    if batch.closes:
        _step(trainer, model)
    assert total is not None  # noqa: S101 for the type checker: an update has a batch
    return total


def _place(trainer: Any, update: Update) -> None:
    trainer.state.global_step, trainer.state.epoch = update.number, update.epoch
    trainer.current_gradient_accumulation_steps = len(update.batches)
    scheduler = trainer.lr_scheduler
    if update.first and getattr(scheduler, "last_epoch", update.number) < update.number:
        place_schedule(scheduler, update.number)


def _step(trainer: Any, model: Any) -> None:
    accelerator, args = trainer.accelerator, trainer.args
    norm = None
    if args.max_grad_norm is not None and args.max_grad_norm > 0:
        own = getattr(trainer, "_clip_grad_norm", None)  # since transformers 5
        norm = own(model) if own else accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    if hasattr(trainer, "_get_grad_norm"):
        trainer._get_grad_norm(model, grad_norm=norm)  # noqa: SLF001 unscales where nothing is clipped
    _tell(trainer, "on_pre_optimizer_step")
    trainer.optimizer.step()
    _tell(trainer, "on_optimizer_step")
    if not accelerator.optimizer_step_was_skipped and not _waits_for_metrics(trainer.lr_scheduler):
        trainer.lr_scheduler.step()
    model.zero_grad()
    trainer.state.global_step += 1
    _tell(trainer, "on_step_end")


def _waits_for_metrics(scheduler: Any) -> bool:
    """Does the Trainer step this scheduler after an evaluation?"""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def _tell(trainer: Any, event: str) -> None:
    handler = trainer.callback_handler
    call = getattr(handler, event, None)
    if call is not None:  # older releases have fewer events
        trainer.control = call(trainer.args, trainer.state, trainer.control)
