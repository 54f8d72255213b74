"""`TrainingRun`: the user's description of the parts of a training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import FactoryError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.hooks.program import EarlierStep


# -- functions of batches with a start; no torch here, because a training script may call this before its import --

START = "start"
"""The parameter by which a function of batches gets its start."""


def takes_start(batches: Any) -> bool:
    """Is it a function that gets the number of optimizer steps before the run?"""
    if not callable(batches) or hasattr(batches, "__iter__"):
        return False
    try:
        found = inspect.signature(batches).parameters.get(START)
    except (TypeError, ValueError):  # a builtin, or a C callable
        return False
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
STEP_ARGUMENTS = ("model", "batch", "optimizer", "scaler", "autocast", "run", "step")
"""Names of the arguments that a user's own step may have."""


@dataclass(kw_only=True, slots=True, eq=False)
class TrainingRun:
    """The parts of a training run that `ampdoctor` replays.

    Args:
        model: The model, in the mode (train or eval) in which the loop runs it.
        batches: Re-iterable, or a callable that returns an iterator. A one-shot generator is refused, because a replay
            draws the same batches again. A callable with a parameter `start` gets the number of optimizer steps before
            the checkpoint (0 without one), and starts with the batch of the next step.
        loss: `loss(model, batch) -> Tensor`: forward and loss as in the user's loop; called under autocast. Not needed
            with `step`.
        optimizer: An optimizer, a mapping of names to optimizers, or a callable `model -> either`. Without one, forward
            and backward are replayed and nothing is updated.
        scheduler: Object with `step()`, or a callable `optimizer -> scheduler`; stepped after each optimizer step.
        after_step: `after_step(run, step)`, called after each step (for an EMA, for example).
        precision: "fp32", "tf32", "bf16" or "fp16".
        autocast: True: `torch.autocast` with that dtype; False: the model's own dtypes (pure half).
        master_weights: True: half model, fp32 master weights in the optimizer.
        scaler: GradScaler arguments, a GradScaler, a callable that returns one, or None (a disabled one).
        max_grad_norm: Clip gradients to this total norm, after unscaling.
        accumulation_steps: Micro-batches in one optimizer step.
        divide_loss: Divide each micro-batch's loss by `accumulation_steps`.
        step: The user's own step, which returns the loss. It is called with those of these arguments that its signature
            names: `model`, `batch`, `optimizer`, `scaler`, `autocast`, `run`, `step`. `autocast()` returns the context
            manager.
        move: `move(batch, device) -> batch`, if the default move of nested tensors does not work.
        load: `load(run, state)`, if loading a checkpoint needs more than `load_state_dict`.
        notes: Sentences for the report on how the run was made.
        finite_again: For a recorded step that was non-finite in its loop and finite in a second run there: a sentence
            that says so.
        counters: `counters(numbers) -> those that were set`, if a checkpoint's numbers belong into the loop's variables
            of the same names.
        first_step: The training's number of the run's step 0; None: the checkpoint's number, or 0.
        lead_up: For a recorded step with weights from a checkpoint: `lead_up(loaded, say)` yields the recorded updates
            between the two, each as a name and a function of model and scaler.

    Raises:
        FactoryError: A part is missing or has the wrong type; the message says which.
    """

    model: nn.Module
    batches: Iterable[Any] | Callable[..., Iterator[Any]]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Any = None
    scheduler: Any = None
    after_step: Callable[[TrainingRun, int], None] | None = None
    precision: str = "fp16"
    autocast: bool = True
    master_weights: bool = False
    scaler: Any = None
    max_grad_norm: float | None = None
    accumulation_steps: int = 1
    divide_loss: bool = True
    step: Callable[..., Any] | None = None
    move: Callable[[Any, Any], Any] | None = None
    load: Callable[[TrainingRun, Any], None] | None = None
    notes: tuple[str, ...] = ()
    finite_again: str | None = None
    counters: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None
    first_step: int | None = None
    lead_up: Callable[[Collection[str], Callable[[str], None]], Iterator[EarlierStep]] | None = None

    @classmethod
    def from_trainer(cls, trainer: Any, **arguments: Any) -> TrainingRun:
        """Returns the run of a Hugging Face Trainer, with its own step, batches, precision and scaler.

        It calls `train()` for the setup and stops it at the first update, so do not call it yourself.

        Args:
            trainer: A `transformers.Trainer` or a subclass (TRL's), with any model (PEFT's).
            arguments: Arguments of `train()`, for example `resume_from_checkpoint="out/checkpoint-400"`.

        Raises:
            FactoryError: The training uses DeepSpeed, FSDP, FP8 or several devices, which is not replayed.
        """
        from ampdoctor.replay.frameworks.trainer import trainer_parts

        return cls(**trainer_parts(trainer, arguments))

    @classmethod
    def from_lightning(cls, module: Any, trainer: Any = None, data: Any = None, **arguments: Any) -> TrainingRun:
        """Returns the run of Lightning's Trainer, with its own step, batches, precision and scaler.

        It calls `fit()` for the setup and stops it before the first batch, so do not call it yourself.

        Args:
            module: A `LightningModule`.
            trainer: A `Trainer`; None: a Trainer for fp16 with default settings.
            data: A `LightningDataModule` or the training batches; None: the module's own loader.
            arguments: Other arguments of `Trainer.fit`, for example `ckpt_path="last.ckpt"`.

        Raises:
            FactoryError: The training uses several devices, FSDP, DeepSpeed, or a format that is not replayed.
        """
        from ampdoctor.replay.frameworks.lightning import lightning_parts

        if data is not None:
            arguments["train_dataloaders"] = data  # fit() accepts a DataModule here too
        return cls(**lightning_parts(module, trainer, arguments))

    @classmethod
    def from_accelerate(
        cls,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        dataloader: Any,
        scheduler: Any = None,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        max_grad_norm: float | None = None,
    ) -> TrainingRun:
        """Returns the run of the loop in Accelerate's documentation, with the results of `Accelerator.prepare`.

        The loop: `accumulate`, forward and loss, `backward`, clip when gradients are synchronised, optimizer,
        scheduler.

        Args:
            accelerator: The `Accelerator`, with its precision, scaler and accumulation.
            model: The prepared model.
            optimizer: The prepared optimizer.
            dataloader: The prepared training loader.
            scheduler: The prepared scheduler.
            loss: As in `TrainingRun`; None: the loss that the model returns, as models of transformers do.
            max_grad_norm: The argument of `accelerator.clip_grad_norm_` in the loop.

        Raises:
            FactoryError: The training uses DeepSpeed, FSDP, FP8 or several processes, which is not replayed.
        """
        from ampdoctor.replay.frameworks.accelerate import accelerate_parts

        parts = accelerate_parts(
            accelerator, model, optimizer, dataloader, scheduler=scheduler, loss=loss, max_grad_norm=max_grad_norm
        )
        return cls(**parts)

    def __post_init__(self) -> None:
        from torch import nn

        if not isinstance(self.model, nn.Module):
            got = f"the class {self.model.__name__}" if isinstance(self.model, type) else kind_of(self.model)
            raise FactoryError(f"TrainingRun(model=...) must be a torch.nn.Module, not {got}")
        self._check_batches()
        self._check_optimizer()
        if self.loss is None and self.step is None:
            raise FactoryError("TrainingRun needs loss=... (forward and loss of a batch) or step=... (your own step)")
        for name in ("loss", "step", "after_step", "move", "load"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise FactoryError(f"TrainingRun({name}=...) must be callable, not {kind_of(value)}")
        for name, arguments in _CALLED_WITH.items():
            value = getattr(self, name)
            if callable(value) and not any(hasattr(value, own) for own in _NOT_CALLED.get(name, ())):
                _check_takes(name, value, arguments)
        if self.step is not None:
            _check_step(self.step)
        for name in ("autocast", "master_weights", "divide_loss"):
            value = getattr(self, name)
            if not isinstance(value, bool):  # a context manager or "false" would be true
                raise FactoryError(f"TrainingRun({name}=...) is True or False, not {_shown(value)}")
        self._check_numbers()

    def _check_batches(self) -> None:
        if isinstance(self.batches, Mapping | str | bytes):
            raise FactoryError(
                f"TrainingRun(batches=...) is one {kind_of(self.batches)}: iterating it gives its keys or characters, "
                f"so pass a list of batches, as in batches=[batch]"
            )
        if isinstance(self.batches, Iterator):
            raise FactoryError(
                "TrainingRun(batches=...) is a one-shot iterator, which cannot be replayed: "
                "pass a list, a DataLoader, or the function that makes the generator"
            )
        iterable = isinstance(self.batches, Iterable) or hasattr(self.batches, "__getitem__")
        if not callable(self.batches) and not iterable:
            raise FactoryError(
                f"TrainingRun(batches=...) must be re-iterable or a callable returning an iterator, "
                f"not {kind_of(self.batches)}"
            )

    def _check_optimizer(self) -> None:
        value = self.optimizer
        if isinstance(value, type):
            raise FactoryError(
                f"TrainingRun(optimizer=...) is the class {value.__name__}: pass an instance, "
                f"or a function of the model, as in lambda model: {value.__name__}(model.parameters(), lr=...)"
            )
        for part in value.values() if isinstance(value, Mapping) else [value]:
            if part is not None and not hasattr(part, "param_groups") and (part is not value or not callable(part)):
                raise FactoryError(
                    f"TrainingRun(optimizer=...) must be an optimizer, a mapping of names to optimizers, "
                    f"or a callable model -> either, not {kind_of(part)}"
                )

    def _check_numbers(self) -> None:
        if self.precision == "fp8":
            raise FactoryError("precision 'fp8' cannot be replayed yet: use 'fp16', 'bf16', 'tf32' or 'fp32'")
        if self.precision not in PRECISIONS:
            raise FactoryError(f"precision {str(self.precision)!r} is not one of {', '.join(PRECISIONS)}")
        if not isinstance(self.accumulation_steps, int) or self.accumulation_steps < 1:
            raise FactoryError(f"accumulation_steps must be an integer of at least 1, not {self.accumulation_steps!r}")
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, int | float) and norm > 0):
            raise FactoryError(f"max_grad_norm must be a number above 0, not {norm!r}")
        self._check_scaler()

    def _check_scaler(self) -> None:
        if isinstance(self.scaler, type):
            raise FactoryError(
                f"TrainingRun(scaler=...) is the class {self.scaler.__name__}: pass its arguments, as in scaler={{}}, "
                f"or an instance"
            )
        if self.scaler is not None and not (
            isinstance(self.scaler, Mapping) or callable(self.scaler) or hasattr(self.scaler, "unscale_")
        ):
            raise FactoryError(
                f"TrainingRun(scaler=...) must be GradScaler arguments, a GradScaler, a callable or None, "
                f"not {kind_of(self.scaler)}"
            )


_CALLED_WITH = {
    "batches": (),
    "loss": ("model", "batch"),
    "optimizer": ("model",),
    "scaler": (),
    "scheduler": ("optimizer",),
    "after_step": ("run", "step"),
    "move": ("batch", "device"),
    "load": ("run", "state"),
}
_NOT_CALLED = {
    "batches": ("__iter__",),
    "optimizer": ("param_groups",),
    "scaler": ("unscale_",),
    "scheduler": ("step",),
}
"""A part with this attribute is used directly, even if it is callable."""


def _check_takes(name: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Refuse a callback that cannot take its arguments, before a later error hides which one it is."""
    signature = _signature(function)
    if signature is None:
        return
    named = {"start": 0} if name == "batches" and takes_start(function) else {}
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        raise FactoryError(
            f"TrainingRun({name}=...) is called as {name}({', '.join(arguments)}), but it takes {signature}"
        ) from error


def _check_step(step: Callable[..., Any]) -> None:
    signature = _signature(step)
    for parameter in () if signature is None else signature.parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind in _VARIADIC
        if parameter.name not in STEP_ARGUMENTS and not optional:
            raise FactoryError(
                f"TrainingRun(step=...) asks for {parameter.name!r}, which is none of {', '.join(STEP_ARGUMENTS)}"
            )


_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or a C callable: the call itself raises
        return None


def _shown(value: object) -> str:
    return repr(value) if value is None or isinstance(value, str | int | float) else kind_of(value)


def kind_of(value: object) -> str:
    """Returns a value's type in the user's words: "list", "torch.Tensor"."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
