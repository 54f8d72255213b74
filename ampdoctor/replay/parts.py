"""Makes and checks parts of a run that can be given in several forms; the training step of a run without its own."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError, ReplayError
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.numerics.tensors import nonfinite_counts
from ampdoctor.replay.snapshot import is_one_element

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.replay.training_run import TrainingRun


def optimizers_of(run: TrainingRun, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Returns the run's optimizers by name; raises FactoryError if one of them is no optimizer."""
    made = run.optimizer
    if made is None:
        return {}
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made(model)
    given = dict(made) if isinstance(made, Mapping) else {"optimizer": made}
    named = {name: torch_optimizer_of(optimizer) for name, optimizer in given.items()}
    for name, optimizer in named.items():
        if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
            raise FactoryError(f"TrainingRun(optimizer=...): {name} is {type(optimizer).__name__}, not an optimizer")
    return named


_WRAPPERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "AcceleratedScheduler": "scheduler",
}
"""Frameworks' wrappers of torch objects, with the attribute that holds the object."""


def torch_optimizer_of(made: Any) -> Any:
    """Returns torch's optimizer or scheduler inside a framework's wrapper, whose hooks torch does not call."""
    while (held := _WRAPPERS.get(type(made).__name__)) is not None and hasattr(made, held):
        made = getattr(made, held)
    return made


def as_given(run: TrainingRun, optimizers: Mapping[str, torch.optim.Optimizer]) -> Any:
    """Returns the argument `optimizer` of a user's step: a framework's wrapper, if the run has one."""
    given = run.optimizer if isinstance(run.optimizer, Mapping) else {"optimizer": run.optimizer}
    named = {
        name: given[name] if torch_optimizer_of(given.get(name)) is optimizer else optimizer
        for name, optimizer in optimizers.items()
    }
    return next(iter(named.values()), None) if len(named) <= 1 else named


def scaler_of(run: TrainingRun, device: torch.device, *, enabled: bool) -> Any:
    """Returns the run's GradScaler; a disabled one if the run has none or the precision needs none."""
    made = run.scaler if run.scaler is not None else getattr(run.optimizer, "scaler", None)  # of Accelerate's wrapper
    if made is not None and not enabled:
        made = None
    if made is None:
        return torch.amp.GradScaler(device.type, enabled=False)
    if isinstance(made, Mapping):
        try:
            return _with_a_plain_scale(torch.amp.GradScaler(device.type, **made))
        except (TypeError, ValueError, AssertionError) as error:  # GradScaler asserts the bounds of its factors
            raise FactoryError(f"TrainingRun(scaler=...): {error}") from None
    if callable(made) and not hasattr(made, "unscale_"):
        made = made()
    if not hasattr(made, "unscale_"):
        raise FactoryError(f"TrainingRun(scaler=...) gave {type(made).__name__}, not a GradScaler")
    return _with_a_plain_scale(made)


def _with_a_plain_scale(scaler: Any) -> Any:
    scale: Any = getattr(scaler, "_init_scale", None)
    if is_one_element(scale):
        scaler._init_scale = float(scale)  # noqa: SLF001 - there is no public way
    return scaler


def schedulers_of(run: TrainingRun, optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[Any, ...]:
    """Returns the run's schedulers; raises FactoryError if one of them has no `step`."""
    made = run.scheduler
    if made is None:
        return ()
    if callable(made) and (isinstance(made, type) or not hasattr(made, "step")):
        if len(optimizers) > 1:
            raise FactoryError(
                "TrainingRun(scheduler=...) as a callable needs a single optimizer: pass the scheduler itself"
            )
        made = made(next(iter(optimizers.values()), None))
    many = tuple(map(torch_optimizer_of, made if isinstance(made, list | tuple) else (made,)))
    for scheduler in many:
        if not hasattr(scheduler, "step"):
            raise FactoryError(f"TrainingRun(scheduler=...) is {type(scheduler).__name__}, which has no step()")
    return many


def reject_uninitialized(model: nn.Module) -> None:
    """Raises FactoryError for a model without values: lazy modules before a first forward, or the meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise FactoryError(f"{name} has no shape yet (a lazy module): run the model once inside the factory")
        if tensor.is_meta:
            raise FactoryError(f"{name} is on the meta device, without values: make the model on a real one")


# -- device --


def choose_device(name: str) -> torch.device:
    """Returns the device that `--device` names; raises ReplayError if the machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ReplayError(f"--device {name!r} is not auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ReplayError(
                f"--device {name}: this machine has {count} CUDA devices; --device cpu emulates CUDA's casts"
            )
    return device


# -- the training step of a run that has no step of its own --


def default_step(
    run: TrainingRun,
    micro_batches: Iterable[Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    scaler: Any,
    autocast: Callable[[], Any],
) -> torch.Tensor | None:
    """Take one optimizer step as in PyTorch's AMP recipe; without optimizers only forward and backward run.

    Returns the mean of the micro-batches' losses (their sum without `divide_loss`), detached; None without batches.
    """
    run.model.zero_grad(set_to_none=True)
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    total: torch.Tensor | None = None
    for batch in micro_batches:
        loss = _backward(run, batch, scaler, autocast)
        total = loss if total is None else total + loss
    trained = [o for o in optimizers.values() if any(p.requires_grad for p in parameters_of(o))]
    if run.max_grad_norm is not None and trained:  # a scaler refuses to step if it has not scaled anything
        for optimizer in trained:
            scaler.unscale_(optimizer)
        held = {id(p): p for optimizer in trained for p in parameters_of(optimizer)}
        torch.nn.utils.clip_grad_norm_(list(held.values()), run.max_grad_norm)  # the total norm: one for all optimizers
    for optimizer in trained:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise FactoryError(
                "LBFGS evaluates the loss again in each step: give TrainingRun(step=...) with its closure"
            )
        scaler.step(optimizer)
    if trained:
        scaler.update()
    return total


def update_scaler_without_optimizer(model: nn.Module, scaler: Any) -> bool:
    """Update the scaler of a run without an optimizer, after the backward; returns whether it would skip the step."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return False
    overflowed = any(sum(nonfinite_counts(gradient)) for gradient in gradients)
    # the scaler checks a substitute: the gradients must keep their values, and may have any dtype
    sign = torch.zeros((), dtype=torch.float32, device=gradients[0].device, requires_grad=True)
    sign.grad = torch.full_like(sign, math.inf if overflowed else 0.0)
    scaler.unscale_(torch.optim.SGD([sign], lr=0.0))
    scaler.update()
    return overflowed


def _backward(run: TrainingRun, batch: Any, scaler: Any, autocast: Callable[[], Any]) -> torch.Tensor:
    if run.loss is None:
        raise FactoryError("TrainingRun needs loss=... where it gives no step=... of its own")
    with autocast():
        loss = run.loss(run.model, batch)
    if not isinstance(loss, torch.Tensor):
        raise FactoryError(f"the loss function returned {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise FactoryError(f"the loss has shape {tuple(loss.shape)}: a replay needs a scalar")
    if run.divide_loss and run.accumulation_steps > 1:
        loss = loss / run.accumulation_steps
    if loss.requires_grad:
        scaler.scale(loss).backward()
    elif any(parameter.requires_grad for parameter in run.model.parameters()):
        raise FactoryError("the loss does not depend on any parameter (was it detached?): there is nothing to train")
    return loss.detach()


def call_user_step(step: Callable[..., Any], available: Mapping[str, Any]) -> Any:
    """Call the user's step with those of the arguments that it names; `TrainingRun` has checked the names."""
    parameters = [p for p in inspect.signature(step).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return step(**available)
    positional = [available[p.name] for p in parameters if p.kind is p.POSITIONAL_ONLY]
    named = [p.name for p in parameters if p.name in available and p.kind is not p.POSITIONAL_ONLY]
    return step(*positional, **{name: available[name] for name in named})


def loss_number(loss: Any) -> float | None:
    """Returns the loss as a number; None if the step returned none or a tensor of several elements."""
    if isinstance(loss, torch.Tensor):
        return float(loss) if loss.numel() == 1 else None
    return None if loss is None else float(loss)


def readable_loss(loss: Any) -> Any:
    """Returns the result of the user's step as a detached tensor, a number or None; raises FactoryError otherwise."""
    if isinstance(loss, torch.Tensor):
        return loss.detach()
    if loss is None or isinstance(loss, int | float):
        return loss if loss is None else float(loss)
    try:
        return float(loss)  # a numpy scalar
    except (TypeError, ValueError):
        raise FactoryError(
            f"the step returned {type(loss).__name__}: it must return its loss, a tensor or a number"
        ) from None
