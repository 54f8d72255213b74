"""The changes that `apply` can make: each is checked whole first, then made, and can be undone."""

from __future__ import annotations

import difflib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ampdoctor.errors import UsageError
from ampdoctor.precision import (
    REDUCED,
    AutocastOverride,
    InPlaceCast,
    Island,
    half_dtype,
    half_tensors,
    island_on,
    let_compile_see_hooks,
    map_tensors,
    moments,
    resolve_islands,
    widen_islands,
)
from ampdoctor.replay.names import clean_names
from ampdoctor.training.wanted import dtype_of, yours

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ampdoctor.evidence.report import Prescription

Change = Callable[[ExitStack], None]
"""Makes a change that was found possible, and puts what undoes each part of it on the stack."""

LEAST_SCALE, MOST_SCALE = 2.0**-128, 2.0**127
"""At and below the first its reciprocal is infinite in fp32 (AMP401); above the second the scale itself soon is."""
_SCALER_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True, slots=True)
class Training:
    """What a user's training is made of, as far as `apply` was told.

    Attributes:
        model: The model.
        optimizers: Its optimizers; () where none was given.
        scaler: Its loss scaler, if one was given.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None


def plan(prescription: Prescription, training: Training) -> Change:
    """Check that a change can be made, and return how; nothing is changed yet.

    Raises:
        UsageError: It cannot be made, or its value makes no sense.
    """
    value = prescription.value
    if prescription.kind == "fp32_modules":
        return _fp32_modules(value, training)
    if prescription.kind == "dtype":
        return _dtype(value, training)
    if prescription.kind == "init_scale":
        return _scaler({"init_scale": value}, training)
    if prescription.kind == "scaler":
        return _scaler(value, training)
    if prescription.kind == "optimizer":
        return _optimizer(value, training)
    raise UsageError(yours(prescription))


def modules_named(model: nn.Module, names: Sequence[Any]) -> dict[str, nn.Module]:
    """The modules that a prescription names: as the user wrote them, without what DDP, compile and others wrap around.

    Containers without a forward stand for their children.

    Raises:
        UsageError: The model has no such module; the sentence has near names.
    """
    real: dict[str, str] = {}
    for name, clean in clean_names(model).items():
        if len(name) > len(real.get(clean, "")):  # a wrapper and what it wraps share a name: the inner one is meant
            real[clean] = name
        real.setdefault(clean, name)
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in real and name not in known:
            near = difflib.get_close_matches(str(name), real, n=3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise UsageError(f"the model has no module called {name!r}{hint}: nothing was changed")
    return resolve_islands(model, [real.get(name, name) for name in names])


# -- fp32 modules ------------------------------------------------------------------------------------------------


def _fp32_modules(value: Any, training: Training) -> Change:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(n, str) for n in value):
        raise UsageError(f"fp32_modules is a list of module names, not {value!r}")
    if not value:
        raise UsageError("fp32_modules names no module: there is nothing to apply")
    model = training.model
    chosen = modules_named(model, value)
    everything = {**chosen, **{name: model.get_submodule(name) for name in widen_islands(model, chosen)}}
    for name, module in everything.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{name} is a scripted module, whose precision cannot be changed from outside")
    new = [module for module in everything.values() if not island_on(module)]
    halves = [tensor for module in everything.values() for tensor in half_tensors(module)]
    _refuse_unseen(halves, training)
    return partial(_make_islands, new, halves, training)


def _make_islands(modules: list[nn.Module], halves: list[Tensor], training: Training, undo: ExitStack) -> None:
    islands = [Island(half_dtype(module)) for module in modules]  # of the moment: the cast below makes them fp32
    _cast(halves, torch.float32, training, undo)
    let_compile_see_hooks()
    for module, island in zip(modules, islands, strict=True):
        for handle in island.attach(module):
            undo.callback(handle.remove)


# -- another compute format --------------------------------------------------------------------------------------


class CastInputs:
    """A pre-hook of a half model that computes in another format now: half inputs are cast to it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments with half tensors cast."""
        return map_tensors(args, self._cast), map_tensors(kwargs, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.dtype in REDUCED else tensor


def _dtype(value: Any, training: Training) -> Change:
    dtype = dtype_of(value)
    if dtype is None:
        raise UsageError(f"dtype is bfloat16 or float32, not {value!r}")
    model = training.model
    others = [tensor for tensor in half_tensors(model) if tensor.dtype is not dtype]
    if dtype is torch.bfloat16:
        on_cuda = any(tensor.device.type == "cuda" for tensor in model.parameters())
        if on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError("this GPU has no bfloat16 (that begins with compute capability 8.0): nothing was changed")
    _refuse_unseen(others, training)
    return partial(_make_dtype, dtype, others, training)


def _make_dtype(dtype: torch.dtype, tensors: list[Tensor], training: Training, undo: ExitStack) -> None:
    _cast(tensors, dtype, training, undo)
    if tensors:
        undo.callback(training.model.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True).remove)
    undo.callback(AutocastOverride(None if dtype is torch.float32 else dtype).remove)
    scaler = training.scaler
    if scaler is not None and scaler.is_enabled():
        scaler._enabled = False  # noqa: SLF001 - torch offers no public switch after the scaler is built
        undo.callback(setattr, scaler, "_enabled", True)


# -- parameters that change their dtype --------------------------------------------------------------------------


def _cast(tensors: list[Tensor], dtype: torch.dtype, training: Training, undo: ExitStack) -> None:
    if not tensors:
        return
    undo.callback(InPlaceCast(tensors, dtype, training.optimizers).undo)
    for module in training.model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants an RNN's weights side by side in memory


def _refuse_unseen(tensors: list[Tensor], training: Training) -> None:
    """Refuse to change parameters' dtype under someone who keeps track of it and would not notice.

    Raises:
        UsageError: The model is wrapped for several processes already, or an optimizer that was not given has state.
    """
    if not tensors:
        return
    for module in training.model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UsageError(
                f"the change turns half parameters into others, which {kind} has laid out already: apply it before "
                f"the model is wrapped"
            )
    changed = {id(tensor) for tensor in tensors}
    given = {id(optimizer) for optimizer in training.optimizers}
    for optimizer in _optimizers_alive():
        if id(optimizer) in given:
            continue
        for parameter, state in optimizer.state.items():
            if id(parameter) in changed and any(m.dtype is parameter.dtype for m in moments(state).values()):
                raise UsageError(
                    f"the change gives half parameters another dtype, and the {type(optimizer).__name__} that steps "
                    f"them has half moments already: apply it before the first step, or pass optimizer=..."
                )


def _optimizers_alive() -> list[Optimizer]:
    # torch keeps no list of them; by type(), because isinstance() asks proxies and lazy objects for their __class__
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]


# -- loss scale and optimizer ------------------------------------------------------------------------------------


def _scaler(value: Any, training: Training) -> Change:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f"scaler is an object of GradScaler arguments, not {value!r}")
    for name, number in value.items():
        if name not in _SCALER_SETTINGS:
            raise UsageError(f"GradScaler has no setting {name!r}: it has {', '.join(_SCALER_SETTINGS)}")
        if not _number(number) or number <= 0:
            raise UsageError(f"{name} must be a finite number above 0, not {number!r}")
    if not LEAST_SCALE < value.get("init_scale", 1.0) <= MOST_SCALE:
        raise UsageError(f"init_scale {value['init_scale']:g} is none that fp32 holds together with its reciprocal")
    if value.get("growth_interval", 1) != int(value.get("growth_interval", 1)):
        raise UsageError(f"growth_interval is a number of steps, not {value['growth_interval']!r}")
    if value.get("growth_factor", 2.0) <= 1.0 or value.get("backoff_factor", 0.5) >= 1.0:
        raise UsageError("a growth_factor must be above 1 and a backoff_factor below it")
    arguments = ", ".join(f"{name}={number}" for name, number in value.items())
    scaler = training.scaler
    if scaler is None:
        raise UsageError(
            f"the change is one of the loss scaler: pass scaler=..., or build it so: "
            f'torch.amp.GradScaler("cuda", {arguments})'
        )
    if not scaler.is_enabled():
        raise UsageError(
            f"the scaler is disabled, so that no scale can be set: build it with enabled=True, {arguments}"
        )
    return partial(_set_scaler, scaler, value)


def _set_scaler(scaler: torch.amp.GradScaler, settings: Mapping[str, Any], undo: ExitStack) -> None:
    before = scaler.state_dict()
    names = {"init_scale": "scale"}
    wanted = {names.get(name, name): number for name, number in settings.items()}
    undo.callback(scaler.load_state_dict, before)
    scaler.load_state_dict({**before, **wanted, "_growth_tracker": 0})


def _optimizer(value: Any, training: Training) -> Change:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f"optimizer is an object of settings, not {value!r}")
    if "reset_state" in value:
        raise UsageError(
            "the optimizer's state of the parameters that it names is to be dropped before the run is "
            "resumed: `del optimizer.state[parameter]` after load_state_dict"
        )
    if not training.optimizers:
        arguments = ", ".join(f"{name}={number}" for name, number in value.items())
        raise UsageError(f"the change is one of the optimizer ({arguments}): pass optimizer=...")
    places = []
    for name, number in value.items():
        if not _number(number) or number < 0:
            raise UsageError(f"{name} must be a finite number, 0 or above, not {number!r}")
        found = [
            (settings, name, number)
            for optimizer in training.optimizers
            for settings in (*optimizer.param_groups, optimizer.defaults)  # defaults: for groups added later
            if name in settings and _number(settings[name])
        ]
        if not found:
            kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in training.optimizers))
            raise UsageError(f"{kinds} has no setting {name!r} that is a number: nothing was changed")
        places += found
    return partial(_set_all, places)


def _set_all(places: list[tuple[dict[str, Any], str, Any]], undo: ExitStack) -> None:
    for settings, name, number in places:
        undo.callback(settings.__setitem__, name, settings[name])
        settings[name] = number


def _number(value: Any) -> bool:
    """A finite number that a float holds; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
