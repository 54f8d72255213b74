"""Rebuilds the nested state dict from a distributed checkpoint's entries, and sorts its parts.

Megatron writes no original paths to `.metadata`, and torchtitan's optimizer was flat already; names are recognised:

- torch (`flatten_optimizer_state_dict`): `state.<parameter>.<entry>` and `param_groups.<parameter>.<setting>`
- Megatron: `optimizer.state.<entry>.<parameter>`, `chained_0.optimizer.state...` for one of several optimizers, and
  `optimizer.distributed.<buffer>.<entry>` where a buffer holds many parameters; `fp32_param` and `param` in them are
  the fp32 master copies of half weights
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ampdoctor.checkpoints.file_contents import MAIN_KEYS, MASTER_GROUP, FileContents, classify_contents, is_average
from ampdoctor.checkpoints.pickled_objects import MAX_DEPTH, MAX_NODES, Saved, require_finite_tree
from ampdoctor.checkpoints.scalers import number
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

_ENTRIES = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "momentum_buffer",
        "square_avg", "grad_avg", "acc_delta", "exp_inf", "sum", "step", "fp32_param", "param", "master_param",
    }
)  # fmt: skip
"""Names of an optimizer's state entries; used only if no weight's name distinguishes the two orders."""
_MASTERS = frozenset({"fp32_param", "param", "master_param"})

_OWNED = re.compile(r"^((?:.*\.)?optim(?:izer)?(?:_\d+)?)\.(state|param_groups|distributed)\.(.+)$")
_STEP_KEYS = ("global_step", "iteration", "step")
_HOLDERS_OF_STEP = ("train_state", "trainer_state", "training_state", "common_state", "app", "trainer", "state")
"""Where frameworks keep a step counter that is not at the top: torchtitan, Megatron, torch's own tutorial."""


def sections_of(
    values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], unsafe_globals: tuple[str, ...], name: str
) -> FileContents:
    """Sort a distributed checkpoint's entries, by flattened name and keys of the nested state dict, into parts."""
    for key, path in paths.items():
        if len(path) > MAX_DEPTH:
            raise LimitExceededError(f"{name}: nesting of {key[:200]!r}", MAX_DEPTH, len(path))
    if sum(len(paths.get(key, ())) for key in values) > MAX_NODES:
        raise LimitExceededError(f"{name}: values", MAX_NODES, MAX_NODES + 1)
    tree = nest(values, paths, name)
    master_weights = _gather(tree, name)
    require_finite_tree(tree, name)
    loose = {key: value for key, value in tree.items() if isinstance(value, StoredTensor | Skipped)}
    sections = classify_contents(Saved({key: value for key, value in tree.items() if key not in loose}, unsafe_globals))
    if sections.global_step is None:
        sections.global_step = _step(tree)
    _place_loose(loose, sections)
    if master_weights:
        _put_beside(sections.models.setdefault(MASTER_GROUP, {}), master_weights, "master")
    return sections


def nest(values: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]], name: str) -> dict[Any, Any]:
    """Returns a state dict as it was before flattening; number keys become a list if no number is missing."""
    root: dict[Any, Any] = {}
    inner: dict[int, dict[Any, Any]] = {id(root): root}
    for key, value in values.items():
        node = root
        *above, last = paths.get(key, (key,))
        for step in above:
            if step not in node:
                child: dict[Any, Any] = {}
                node[step] = inner[id(child)] = child
            node = node[step]
            if id(node) not in inner:
                raise CheckpointError(f"{name} is corrupted: {key[:200]!r} lies inside another entry.")
        if last in node:
            raise CheckpointError(f"{name} is corrupted: {key[:200]!r} claims the place of another entry.")
        node[last] = value
    for node in reversed(inner.values()):  # deeper nodes came later
        for key, child in node.items():
            if id(child) in inner and set(child) == set(range(len(child))):
                node[key] = [child[i] for i in range(len(child))]
    for node in inner.values():
        _mend_optimizer(node, name)
    return root


def _mend_optimizer(node: dict[Any, Any], name: str) -> None:
    """Undo the effects of flattening on an optimizer: an empty state is lost, and parameters' numbers become text."""
    groups = node.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        return
    state = node.setdefault("state", {})
    listed = {pid for g in groups if isinstance(g["params"], list) for pid in g["params"] if type(pid) is int}
    if isinstance(state, list):
        node["state"] = dict(enumerate(state))
    elif isinstance(state, Mapping) and listed:
        numbers = {str(pid): pid for pid in listed}
        node["state"] = {numbers.get(pid, pid): entry for pid, entry in state.items()}
        if len(node["state"]) < len(state):
            raise CheckpointError(f"{name} is corrupted: two states of an optimizer claim the place of one parameter.")


def _gather(root: dict[Any, Any], name: str) -> dict[str, StoredTensor]:
    """Rebuild flattened optimizers, in place; returns their master copies of weights."""
    nodes = [node for node in (root, *root.values()) if isinstance(node, Mapping)]
    weights = {key for node in nodes for key, value in node.items() if isinstance(value, StoredTensor)}
    owned: dict[str, _Flat] = {}
    for owner, node in [*root.items(), ("", root)]:
        if isinstance(node, dict) and _is_flat(node):
            flat = owned[owner] = _Flat(weights, name)
            for key in list(node):
                kind, _, rest = key.partition(".")
                flat.take(kind, rest, node.pop(key))
            node.update(flat.state_dict())
    apart: dict[str, _Flat] = {}
    for key in list(root):
        match = _OWNED.match(key) if isinstance(key, str) else None
        if match is not None and apart.setdefault(match[1], _Flat(weights, name)).take(match[2], match[3], root[key]):
            del root[key]
    for owner, flat in apart.items():
        if flat.state:
            root[owner if owner not in root else f"{owner}.state"] = flat.state_dict()
    master_weights: dict[str, StoredTensor] = {}
    for owner, flat in (*owned.items(), *apart.items()):
        _put_beside(master_weights, flat.master_weights, owner)
    return master_weights


def _put_beside(there: dict[str, StoredTensor], more: Mapping[str, StoredTensor], owner: str) -> None:
    """Add more copies; a name that is taken gets the owner as a prefix, so that neither hides the other."""
    for name, copy in more.items():
        free = name
        while free in there:
            free = f"{owner or 'optimizer'}.{free}"
        there[free] = copy


def _is_flat(node: Mapping[Any, Any]) -> bool:
    """Whether a mapping is an optimizer's state dict that torch has flattened by parameter and entry."""
    kinds = {key.partition(".")[0] if isinstance(key, str) and "." in key else None for key in node}
    return kinds == {"state", "param_groups"}


class _Flat:
    """One optimizer whose entries arrive one by one under long names; `weights` are names of the weights beside it."""

    def __init__(self, weights: set[Any], name: str) -> None:
        self._weights = weights
        self._name = name
        self._settings: dict[str, dict[str, Any]] = {}
        self.state: dict[str, dict[str, Any]] = {}
        self.master_weights: dict[str, StoredTensor] = {}

    def take(self, kind: str, rest: str, value: Any) -> bool:
        """Take an entry; False if it is not understood."""
        if kind == "param_groups":
            parameter, _, setting = rest.rpartition(".")
            self._settings.setdefault(parameter, {})[setting] = value
            return True
        if kind == "distributed":
            if not isinstance(value, StoredTensor | Skipped):
                return False
            parameter, _, entry = f"{kind}.{rest}".rpartition(".")
        else:
            parameter, entry = self._split(rest)
        if not parameter or not entry:
            return False
        if entry in _MASTERS and isinstance(value, StoredTensor):
            _put_beside(self.master_weights, {parameter: value}, entry)
            return True
        state = self.state.setdefault(parameter, {})
        if entry in state:
            raise CheckpointError(f"{self._name} is corrupted: {rest[:200]!r} claims the place of another entry.")
        state[entry] = value
        return True

    def _split(self, rest: str) -> tuple[str, str]:
        """Returns parameter and entry; torch puts the entry last, Megatron first."""
        parameter, _, entry = rest.rpartition(".")
        first, _, others = rest.partition(".")
        if parameter in self._weights or (others not in self._weights and first not in _ENTRIES):
            return parameter, entry
        return (parameter, entry) if others not in self._weights and entry in _ENTRIES else (others, first)

    def state_dict(self) -> dict[str, Any]:
        """Returns the form of `Optimizer.state_dict()`, parameters by name; equal settings form one group."""
        groups: dict[Any, dict[str, Any]] = {}
        for parameter, settings in self._settings.items():
            kept = {name: value for name, value in settings.items() if name != "params"}
            key = tuple((name, _hashable(kept[name])) for name in sorted(kept))
            group = groups.setdefault(key, {**kept, "params": []})
            group["params"].append(parameter)
        return {"state": self.state, "param_groups": list(groups.values())}


def _hashable(value: Any) -> Any:
    """Returns a plain setting, or a pair of such, as a key; anything else only equals itself."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return tuple(part if isinstance(part, str | int | float) else id(part) for part in value)
    return value if isinstance(value, str | int | float) or value is None else id(value)


def _place_loose(loose: Mapping[str, StoredTensor | Skipped], sections: FileContents) -> None:
    """Add tensors at the top: they are the model, unless another state dict has a usual name or more values."""
    sections.skipped += [replace(v, what=k) for k, v in loose.items() if isinstance(v, Skipped)]
    tensors = {key: value for key, value in loose.items() if isinstance(value, StoredTensor)}
    if not tensors:
        return
    size = _values_in(tensors)
    rivals = {path: model for path, model in sections.models.items() if not is_average(path)}
    if not any(path.rpartition(".")[2] in MAIN_KEYS or _values_in(m) > size for path, m in rivals.items()):
        sections.models = {"": tensors, **sections.models}
    else:
        sections.others.update(tensors)


def _values_in(model: Mapping[str, StoredTensor]) -> int:
    """Returns the number of floating-point elements: a model has some."""
    return sum(tensor.numel for tensor in model.values() if tensor.dtype.is_floating_point)


def _step(tree: Mapping[Any, Any]) -> int | None:
    """Returns the step counter, which is at the top as a tensor or one level below."""
    holders = [tree]
    for key, value in tree.items():
        if isinstance(key, str) and key.partition("/")[0] in _HOLDERS_OF_STEP:
            held = value[0] if isinstance(value, list) and len(value) == 1 else value
            holders += [held] if isinstance(held, Mapping) else []
    for holder in holders:
        for key in _STEP_KEYS:
            counted = number(holder.get(key))
            if counted is not None and 0 <= counted < 2.0**53 and counted == int(counted):
                return int(counted)
    return None
