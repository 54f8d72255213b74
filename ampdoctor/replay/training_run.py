"""`TrainingRun`: the ten lines in which a user says what their training loop is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import FactoryError

if TYPE_CHECKING:
    import torch
    from torch import nn

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(kw_only=True, slots=True, eq=False)
class TrainingRun:
    """The parts of a training run, as `ampdoctor` replays it.

    Args:
        model: The model, in the mode (train or eval) in which the loop runs it.
        batches: Re-iterable, or a callable that returns an iterator. A one-shot generator is refused: a replay draws
            the same batches again.
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
        move: `move(batch, device) -> batch`, where the default move of nested tensors does not do.
        load: `load(run, state)`, where loading a checkpoint needs more than `load_state_dict`.

    Raises:
        FactoryError: A part is missing or has the wrong type; the sentence says which.
    """

    model: nn.Module
    batches: Iterable[Any] | Callable[[], Iterator[Any]]
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

    def __post_init__(self) -> None:
        from torch import nn

        if not isinstance(self.model, nn.Module):
            raise FactoryError(f"TrainingRun(model=...) must be a torch.nn.Module, not {_kind(self.model)}")
        self._check_batches()
        if self.loss is None and self.step is None:
            raise FactoryError("TrainingRun needs loss=... (forward and loss of a batch) or step=... (your own step)")
        for name in ("loss", "step", "after_step", "move", "load"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise FactoryError(f"TrainingRun({name}=...) must be callable, not {_kind(value)}")
        self._check_numbers()

    def _check_batches(self) -> None:
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
                f"not {_kind(self.batches)}"
            )

    def _check_numbers(self) -> None:
        if self.precision == "fp8":
            raise FactoryError("precision 'fp8' cannot be replayed yet: use 'fp16', 'bf16', 'tf32' or 'fp32'")
        if self.precision not in PRECISIONS:
            raise FactoryError(f"precision {self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if not isinstance(self.accumulation_steps, int) or self.accumulation_steps < 1:
            raise FactoryError(f"accumulation_steps must be an integer of at least 1, not {self.accumulation_steps!r}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise FactoryError(f"max_grad_norm must be above 0, not {self.max_grad_norm!r}")
        if self.scaler is not None and not (
            isinstance(self.scaler, Mapping) or callable(self.scaler) or hasattr(self.scaler, "unscale_")
        ):
            raise FactoryError(
                f"TrainingRun(scaler=...) must be GradScaler arguments, a GradScaler, a callable or None, "
                f"not {_kind(self.scaler)}"
            )


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
