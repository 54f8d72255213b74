"""Makes, names and checks parts of a run that can be given in several forms: device, optimizers, scaler, schedulers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError, ReplayError
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
