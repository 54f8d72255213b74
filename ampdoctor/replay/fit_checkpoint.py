"""Matches a checkpoint's weights and optimizer states with a run's, and reports what does not fit.

Of an optimizer's state torch checks only the numbers of groups and parameters. A moment of another shape, or the state
of another optimizer class, loads without a warning, and the first step raises or misleads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.names import clean_tensor_names, common_prefix_fit, match_keys
from ampdoctor.hooks.nested import copy_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


_SHOWN = 3  # maximum number of names in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Weights that have been checked against a model and can be loaded."""

    model: nn.Module
    state: Mapping[str, Any] = field(default_factory=dict)  # for `model.load_state_dict`, with the model's own keys
    missing: tuple[str, ...] = ()  # in the model only, without tied names and torch's own exceptions
    unexpected: tuple[str, ...] = ()  # keys in the file only
    mismatched: tuple[str, ...] = ()  # names with different shapes
    notes: tuple[str, ...] = ()  # sentences on casts and the like

    @property
    def tensors(self) -> int:
        """The number of tensors that are loaded."""
        return len(self.state)

    def load(self) -> None:
        """Load the weights; raises CheckpointError if the model's own code refuses them."""
        if not self.state:
            return
        try:
            self.model.load_state_dict(dict(self.state), strict=False)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(f"the model refuses the checkpoint's weights: {reason}") from error


def plan_weights(
    model: nn.Module, weights: Mapping[str, torch.Tensor] | None, *, allow_partial: bool = False
) -> WeightPlan:
    """Match a file's keys to the model's, and check shapes as torch does; nothing is loaded yet.

    Wrappers' prefixes are removed on both sides, the model's own load hooks are applied, and a tied tensor is needed
    only once. Raises CheckpointError if keys or shapes differ, unless `allow_partial` is set.
    """
    if not weights:
        return WeightPlan(model=model)
    own = model.state_dict(keep_vars=True)
    clean = clean_tensor_names(model, own)
    to_own = {cleaned: key for key, cleaned in clean.items()}
    matched = match_keys(weights, to_own)
    renamed = {to_own.get(name, name): weights[key] for key, name in matched.items()}
    origin = {to_own.get(name, name): key for key, name in matched.items()}
    seen = _after_load_hooks(model, renamed)
    mismatched = [key for key in seen if key in own and not _shapes_fit(own[key], seen[key])]
    missing = _missing(model, own, seen)
    spare = {name for name, _ in model.named_buffers()} - set(own)  # buffers that the model does not save (any more)
    unexpected = [origin.get(key, key) for key in seen if key not in own and key not in spare]
    if (missing or unexpected or mismatched) and not allow_partial:
        shapes = {clean[key]: (tuple(seen[key].shape), tuple(own[key].shape)) for key in mismatched}
        cleaned = [clean[key] for key in missing]
        raise CheckpointError(_refusal(cleaned, unexpected, shapes, file_keys=list(weights), own_keys=list(to_own)))
    # a key that a load hook will rename is not in the model yet: it is kept
    fits = {key: value for key, value in renamed.items() if key not in mismatched and (key in own or key not in seen)}
    return WeightPlan(
        model=model,
        state=fits,
        missing=tuple(clean[key] for key in missing),
        unexpected=tuple(unexpected),
        mismatched=tuple(clean[key] for key in mismatched),
        notes=tuple(_cast_notes(own, fits)),
    )


def _after_load_hooks(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with the keys that the modules get: pre-hooks of `load_state_dict` rename older keys."""
    seen = dict(state)
    for name, module in model.named_modules():
        for hook in module._load_state_dict_pre_hooks.values():  # noqa: SLF001 torch has no public way to ask
            hook(seen, f"{name}." if name else "", {}, False, [], [], [])
    return seen


def _missing(model: nn.Module, own: Mapping[str, Any], seen: Mapping[str, Any]) -> list[str]:
    loaded = {_place(own[key]) for key in seen if key in own}
    tolerated = ("num_batches_tracked", "_extra_state")  # as torch does for files without version information
    names = dict(model.named_modules(remove_duplicate=False))
    return [
        key
        for key in own
        if key not in seen
        and _place(own[key]) not in loaded
        and not (key.endswith(tolerated) and key.rpartition(".")[0] in names)
    ]


def _place(tensor: Any) -> object:
    """Returns a key for a tensor's memory, equal for tied names; a tensor without memory has its own key."""
    if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and tensor.device.type != "meta" and tensor.numel():
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None
    return id(tensor)


def _shapes_fit(own: Any, given: Any) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(given, torch.Tensor) or is_lazy(own):
        return True
    return own.shape == given.shape or (own.dim() == 0 and given.shape == (1,))


def _refusal(
    missing: Sequence[str],
    unexpected: Sequence[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    *,
    file_keys: Sequence[str],
    own_keys: Sequence[str],
) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(own_keys)} tensors of the model are missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{_count(len(unexpected), 'key', ' of the file')} unknown to the model ({_some(unexpected)})")
    if shapes:
        examples = [f"{name}: {file} in the file, {own} in the model" for name, (file, own) in shapes.items()]
        parts.append(f"{_count(len(shapes), 'shape')} different ({_some(examples, '; ')})")
    hint, prefix = "", common_prefix_fit(file_keys, own_keys) if missing and unexpected else None
    if prefix is not None:
        change = f"with {prefix[1:]!r} put before the file's keys" if prefix[0] == "+" else f"without {prefix!r}"
        hint = f"; they fit {change}"
    return f"the checkpoint does not fit the model: {', '.join(parts)}{hint}; --allow-partial loads what fits"


def _count(number: int, noun: str, rest: str = "") -> str:
    return f"1 {noun}{rest} is" if number == 1 else f"{number} {noun}s{rest} are"


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}..." if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more


def _cast_notes(own: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[str]:
    casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    beyond = []
    for key, value in given.items():
        target = own.get(key)
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor) or value.dtype == target.dtype:
            continue
        casts[value.dtype, target.dtype] += 1
        if value.is_floating_point() and target.is_floating_point() and _loses_range(value, target.dtype):
            beyond.append(key)
    for (file_dtype, own_dtype), count in casts.items():
        yield f"{_count(count, 'tensor')} {_name(file_dtype)} in the file and {_name(own_dtype)} in the model: cast"
    if beyond:
        yield f"{_count(len(beyond), 'tensor')} beyond the range of the model's dtype and infinite now: {_some(beyond)}"


def _loses_range(value: torch.Tensor, dtype: torch.dtype) -> bool:
    if torch.finfo(value.dtype).max <= torch.finfo(dtype).max or not value.numel():
        return False
    return bool((value.detach().to(dtype).isfinite() != value.isfinite()).any())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- optimizer states, checked before `Optimizer.load_state_dict` --

_SHAPED_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size", "ax"),
    }
)
"""States of torch's own optimizers with their parameter's shape; factored and quantized ones have other names."""
_KIND = frozenset(
    {
        *("betas", "momentum", "nesterov", "dampening", "alpha", "centered", "rho", "lambd", "t0", "etas"),
        *("step_sizes", "momentum_decay", "lr_decay", "max_iter", "history_size"),
    }
)
"""Settings that distinguish torch's optimizers; all other settings depend on torch's version."""
_NEEDED = (_KIND | {"lr", "eps", "weight_decay"}) - {"nesterov", "centered"}
"""Without these settings a step of torch's optimizers raises; `__setstate__` fills in the other two."""

_ENTRIES: Mapping[type[Optimizer], tuple[str, ...]] = {
    **dict.fromkeys((optim.Adam, optim.AdamW, optim.RAdam), ("step", "exp_avg", "exp_avg_sq")),
    optim.NAdam: ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    optim.Adamax: ("step", "exp_avg", "exp_inf"),
    optim.Adagrad: ("step", "sum"),
    optim.Adadelta: ("step", "square_avg", "acc_delta"),
    optim.RMSprop: ("step", "square_avg"),
    optim.Rprop: ("step", "prev", "step_size"),
    optim.ASGD: ("step", "eta", "mu", "ax"),
}
"""The keys that torch's own optimizers read from a parameter's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """Optimizer states that have been checked and can be loaded."""

    states: tuple[tuple[Optimizer, dict[str, Any]], ...] = ()  # with the argument of `load_state_dict`
    notes: tuple[str, ...] = ()  # sentences on differences and omissions

    @property
    def loads(self) -> bool:
        """Is there anything to load?"""
        return bool(self.states)

    def load(self) -> None:
        """Load the states; raises CheckpointError if an optimizer's own code refuses its state."""
        for optimizer, state in self.states:
            try:
                optimizer.load_state_dict(state)
            except (RuntimeError, TypeError, ValueError, KeyError) as error:
                kind = type(optimizer).__name__
                raise CheckpointError(f"{kind} refuses the checkpoint's state: {error}") from error


def plan_optimizers(
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    states: Mapping[str, dict[str, Any]],
    *,
    allow_partial: bool = False,
    own_settings: bool = False,
) -> OptimizerPlan:
    """Pair the run's optimizers with the file's states and check each pair; nothing is loaded yet.

    With `own_settings` the optimizers keep their learning rate and other settings, which a recorded step has. Raises
    CheckpointError if a pair does not fit or the pairing is ambiguous, unless `allow_partial` is set.
    """
    notes: list[str] = []
    planned = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    try:
        pairs = _pairs(optimizers, states)
    except CheckpointError as error:
        if not allow_partial:
            raise
        return OptimizerPlan(notes=(f"left out: {error}",))
    unused = [key for key in states if key not in {key for _, key in pairs}]
    if unused and optimizers:
        notes.append(f"not used: the checkpoint's optimizer state of {', '.join(unused)}")
    elif unused:
        notes.append("the run has no optimizer: the checkpoint's optimizer state is not used")
    for name, key in pairs:
        optimizer, state = optimizers[name], _in_run_order(optimizers[name], states[key], names)
        problem = _problem(optimizer, state, names)
        if problem is None:
            usable, changes = _usable(optimizer, state, own_settings=own_settings)
            planned.append((optimizer, usable))
            notes += changes
            continue
        sentence = (
            f"the checkpoint's optimizer state ({key}) does not fit the run's {type(optimizer).__name__}: {problem}"
        )
        if not allow_partial:
            raise CheckpointError(sentence)
        notes.append(f"left out: {sentence}")
    return OptimizerPlan(states=tuple(planned), notes=tuple(notes))


def _pairs(optimizers: Mapping[str, Optimizer], states: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs names with keys: by name (a path's last part) if all names agree, by order if none agree."""
    if not optimizers or not states:
        return []
    by_last = {key.rpartition(".")[2]: key for key in states}
    if len(by_last) == len(states) and set(optimizers) <= set(by_last):
        return [(name, by_last[name]) for name in optimizers]
    if len(optimizers) != len(states):
        raise CheckpointError(
            f"the run has {len(optimizers)} optimizers ({', '.join(optimizers)}) and the checkpoint has the state of "
            f"{len(states)} ({', '.join(states)}): give them the same names"
        )
    if len(states) > 1 and set(optimizers) & set(by_last):
        raise CheckpointError(
            f"the names of the run's optimizers ({', '.join(optimizers)}) and of the checkpoint's "
            f"({', '.join(states)}) agree only in part"
        )
    return list(zip(optimizers, states, strict=True))


def _in_run_order(optimizer: Optimizer, state: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Puts a state whose parameters have names (distributed checkpoints) into the run's order."""
    groups = state.get("param_groups")
    own = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if not isinstance(groups, list):
        return state
    saved: dict[Any, Any] = {}
    for group in groups:
        listed = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            return state
        saved.update(dict.fromkeys(listed, group))
    if None in {name for group in own for name in group} or {name for group in own for name in group} != set(saved):
        return state
    held = [list({id(saved[name]): saved[name] for name in group}.values()) for group in own]
    alike = [[{k: v for k, v in group.items() if k != "params"} for group in several] for several in held]
    if not all(several and all(one == several[0] for one in several) for several in alike):
        return state
    ordered = [{**several[0], "params": group} for several, group in zip(alike, own, strict=True)]
    return {**state, "param_groups": ordered}


def _problem(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> str | None:
    groups = state.get("param_groups")
    entries = state.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        return "it has no param_groups and state"
    own = optimizer.param_groups
    if len(groups) != len(own):
        return f"it has {len(groups)} parameter groups, the run's has {len(own)}"
    for index, (saved, group) in enumerate(zip(groups, own, strict=True)):
        problem = _group_problem(saved, group, index)
        if problem is not None:
            return problem
    ids = [parameter_id for saved in groups for parameter_id in saved["params"]]
    held = [key for key, entry in entries.items() if isinstance(entry, Mapping)]  # others belong to the optimizer
    if held and not set(held) & set(ids):
        return "its state is of other parameters than its groups hold"
    parameters = [parameter for group in own for parameter in group["params"]]
    for parameter_id, parameter in zip(ids, parameters, strict=True):
        name = names.get(id(parameter), f"parameter {parameter_id}")
        entry = entries.get(parameter_id, {})
        problem = _entry_problem(entry, parameter, name)
        missing = [key for key in _ENTRIES.get(type(optimizer), ()) if entry and problem is None and key not in entry]
        if missing:
            problem = f"the state of {name} has no {', '.join(missing)}"
        if problem is not None:
            return problem
    return None


def _group_problem(saved: Any, group: Mapping[str, Any], index: int) -> str | None:
    params = saved.get("params") if isinstance(saved, Mapping) else None
    if not isinstance(params, list | tuple) or not all(isinstance(parameter_id, int | str) for parameter_id in params):
        return f"its group {index} has no list of parameters"
    if len(params) != len(group["params"]):
        return f"its group {index} has {len(params)} parameters, the run's has {len(group['params'])}"
    theirs, ours = _KIND & set(saved), _KIND & set(group)
    if theirs - ours and ours - theirs:
        return f"it is of another kind (it has {', '.join(sorted(theirs))}, not {', '.join(sorted(ours))})"
    missing = sorted(_NEEDED & set(group) - set(saved))
    if missing:
        return f"its group {index} lacks {', '.join(missing)}"
    odd = [key for key in sorted(_NEEDED & set(group)) if not _alike(saved[key], group[key])]
    return f"{odd[0]} of its group {index} is of type {type(saved[odd[0]]).__name__}" if odd else None


def _alike(saved: Any, own: Any) -> bool:
    """Can a saved setting replace the run's? A number can replace a number, and a pair a pair."""
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_alike, saved, own))
    return not _is_number(own) or _is_number(saved)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.dtype.is_complex
    return isinstance(value, int | float)


def _entry_problem(entry: Any, parameter: torch.Tensor, name: str) -> str | None:
    """Returns why a parameter's state cannot be used, or None. A momentum that has not started is saved as None."""
    if not isinstance(entry, Mapping):
        return f"the state of {name} is of type {type(entry).__name__}"
    for key, value in entry.items():
        if key == "step" and not _is_number(value):
            return f"step of {name} is no number"
        if key not in _SHAPED_LIKE_PARAMETER or value is None or isinstance(value, int | float):
            continue
        if not isinstance(value, torch.Tensor):
            return f"{key} of {name} is of type {type(value).__name__}"
        if value.shape != parameter.shape:
            return f"{key} of {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
    return None


def _usable(optimizer: Optimizer, state: dict[str, Any], *, own_settings: bool) -> tuple[dict[str, Any], list[str]]:
    notes = []
    # load_state_dict keeps tensors that need no cast: without a copy the replay would train the checkpoint's tensors
    state = copy_batch(state)
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if own_settings:
            saved.update((key, value) for key, value in group.items() if key != "params")
        on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
        if on_cpu and saved.get("capturable"):
            saved["capturable"] = False  # torch asserts that such parameters are on an accelerator
            notes.append("the checkpoint's optimizer is capturable (CUDA graphs), which a CPU is not: switched off")
        ours, theirs = group.get("lr"), saved.get("lr")
        if theirs is not None and ours is not None and float(ours) != float(theirs):
            notes.append(f"learning rate {float(theirs):.6g} of the checkpoint replaces the run's {float(ours):.6g}")
    return state, list(dict.fromkeys(notes))
