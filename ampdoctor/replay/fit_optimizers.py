"""Checks a checkpoint's optimizer states against the run's optimizers, before `Optimizer.load_state_dict`.

torch checks only the numbers of groups and parameters. A moment of another shape, or the state of another optimizer
class, loads without a warning, and the first step raises or misleads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from torch.optim import Optimizer

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.nested import copy_batch

if TYPE_CHECKING:
    from torch import nn

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
