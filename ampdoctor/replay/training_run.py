"""`TrainingRun`: the ten lines in which a user says what their training loop is made of."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import FactoryError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ampdoctor.hooks.program import EarlierStep


# Functions of batches that are told where to begin. No torch here: a training script may ask before it imports any.


START = "start"
"""The parameter by which a function of batches asks for the place."""


def takes_start(batches: Any) -> bool:
    """Is it a function that is called with the number of optimizer steps behind the run?"""
    if not callable(batches) or hasattr(batches, "__iter__"):
        return False
    try:
        found = inspect.signature(batches).parameters.get(START)
    except (TypeError, ValueError):  # a builtin, or a C callable
        return False
    return found is not None and found.kind is not inspect.Parameter.POSITIONAL_ONLY


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
STEP_ARGUMENTS = ("model", "batch", "optimizer", "scaler", "autocast", "run", "step")
"""Names of the arguments that a user's own step may ask for."""
_PRECISION_ALIASES = {
    **dict.fromkeys(("float32", "float", "32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed"), "fp16"),
}


@dataclass(kw_only=True, slots=True, eq=False)
class TrainingRun:
    """The parts of a training run that `ampdoctor` replays.

    Args:
        model: The model, in the mode (train or eval) in which the loop runs it.
        batches: Re-iterable, or a callable that returns an iterator. A one-shot generator is refused: a replay draws
            the same batches again. A callable with a parameter `start` is called with the number of optimizer steps
            that the checkpoint holds, 0 without one, and begins with the batch of the step after them.
        loss: `loss(model, batch) -> Tensor`: forward and loss as in the user's loop; called under autocast. May be
            omitted where `step` is given.
        optimizer: An optimizer, a mapping of names to optimizers, or a callable `model -> either`. Without one, the
            forward and backward are replayed and nothing is updated.
        scheduler: Object with `step()`, or a callable `optimizer -> scheduler`; stepped after each optimizer step.
        after_step: `after_step(run, step)`, called after each step (an EMA and the like).
        precision: "fp32", "tf32", "bf16" or "fp16".
        autocast: True: `torch.autocast` with that dtype; False: the model's own dtypes (pure half).
        master_weights: True: half model, fp32 masters in the optimizer.
        scaler: GradScaler arguments, a GradScaler, a callable returning one, or None (a disabled one).
        max_grad_norm: Clip gradients to this total norm, after unscaling.
        accumulation_steps: Micro-batches in one optimizer step.
        divide_loss: Divide each micro-batch's loss by `accumulation_steps`.
        step: The user's own step. Its arguments are matched by name from `model`, `batch`, `optimizer`, `scaler`,
            `autocast`, `run`, `step`; it returns the loss. `autocast` is a zero-argument callable that gives the
            context manager.
        move: `move(batch, device) -> batch`, if the default move of nested tensors does not work.
        load: `load(run, state)`, if loading a checkpoint needs more than `load_state_dict`.
        notes: What a report says about how the run was made, a sentence each.
        finite_again: Of a recorded step that was not finite in its loop and was when it was run again there: that, in a
            sentence. None for any other run.
        counters: `counters(numbers) -> those that were put`, where a checkpoint's numbers have to reach the loop's own
            variables of the same names.
        first_step: The step of the training that the run's step 0 is; None: as many as the checkpoint says, or 0.
        lead_up: Of a recorded step whose weights a checkpoint brings: `lead_up(loaded, say)` yields what was recorded
            between the two, a name and a function of model and scaler each.

    Raises:
        FactoryError: A part is missing or has the wrong type; the sentence says which.
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
        """Returns the run of a Hugging Face Trainer: its own step, batches, precision and scaler.

        Its `train()` sets it up for real and is stopped at the first update, so that it is not called again.

        Args:
            trainer: A `transformers.Trainer`, or a subclass (TRL's), with any model (PEFT's).
            arguments: Those of its `train()`, as `resume_from_checkpoint="out/checkpoint-400"`.

        Raises:
            FactoryError: It trains with DeepSpeed's engine, FSDP, FP8 or several devices, which is not replayed.
        """
        from ampdoctor.replay.frameworks.trainer import trainer_parts

        return cls(**trainer_parts(trainer, arguments))

    @classmethod
    def from_lightning(cls, module: Any, trainer: Any = None, data: Any = None, **arguments: Any) -> TrainingRun:
        """Returns the run of Lightning's Trainer: its own step, batches, precision and scaler.

        Its `fit()` sets module and Trainer up for real and is stopped before the first batch, so that it is not called
        again.

        Args:
            module: A `LightningModule`.
            trainer: A `Trainer`; None: one that trains in fp16, with nothing else set.
            data: A `LightningDataModule`, or what gives the training batches; None: the module's own loader.
            arguments: Others of `Trainer.fit`, as `ckpt_path="last.ckpt"`.

        Raises:
            FactoryError: It trains on several devices, by FSDP or DeepSpeed, or in a format that is not replayed.
        """
        from ampdoctor.replay.frameworks.lightning import lightning_parts

        if data is not None:
            arguments["train_dataloaders"] = data  # fit() takes a DataModule in its place too
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
        """Returns the run of the loop in Accelerate's documentation, on what `Accelerator.prepare` gave.

        `accumulate`, forward and loss, `backward`, clip where gradients are synchronised, then optimizer and scheduler.

        Args:
            accelerator: The `Accelerator`: precision, scaler and accumulation are its own.
            model: The prepared model.
            optimizer: The prepared optimizer.
            dataloader: The prepared loader of the training.
            scheduler: The prepared scheduler.
            loss: As in `TrainingRun`; None: the loss that the model returns, as transformers' do.
            max_grad_norm: What the loop passes to `accelerator.clip_grad_norm_`.

        Raises:
            FactoryError: It trains with DeepSpeed, FSDP, FP8 or several processes, which is not replayed.
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
            if not isinstance(value, bool):  # a context manager or "false" would count as True
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
        if not callable(self.batches) and not isinstance(self.batches, Iterable):
            # DataLoader-likes that only define __getitem__ iterate as well
            if hasattr(self.batches, "__getitem__"):
                return
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
            alias = _PRECISION_ALIASES.get(str(self.precision).removeprefix("torch."))
            hint = f": did you mean {alias!r}?" if alias else ""
            raise FactoryError(f"precision {str(self.precision)!r} is not one of {', '.join(PRECISIONS)}{hint}")
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
"""A part that has this attribute is used as it is, even if it can be called as well."""


def _check_takes(name: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Refuse a callback that cannot take its arguments, while the user can still tell which one it is."""
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
            near = difflib.get_close_matches(parameter.name, STEP_ARGUMENTS, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise FactoryError(
                f"TrainingRun(step=...) asks for {parameter.name!r}, which is none of {', '.join(STEP_ARGUMENTS)}{hint}"
            )


_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or a C callable: the call itself will say
        return None


def _shown(value: object) -> str:
    return repr(value) if value is None or isinstance(value, str | int | float) else kind_of(value)


def kind_of(value: object) -> str:
    """Returns the type of a value as a user knows it: "list", "torch.Tensor"."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
