"""The training step of a replay if the run has no step of its own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.numerics.tensors import nonfinite_counts

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.replay.training_run import TrainingRun


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
    trained = [o for o in optimizers.values() if any(p.requires_grad for g in o.param_groups for p in g["params"])]
    if run.max_grad_norm is not None and trained:  # a scaler refuses to step if it has not scaled anything
        for optimizer in trained:
            scaler.unscale_(optimizer)
        held = {id(p): p for optimizer in trained for group in optimizer.param_groups for p in group["params"]}
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
    _check_loss(loss)
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


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise FactoryError(f"the loss function returned {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise FactoryError(f"the loss has shape {tuple(loss.shape)}: a replay needs a scalar")


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
