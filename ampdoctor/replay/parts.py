"""Makes, names and checks parts of a run that can be given in several forms: device, optimizers, scaler, schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import FactoryError, ReplayError
from ampdoctor.evidence.run_facts import RefusedSetting

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
    """Returns torch's optimizer or scheduler inside a framework's wrapper; another object is returned unchanged.

    torch does not call the hooks of a wrapper.
    """
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
    """Returns the run's GradScaler; a disabled one if the run has none or the precision needs none.

    Raises FactoryError if `TrainingRun(scaler=...)` is no GradScaler, or has arguments that GradScaler refuses.
    """
    made = run.scaler if run.scaler is not None else getattr(run.optimizer, "scaler", None)  # of Accelerate's wrapper
    if made is not None and not enabled:
        made = None
    if made is None:
        return torch.amp.GradScaler(device.type, enabled=False)
    if isinstance(made, Mapping):
        try:
            return torch.amp.GradScaler(device.type, **made)
        except (TypeError, ValueError, AssertionError) as error:  # GradScaler asserts the bounds of its factors
            raise FactoryError(f"TrainingRun(scaler=...): {error}") from None
    if callable(made) and not hasattr(made, "unscale_"):
        made = made()
    if not hasattr(made, "unscale_"):
        raise FactoryError(f"TrainingRun(scaler=...) gave {type(made).__name__}, not a GradScaler")
    return made


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


def refuse_lazy(model: nn.Module) -> None:
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
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ReplayError(f"--device {name!r} is not auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ReplayError(f"--device {name!r} is not auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ReplayError(
                f"--device {name}: this machine has {count} CUDA devices; --device cpu emulates CUDA's casts"
            )
    return device


# -- settings of a GradScaler that its constructor accepts and its first use refuses --
#
# A float interval, for example, raises in the first `update()`; the replay could then report nothing else.

_FACTORS = {"growth_factor": 2.0, "backoff_factor": 0.5}
_INTERVAL = 2000
_SCALE = 65536.0
"""GradScaler's own defaults."""


def make_usable(scaler: Any) -> tuple[RefusedSetting, ...]:
    """Replace, in place, settings that torch refuses; other settings become plain numbers of the same value.

    A whole number given as a float becomes an int; any other refused setting becomes GradScaler's default. A disabled
    scaler, or one that is not torch's, is not changed.
    """
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return ()
    refused = []
    for name, accepts in _ACCEPTS.items():
        attribute = f"_{name}"
        given = getattr(scaler, attribute)
        if name == "init_scale" and scaler._scale is not None:  # noqa: SLF001 its tensor exists: it was accepted
            continue
        try:
            accepts(given)
            setattr(scaler, attribute, _plain(given, name))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            used = _instead(given, name)
            setattr(scaler, attribute, used)
            first = str(error).strip().partition("\n")[0]
            raised = f"{type(error).__name__}: {first}"
            refused.append(RefusedSetting(name=name, given=_shown(given), used=used, raised=raised))
    return tuple(refused)


def _takes_scale(value: Any) -> None:
    torch.full((), value, dtype=torch.float32)  # as GradScaler makes its scale


def _takes(name: str) -> Callable[[Any], None]:
    def update(value: Any) -> None:
        settings: Mapping[str, Any] = {**_FACTORS, "growth_interval": _INTERVAL, name: value}
        scale, overflows = torch.ones((), dtype=torch.float32), torch.zeros((), dtype=torch.float32)
        clean_steps = torch.zeros((), dtype=torch.int32)
        torch._amp_update_scale_(scale, clean_steps, overflows, *settings.values())  # what GradScaler.update calls

    return update


_ACCEPTS: Mapping[str, Callable[[Any], None]] = {
    "init_scale": _takes_scale,
    **{name: _takes(name) for name in (*_FACTORS, "growth_interval")},
}


def _plain(value: Any, name: str) -> float:
    return int(value) if name == "growth_interval" else float(value)


def _instead(value: Any, name: str) -> float:
    if name == "growth_interval":
        whole = isinstance(value, int | float) and math.isfinite(value) and value == int(value) and abs(value) < 2**31
        return int(value) if whole and not isinstance(value, bool) else _INTERVAL
    return _SCALE if name == "init_scale" else _FACTORS[name]


def _shown(value: Any) -> str:
    return repr(value)[:80]
