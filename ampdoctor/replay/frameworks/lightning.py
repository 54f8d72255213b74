"""The parts of a run whose step is that of Lightning's Trainer, and the devices that the Trainer sees."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.frameworks.resuming import (
    Original,
    RandomPlace,
    Reached,
    Update,
    beginning_at,
    pass_over,
    place_schedule,
    standing_in,
)
from ampdoctor.replay.snapshot import arguments_of

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""The names under which Lightning is installed: two copies of the same code."""

_LEFT_OUT = ("Checkpoint", "EarlyStopping", "ProgressBar", "ModelSummary", "Timer")
"""Callbacks that write, display or end a training, and change nothing in a step."""


class _Launcher:
    """Replaces a strategy's launcher: `fit` ends quietly at its first epoch, without teardown."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002 - the seam's signature
        try:
            return function(*args, **kwargs)
        except Reached:
            return None


def lightning_parts(module: Any, trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `TrainingRun` for a module and a Trainer, which stay attached to each other."""
    notes: list[str] = []
    if trainer is None:
        trainer = _package_of(module, "LightningModule").Trainer(
            precision="16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        notes.append("no Trainer was given: the run is that of Trainer(precision='16-mixed')")
    package = _package_of(trainer, "Trainer")
    _refuse(trainer)
    notes += _without_reports(trainer, package)
    random = _attach(trainer, module, arguments)
    module = trainer.lightning_module
    if "Iter" in type(_fetcher(trainer)).__name__:
        raise FactoryError("training_step takes a dataloader_iter and draws its batches itself, which is not replayed")
    notes += _without_validation(trainer)
    precision, autocast = _precision(trainer)
    optimizers = trainer.optimizers
    position = _position(trainer, package, random, resumed=arguments.get("ckpt_path") is not None)
    if position.steps > 1:
        notes.append(
            f"a checkpoint's step counts each of the {position.steps} optimizers' steps: "
            f"the data begins where each batch has stepped all of them"
        )
    return {
        "model": module,
        "batches": partial(position.updates, trainer.fit_loop._combined_loader),  # noqa: SLF001 what fit has set up
        "optimizer": optimizers[0] if len(optimizers) == 1 else {f"optimizer{i}": o for i, o in enumerate(optimizers)},
        "precision": precision,
        "autocast": autocast,
        "scaler": arguments_of(getattr(trainer.precision_plugin, "scaler", None)),
        "step": partial(take_update, trainer, counted(trainer)),
        "notes": tuple(notes),
    }


def _package_of(made: Any, base: str) -> Any:
    for package in PACKAGES:
        found = sys.modules.get(package)
        if isinstance(getattr(found, base, None), type) and isinstance(made, getattr(found, base)):
            return found
    raise FactoryError(f"TrainingRun.from_lightning takes a {base} of Lightning's, not {type(made).__name__}")


def _refuse(trainer: Any) -> None:
    strategy = type(trainer.strategy).__name__
    if trainer.world_size > 1:
        what = f"{trainer.world_size} processes"
    elif any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel", "XLA", "DDP")):
        what = strategy
    else:
        return
    raise FactoryError(
        f"the Trainer trains with {what}, which is not replayed: give it devices=1 and leave the strategy to it"
    )


def _without_reports(trainer: Any, package: Any) -> Iterator[str]:
    left = [name for callback in trainer.callbacks if (name := _left_out(callback)) is not None]
    connector = trainer._callback_connector  # noqa: SLF001 there is no public place between a module's callbacks and fit
    attach = connector._attach_model_callbacks  # noqa: SLF001

    def attach_model_callbacks() -> None:
        attach()
        trainer.callbacks = [callback for callback in trainer.callbacks if _left_out(callback) is None]

    connector._attach_model_callbacks = attach_model_callbacks  # noqa: SLF001
    trainer.callbacks = [callback for callback in trainer.callbacks if _left_out(callback) is None]
    left += [type(logger).__name__ for logger in trainer.loggers]
    if trainer.loggers:
        trainer.loggers = [sys.modules[f"{package.__name__}.loggers.logger"].DummyLogger()]
    trainer.profiler = sys.modules[f"{package.__name__}.profilers"].PassThroughProfiler()
    shown = sorted({name for name in left if name not in ("ModelSummary", "TQDMProgressBar", "RichProgressBar")})
    if shown:
        yield f"replayed without {', '.join(shown)} of the Trainer"


def _left_out(callback: Any) -> str | None:
    kinds = {cls.__name__ for cls in type(callback).__mro__ if "lightning" in cls.__module__.partition(".")[0]}
    return type(callback).__name__ if kinds & set(_LEFT_OUT) else None


def _without_validation(trainer: Any) -> Iterator[str]:
    loop = trainer.fit_loop
    if trainer.enable_validation:
        trainer.limit_val_batches = 0
        yield "validation is not replayed"
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            config.strict = False
            yield "a schedule that waits for a validation's metric stands still"
    if trainer.reload_dataloaders_every_n_epochs:
        trainer.reload_dataloaders_every_n_epochs = 0
        yield "the loaders are not made anew (reload_dataloaders_every_n_epochs)"
    loop.epoch_loop.val_loop.restarting = False


def _attach(trainer: Any, module: Any, arguments: dict[str, Any]) -> RandomPlace:
    """Call `fit()` up to its first epoch's loop; returns the generators' states when its iterator was made."""
    loop = trainer.fit_loop
    places: list[RandomPlace] = []
    reached: list[bool] = []
    load_states = loop._load_combined_loader_states  # noqa: SLF001 called just before the iterator is made

    def take_down() -> None:
        places.append(RandomPlace.of(loop._combined_loader.flattened))  # noqa: SLF001
        load_states()

    def stop() -> None:
        loop.epoch_loop.reset()  # finds the position in the epoch of a checkpoint that fit() has resumed
        loop.epoch_loop.on_iteration_done()
        reached.append(True)
        raise Reached

    trainer.num_sanity_val_steps = 0
    with _changed(loop, "_load_combined_loader_states", take_down), _changed(loop, "advance", stop):
        launcher, trainer.strategy._launcher = trainer.strategy._launcher, _Launcher()  # noqa: SLF001
        try:
            trainer.fit(module, **arguments)
        finally:
            trainer.strategy._launcher = launcher  # noqa: SLF001
    if not reached or not places:
        raise FactoryError("the Trainer's fit() ended before its first batch: there is nothing to replay")
    trainer._signal_connector.teardown()  # noqa: SLF001 the process keeps its own handlers
    if loop._data_fetcher is not None:  # noqa: SLF001
        loop._data_fetcher.teardown()  # noqa: SLF001 its workers: a replay makes its own iterators
        loop._data_fetcher = None  # noqa: SLF001
    return places[0]


@contextmanager
def _changed(of: Any, name: str, value: Any) -> Iterator[None]:
    setattr(of, name, value)
    try:
        yield
    finally:
        delattr(of, name)


def _fetcher(trainer: Any) -> Any:
    module = sys.modules[type(trainer.fit_loop).__module__]
    return module._select_data_fetcher(trainer, module.RunningStage.TRAINING)  # noqa: SLF001 what fit itself calls


def _position(trainer: Any, package: Any, random: RandomPlace, *, resumed: bool) -> Position:
    loop, module = trainer.fit_loop, sys.modules[type(trainer.fit_loop).__module__]
    kind = type(_fetcher(trainer))
    scheduled = [c for c in trainer.callbacks if isinstance(c, package.callbacks.GradientAccumulationScheduler)]
    constant = trainer.accumulate_grad_batches

    def fetcher(loader: Any) -> Any:
        made = kind()
        made.setup(loader)
        return made

    manual = not trainer.lightning_module.automatic_optimization
    steps = max(len(trainer.optimizers), 1) if manual else 1
    return Position(
        fetcher=fetcher,
        set_epoch=module._set_sampler_epoch,  # noqa: SLF001
        random=random,
        length=loop.max_batches,
        accumulate=scheduled[0].get_accumulate_grad_batches if scheduled else lambda _: constant,
        max_epochs=-1 if loop.max_epochs is None else loop.max_epochs,
        max_steps=-1 if loop.max_steps is None else loop.max_steps,
        steps=steps,
        epoch=trainer.current_epoch if resumed else 0,
        index=loop.epoch_loop.batch_progress.current.ready,
        number=trainer.global_step // steps if resumed else 0,
    )


def _precision(trainer: Any) -> tuple[str, bool]:
    plugin = trainer.precision_plugin
    kind = type(plugin).__name__
    found = {"16-mixed": "fp16", "bf16-mixed": "bf16", "16-true": "fp16", "bf16-true": "bf16"}.get(plugin.precision)
    if kind == "MixedPrecision" and found is not None:
        return found, True
    if kind == "HalfPrecision" and found is not None:
        return found, False
    if kind == "Precision":
        return "fp32", True
    raise FactoryError(f"the Trainer computes with the plugin {kind} ({plugin.precision}), which is not replayed")


# -- one device on a machine without a GPU --
#
# Lightning looks for devices in the Trainer's constructor, and on a CPU replaces fp16 by bf16. While a replay follows
# CUDA's policy, a new Trainer gets an accelerator with CUDA's name and type: fp16 stays fp16, with a GradScaler, and
# tensors stay where they are. Under the CPU's own policy a Trainer that wants a GPU gets the CPU.

_CONNECTOR = "trainer.connectors.accelerator_connector"
_GPUS = ("auto", "gpu", "cuda")


@contextmanager
def one_device(note: Callable[[str], None], *, pretended: bool) -> Iterator[None]:
    """Inside, a new Trainer trains on one device: a CUDA device that need not exist if `pretended`, else the CPU."""

    def stand_in(package: str, original: Original) -> Original:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807 - replaces a method of that name
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            _settle(bound.arguments, sys.modules[package], note, pretended=pretended)
            original(*bound.args, **bound.kwargs)

        return __init__

    with ExitStack() as stack:
        for package in PACKAGES:
            module = f"{package}.{_CONNECTOR}"
            change = functools.partial(stand_in, package)
            stack.enter_context(standing_in(module, "_AcceleratorConnector", "__init__", change))
        yield


def _settle(asked: dict[str, Any], package: Any, note: Callable[[str], None], *, pretended: bool) -> None:
    """Change a Trainer's arguments for one process on this machine; raises FactoryError if that is impossible."""
    strategy = asked["strategy"]
    named = strategy if isinstance(strategy, str) else type(strategy).__name__
    accelerator = asked["accelerator"]
    if any(what in named.lower() for what in ("fsdp", "deepspeed", "xla", "parallel")) and "ddp" not in named.lower():
        raise FactoryError(f"Trainer(strategy={named!r}) is not replayed: give it devices=1 and no strategy")
    if accelerator in ("tpu", "mps", "hpu"):
        raise FactoryError(f"Trainer(accelerator={accelerator!r}) is not replayed: CUDA's casts or the CPU's are")
    count = _count(asked["devices"]) * asked["num_nodes"]
    if count > 1:
        raise FactoryError(
            f"the Trainer trains on {count} devices, each with its own share of the batches, "
            f"and a replay is one process: give it devices=1"
        )
    if "ddp" in named.lower():
        asked["strategy"] = "auto"
        note(f"Trainer(strategy={named!r}) with one device is replayed without it: it changes no number")
    wants_gpu = accelerator in _GPUS or isinstance(accelerator, package.accelerators.CUDAAccelerator)
    if wants_gpu:
        asked["accelerator"], asked["devices"] = _accelerator_class(package)() if pretended else "cpu", 1


def _count(devices: Any) -> int:
    """Returns the number of devices that a Trainer's argument means; "auto" and -1 count as 1."""
    if isinstance(devices, str):
        listed = [part for part in devices.split(",") if part.strip()]
        devices = listed if "," in devices else int(devices) if devices.strip().isdigit() else 1
    if isinstance(devices, list | tuple):
        return len(devices)
    return max(devices, 1) if isinstance(devices, int) else 1


@functools.cache
def _accelerator_class(package: Any) -> Any:
    methods = {
        **dict.fromkeys(("setup_device", "setup", "teardown"), lambda *_, **__: None),
        "get_device_stats": lambda *_: {},
        "parse_devices": staticmethod(lambda *_: [0]),
        "get_parallel_devices": staticmethod(lambda devices: [torch.device("cuda", index) for index in devices]),
        "auto_device_count": staticmethod(lambda: 1),
        "is_available": staticmethod(lambda: True),
        "register_accelerators": classmethod(lambda *_: None),
    }
    return type("CUDAAccelerator", (package.accelerators.CUDAAccelerator,), methods)


# -- one optimizer step of the Trainer, taken by its own loops --

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
