"""`apply` makes a change that a replay has proved in the user's own training, in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampdoctor.errors import UsageError
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE
from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.hooks.names import clean_names
from ampdoctor.precision.casting import REDUCED, CastInputs, cast_in_place, moments
from ampdoctor.precision.dtype_overrides import AutocastOverride
from ampdoctor.precision.fp32_modules import (
    Fp32Module,
    fp32_module_of,
    half_dtype,
    half_tensors,
    resolve_fp32_modules,
    upcast_fp32_modules,
)
from ampdoctor.precision.kernels import let_compile_see_hooks
from ampdoctor.training.apply_request import ApplyRequest, dtype_of, wanted_of, yours

if TYPE_CHECKING:
    from torch import Tensor


# -- changes: each is checked as a whole, then made, and can be undone --


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a user's training that `apply` was given."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: torch.amp.GradScaler | None


Change = Callable[[ExitStack], None]
"""Makes a checked change, and puts the undo of each part on the stack."""

MOST_SCALE = 2.0**127
"""A larger scale becomes infinite in fp32 the next time it grows."""
_SCALER_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def plan(prescription: Prescription, training: Training) -> Change:
    """Returns the function that makes a change, which is only checked here; raises UsageError if it is not possible."""
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
    """Returns the modules that a prescription names, under names without the parts that DDP, compile and others add.

    A container without a forward stands for its children. Raises UsageError for an unknown module.
    """
    real: dict[str, str] = {}
    for name, clean in clean_names(model).items():
        if len(name) > len(real.get(clean, "")):  # a wrapper and its module share a clean name: take the inner one
            real[clean] = name
        real.setdefault(clean, name)
    return resolve_fp32_modules(model, [real.get(name, name) for name in names])


# -- dtypes and other values, until the changes are undone --


def put(undo: ExitStack, value: Any, *, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Writes a value, and writes the former one again when `undo` is closed."""
    undo.callback(write, read())
    write(value)


def hold_dtype(
    tensors: Iterable[Tensor], dtype: torch.dtype, model: nn.Module, optimizers: Iterable[Any], *, undo: ExitStack
) -> None:
    """Casts a model's tensors, their gradients and moments in place until `undo` is closed, which may round."""
    chosen = {id(tensor): tensor for tensor in tensors}
    if not chosen:
        return
    undo.callback(_flatten, model)
    for tensor in chosen.values():
        found = [moments(optimizer.state.get(tensor, {})) for optimizer in optimizers]
        apart = {key for one in found for key, moment in one.items() if moment.dtype is not tensor.dtype}
        undo.callback(_cast, tensor, tensor.dtype, optimizers, apart)
        _cast(tensor, dtype, optimizers, apart)
    _flatten(model)


def refuse_wrapped(tensors: Iterable[Tensor], dtype: torch.dtype, model: nn.Module) -> None:
    """Raises UsageError where a wrapper for several processes has laid out the parameters and would not notice."""
    if all(tensor.dtype is dtype for tensor in tensors):
        return
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UsageError(
                f"the change turns half parameters into others, which {kind} has laid out already: apply it before "
                f"the model is wrapped"
            )


def _cast(tensor: Tensor, dtype: torch.dtype, optimizers: Iterable[Any], apart: set[Any]) -> None:
    if tensor.dtype is dtype:
        return
    moved = []
    for optimizer in optimizers:
        state = optimizer.state.get(tensor, {})
        moved.append((state, {key: m.to(dtype) for key, m in moments(state).items() if key not in apart}))
    cast_in_place(tensor, dtype)
    for state, cast in moved:
        state.update(cast)


def _flatten(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants an RNN's weights side by side in memory


# -- fp32 modules ------------------------------------------------------------------------------------------------


def _fp32_modules(value: Any, training: Training) -> Change:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(n, str) for n in value):
        raise UsageError(f"fp32_modules is a list of module names, not {value!r}")
    if not value:
        raise UsageError("fp32_modules names no module: there is nothing to apply")
    model = training.model
    chosen = modules_named(model, value)
    everything = {**chosen, **{name: model.get_submodule(name) for name in upcast_fp32_modules(model, chosen)}}
    for name, module in everything.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{name} is a scripted module, whose precision cannot be changed from outside")
    halves = [tensor for module in everything.values() for tensor in half_tensors(module)]
    refuse_wrapped(halves, torch.float32, model)
    return partial(_make_fp32, list(everything.values()), halves, training)


def _make_fp32(modules: list[nn.Module], halves: list[Tensor], training: Training, undo: ExitStack) -> None:
    let_compile_see_hooks()
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    for module in modules:
        below = (inner for inner in module.modules() if inner is not module)
        _set_bases(below, None, undo)  # the code around these modules is fp32 now: their outputs stay fp32
        if fp32_module_of(module) is None:
            Fp32Module(None if id(module) in inside else half_dtype(module)).attach(module)
            undo.callback(_unhook, module, Fp32Module)
    hold_dtype(halves, torch.float32, training.model, training.optimizers, undo=undo)


def _set_bases(modules: Iterable[nn.Module], dtype: torch.dtype | None, undo: ExitStack) -> None:
    """Sets the output dtype of the fp32 modules among these, but for those inside other fp32 modules."""
    for module in modules:
        fp32_module = fp32_module_of(module)
        if fp32_module is not None and fp32_module.dtype is not None:
            put(undo, dtype, read=partial(getattr, fp32_module, "dtype"), write=partial(setattr, fp32_module, "dtype"))


def _unhook(module: nn.Module, kind: type) -> None:
    """Removes hooks of this kind, or of its methods. A copied model has copies of the hooks, but no handles."""
    before = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)  # noqa: SLF001 - see fp32_module_on
    after = (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)  # noqa: SLF001
    kinds: tuple[tuple[dict[int, Any], ...], ...] = (before, after)
    for hooks, *notes in kinds:
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), kind)]:
            for those in (hooks, *notes):
                those.pop(key, None)


# -- another compute format --------------------------------------------------------------------------------------


def _dtype(value: Any, training: Training) -> Change:
    dtype = dtype_of(value)
    if dtype is None:
        raise UsageError(f"dtype is bfloat16 or float32, not {value!r}")
    model = training.model
    if dtype is torch.bfloat16:
        on_cuda = any(tensor.device.type == "cuda" for tensor in model.parameters())
        if on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UsageError("this GPU has no bfloat16 (that begins with compute capability 8.0): nothing was changed")
        if _input_cast(model) is torch.float32:
            raise UsageError("an earlier change has made the whole model float32: remove() that one first")
    others = [tensor for tensor in half_tensors(model) if tensor.dtype is not dtype]
    refuse_wrapped(others, dtype, model)
    return partial(_make_dtype, dtype, others, training)


def _make_dtype(dtype: torch.dtype, tensors: list[Tensor], training: Training, undo: ExitStack) -> None:
    model, scaler = training.model, training.scaler
    _set_bases(model.modules(), dtype if dtype in REDUCED else None, undo)  # they give the model's own dtype
    if tensors:
        put(undo, dtype, read=partial(_input_cast, model), write=partial(_set_input_cast, model))
    hold_dtype(tensors, dtype, model, training.optimizers, undo=undo)
    undo.callback(AutocastOverride(None if dtype is torch.float32 else dtype).remove)
    if scaler is not None:  # torch offers no public switch after the scaler is built
        read, write = partial(getattr, scaler, "_enabled"), partial(setattr, scaler, "_enabled")
        put(undo, False, read=read, write=write)


def _input_cast(model: nn.Module) -> torch.dtype | None:
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - see fp32_module_on
    return next((hook.dtype for hook in hooks if isinstance(hook, CastInputs)), None)


def _set_input_cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    _unhook(model, CastInputs)
    if dtype is not None:
        CastInputs(dtype).attach(model)


# -- loss scale and optimizer ------------------------------------------------------------------------------------


def _scaler(value: Any, training: Training) -> Change:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f"scaler is an object of GradScaler arguments, not {value!r}")
    for name, number in value.items():
        if name not in _SCALER_SETTINGS:
            raise UsageError(f"GradScaler has no setting {name!r}: it has {', '.join(_SCALER_SETTINGS)}")
        if not _number(number) or number <= 0:
            raise UsageError(f"{name} must be a finite number above 0, not {number!r}")
    sound = (
        DEAD_SCALE < value.get("init_scale", 1.0) <= MOST_SCALE
        and value.get("growth_interval", 1) == int(value.get("growth_interval", 1))
        and value.get("growth_factor", 2.0) > 1.0 > value.get("backoff_factor", 0.5)
    )
    if not sound:
        raise UsageError(f"no training keeps a loss scale with {dict(value)}: nothing was changed")
    arguments = ", ".join(f"{name}={number}" for name, number in value.items())
    scaler = training.scaler
    if scaler is None:
        raise UsageError(
            f"the change is one of the loss scaler: pass scaler=...; a training without one needs "
            f'torch.amp.GradScaler("cuda", {arguments}), and a loop that scales its loss and steps with it'
        )
    if not scaler.is_enabled():
        raise UsageError(
            f"the scaler is disabled, so that no scale can be set: build it with enabled=True, {arguments}"
        )
    return partial(_set_scaler, scaler, value)


def _set_scaler(scaler: torch.amp.GradScaler, settings: Mapping[str, Any], undo: ExitStack) -> None:
    names = {"init_scale": "scale"}
    wanted = {names.get(name, name): number for name, number in settings.items()}
    for key, number in {**wanted, "_growth_tracker": 0}.items():
        put(undo, number, read=partial(_setting, scaler, key), write=partial(_set, scaler, key))


def _setting(scaler: torch.amp.GradScaler, key: str) -> Any:
    return scaler.state_dict()[key]


def _set(scaler: torch.amp.GradScaler, key: str, number: Any) -> None:
    scaler.load_state_dict({**scaler.state_dict(), key: number})


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
            ((optimizer, group, name), number)
            for optimizer in training.optimizers
            for group, settings in enumerate(optimizer.param_groups)
            if _number(settings.get(name))
        ]
        if not found:
            kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in training.optimizers))
            raise UsageError(f"{kinds} has no setting {name!r} that is a number: nothing was changed")
        places += found
    return partial(_set_all, places)


def _set_all(places: list[tuple[tuple[Optimizer, int, str], Any]], undo: ExitStack) -> None:
    for place, number in places:
        put(undo, number, read=partial(_option, *place), write=partial(_set_option, *place))


def _option(optimizer: Optimizer, group: int, name: str) -> Any:
    return optimizer.param_groups[group][name]  # load_state_dict replaces the groups


def _set_option(optimizer: Optimizer, group: int, name: str, number: Any) -> None:
    optimizer.param_groups[group][name] = number


def _number(value: Any) -> bool:
    """Whether the value is a finite number that a float can hold; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_APPLIED = WeakIdKeyDictionary()
"""Model, optimizer or scaler -> a token of each change of it that is active, the latest one last."""


class Applied:
    """Changes that are active until `remove()` is called or the `with` block around this object ends.

    The changes outlive this object: they stay when it is deleted.

    Attributes:
        changes: What was changed: one prescription of each kind.
        modules: Names of the modules that compute in fp32; () if the change is of another kind.
        left_out: The report's other changes, which could not be applied, a sentence each.
    """

    __slots__ = ("_removed", "_stacks", "_token", "_undo", "changes", "left_out", "modules")

    def __init__(self, wanted: ApplyRequest, undo: ExitStack, owners: Iterable[Any]) -> None:
        self.changes = wanted.changes
        self.modules = tuple(name for one in wanted.changes if one.kind == "fp32_modules" for name in one.value)
        self.left_out = wanted.left_out
        self._undo = undo
        self._removed = False
        self._token = object()
        self._stacks: list[list[object]] = [_APPLIED.setdefault(owner, []) for owner in owners]
        for stack in self._stacks:
            stack.append(self._token)

    @property
    def active(self) -> bool:
        """False after `remove()`. A later load of the scaler's state goes unnoticed."""
        return not self._removed

    def remove(self) -> None:
        """Undo, between steps, what this call of `apply` has changed; a second call does nothing.

        In a half model, the parameters are rounded back to their dtype. So are the moments of the optimizer that was
        given to `apply`.

        Raises:
            UsageError: A later change of the same model, optimizer or scaler is active: remove that one first.
        """
        if not self._removed:
            if any(stack[-1] is not self._token for stack in self._stacks):
                raise UsageError(
                    "a later change of the same model, optimizer or scaler is active: remove() that one first"
                )
            self._removed = True
            for stack in self._stacks:
                stack.pop()
            self._undo.close()
            _compile_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        what = "; ".join(change.detail or f"{change.kind} = {change.value}" for change in self.changes)
        return f"<Applied: {what}{'' if self.active else ' (removed)'}>"


def apply(
    model: nn.Module,
    prescription: Prescription | Finding | Report | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    unverified: bool = False,
) -> Applied:
    """Put a prescription into your training.

    Call it once, after model, optimizer and scaler are built and have loaded their checkpoint. If you call it before
    `torch.compile` traces the model, no second compilation is needed. After an error, nothing is applied.

    - `fp32_modules`: hooks switch autocast off inside these modules and cast their inputs up. In a half model, their
      parameters become fp32 (the same objects, so that an optimizer keeps them) and their outputs are cast back.
      The hooks work in training and evaluation, survive `state_dict`, `deepcopy` and `torch.save` of the model, and
      work with DataParallel, DDP and activation checkpointing. `torch.compile` breaks its graph around each such module
      (`fullgraph=True` fails with torch's own error). A parent that uses a module's weight without calling the module
      is not affected.
    - `dtype`: every `torch.autocast` region of this process that names a half dtype computes in this one (float32: is
      off), for any model inside, as in the replay that proved it. A half model's parameters and inputs are cast. You
      must cast half tensors that only the loss uses (targets, weights). A given `scaler` is switched off; a scaler that
      is not given does no harm.
    - `init_scale`, `scaler`: need `scaler` and overwrite its settings once. A state that is loaded into the scaler
      later overwrites them again, so load the checkpoint first. The scaler must be the one with which the loop scales
      its loss and steps. You must change a loop without a scaler yourself.
    - `optimizer`: needs `optimizer` and overwrites its settings once; a state that is loaded later brings its own.
    - `skip_batch` and `code` do not change a model: they are refused with a sentence that says what to do.

    Handles of changes to the same model, optimizer or scaler are removed in the reverse order, as nested `with` blocks
    are. After the last one, everything is as it was. A module in fp32 stays fp32 in a model of any dtype.

    Args:
        model: The model, wrapped (DDP, compiled) or not; names are those of the user's own model.
        prescription: A prescription, a finding, a report, the JSON object of one of these, or the path of a JSON
            report. From a report, the verified changes of all findings are applied together, modules united.
            An object without a `status` counts as verified: `{"kind": "fp32_modules", "value": ["block.3"]}`.
        optimizer: The optimizer, several, or a mapping of names to them. A half model that has taken steps needs it:
            the moments change their dtype with the parameters.
        scaler: The loss scaler.
        unverified: Also apply a change that no replay has proved.

    Returns:
        A handle on the changes: its `remove()`, or a `with` block around it, undoes them.

    Raises:
        UsageError: Nothing can be applied. One sentence says why: an unknown module, a missing optimizer or scaler, a
            change that is not verified, a report that asks for two different values.
    """
    training = _training(model, optimizer, scaler)
    wanted = wanted_of(prescription, unverified=unverified)
    # a dtype is the whole model's, and modules in fp32 come after it
    plans = [plan(change, training) for change in sorted(wanted.changes, key=lambda change: change.kind != "dtype")]
    with ExitStack() as undone:
        for make in plans:
            make(undone)
        undo = undone.pop_all()  # nothing failed: now the handle undoes the changes
    _compile_anew()
    return Applied(wanted, undo, _owners(wanted, training))


def _owners(wanted: ApplyRequest, training: Training) -> Iterator[Any]:
    """Yields the parts of the training that the changes are of."""
    kinds = {change.kind for change in wanted.changes}
    if kinds & {"fp32_modules", "dtype"}:
        yield training.model
    if kinds & {"init_scale", "scaler", "dtype"} and training.scaler is not None:
        yield training.scaler
    if "optimizer" in kinds:
        yield from training.optimizers


def _compile_anew() -> None:
    """Makes `torch.compile` trace again: a finished trace ignores hooks and regions that change later."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _training(model: Any, optimizer: Any, scaler: Any) -> Training:
    if not isinstance(model, nn.Module):
        raise UsageError(f"apply(model, ...) takes a torch.nn.Module, not {type(model).__name__}")
    if optimizer is None:
        optimizers: tuple[Any, ...] = ()
    elif isinstance(optimizer, Mapping):
        optimizers = tuple(optimizer.values())
    else:
        several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups")
        optimizers = tuple(optimizer) if several else (optimizer,)
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise UsageError(f"apply(optimizer=...) takes optimizers, not {type(one).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"apply(scaler=...) takes a torch.amp.GradScaler, not {type(scaler).__name__}")
    return Training(model, optimizers, scaler)
