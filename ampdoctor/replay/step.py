"""The training step of a replay whose run has no step of its own."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError
from ampdoctor.numerics import nonfinite_counts
from ampdoctor.replay.training_run import STEP_ARGUMENTS

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
    """Take one optimizer step as PyTorch's AMP recipe writes it.

    Its order: zero_grad, forward under autocast, scale, backward (once per micro-batch), unscale, clip, step, update.

    Args:
        run: The user's run; `loss`, `max_grad_norm`, `accumulation_steps` and `divide_loss` are read from it.
        micro_batches: `accumulation_steps` batches, on the device.
        optimizers: All optimizers; with {}, only forward and backward are replayed.
        scaler: A GradScaler, possibly disabled.
        autocast: Returns the autocast context.

    Returns:
        The mean of the micro-batches' losses (their sum without `divide_loss`), detached, 0-dim; None without batches.
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


def meet_scaler(model: nn.Module, scaler: Any) -> bool:
    """Update the scaler of a run without an optimizer: tell it whether the gradients overflowed.

    The scaler looks at a stand-in, because the gradients must stay as the backward left them, in any dtype.

    Args:
        model: The model, after its backward.
        scaler: The scaler that has scaled the loss.

    Returns:
        Whether the scaler would have skipped the step.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return False
    overflowed = any(sum(nonfinite_counts(gradient)) for gradient in gradients)
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
    """Call the user's step with the arguments that it names.

    Args:
        step: The user's function.
        available: Values for every name of `STEP_ARGUMENTS`.

    Raises:
        FactoryError: The step asks for an argument that does not exist.
    """
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return step(**available)
    unknown = [
        p.name
        for p in parameters
        if p.name not in available
        and p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if unknown:
        raise FactoryError(
            f"the step asks for {', '.join(unknown)}, which a replay does not have; it has {', '.join(STEP_ARGUMENTS)}"
        )
    positional = [available[p.name] for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    named = {
        p.name: available[p.name]
        for p in parameters
        if p.name in available and p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    return step(*positional, **named)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise FactoryError(f"the loss function returned {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise FactoryError(f"the loss has shape {tuple(loss.shape)}: a replay needs a scalar")


def loss_number(loss: Any) -> float | None:
    """Returns the loss as a number; None if the step returned none."""
    if isinstance(loss, torch.Tensor):
        return float(loss) if loss.numel() == 1 else None
    return None if loss is None else float(loss)


def readable_loss(loss: Any) -> Any:
    """Returns the result of the user's step as a detached tensor, a number or None.

    Raises:
        FactoryError: The result cannot be read as a loss.
    """
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
