"""Sorts the contents of a saved object: weights, averages, optimizers, loss scalers, and the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.checkpoints.pickled_objects import (
    Saved,
    Search,
    fields_of,
    is_module,
    numpy_array,
    optimizer_fields,
    parts_of,
    read_module,
    tensors_inside,
)
from ampdoctor.checkpoints.scalers import MEGATRON_DEFAULTS, is_own_field, number, scaler_fields
from ampdoctor.checkpoints.stored_tensor import SparseTensor, StoredTensor, unread
from ampdoctor.checkpoints.unpickler import PickledObject
from ampdoctor.evidence.checkpoint_stats import LostNumbers, TensorRole
from ampdoctor.evidence.report import Skipped

# -- the contents of a tree's containers, determined once per container, even if it appears in many places --
#
# A tuple of 20,000 numbers costs a file 40 kB and can appear in 200 places for 1 kB more.

_PLAIN = frozenset({int, float, str, bool, bytes, type(None)})
"""Types that are never part of a checkpoint. Only the type is tested, because there are millions of such values."""


def is_optimizer(node: Any) -> bool:
    """Whether a mapping is an optimizer's state dict."""
    return (
        isinstance(node, Mapping)
        and isinstance(node.get("param_groups"), list | tuple)
        and isinstance(node.get("state"), Mapping)
    )


def entries_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a container's keys or positions, with the values that may be or hold a part of a checkpoint."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node)
    return ((key, value) for key, value in pairs if type(value) not in _PLAIN)


class ContainsCache:
    """Caches whether a container holds tensors, by `id()`: the tree must stay alive."""

    def __init__(self) -> None:
        self._tensors: dict[int, bool] = {}
        self._parts: dict[int, bool] = {}

    def tensor(self, node: Any) -> bool:
        """Whether it is or holds a tensor or a whole module."""
        if isinstance(node, StoredTensor | Skipped) or is_module(node):
            return True
        if not isinstance(node, Mapping | list | tuple):
            return False
        if id(node) not in self._tensors:
            self._tensors[id(node)] = any(self.tensor(value) for _, value in entries_of(node))
        return self._tensors[id(node)]

    def part(self, node: Any) -> bool:
        """Whether it is or holds any reported part: a tensor, an object, an optimizer, a scaler."""
        if type(node) in _PLAIN:
            return False
        if isinstance(node, StoredTensor | Skipped | PickledObject):
            return True
        if not isinstance(node, Mapping | list | tuple):
            return False
        if id(node) not in self._parts:
            itself = is_optimizer(node) or (isinstance(node, Mapping) and scaler_fields(node) is not None)
            self._parts[id(node)] = itself or any(self.part(value) for _, value in entries_of(node))
        return self._parts[id(node)]


def leaves(
    node: Any, path: str, kinds: tuple[type, ...], known_empty: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields every value of these kinds with its dotted path; `known_empty` are `id`s of containers without such."""
    known_empty = set() if known_empty is None else known_empty
    if isinstance(node, kinds):
        yield path, node
    elif isinstance(node, Mapping | list | tuple) and id(node) not in known_empty:
        nothing = True
        for key, value in entries_of(node):
            if id(value) in known_empty:
                continue
            for found in leaves(value, join(path, key), kinds, known_empty):
                nothing = False
                yield found
        if nothing:
            known_empty.add(id(node))


def join(path: str, key: object) -> str:
    """Returns the path of an entry."""
    text = str(key) if isinstance(key, str | int | float | bool) or key is None else type(key).__name__
    return f"{path}.{text}" if path else text


# -- NaN and infinite numbers that belong to no examined tensor --
#
# A loss, a metric, a learning rate in a schedule: plain values, tensors of one element, or a NumPy array's bytes.

_PLAIN_NUMBERS = frozenset({int, str, bool, bytes, type(None)})


def lost_numbers(tree: Any, told: Mapping[str, Any], examined: Collection[int]) -> Iterator[LostNumbers]:
    """Yields the numbers that are not finite, in stored order, but for `told` ones at the top and `examined` ones."""
    seen: set[int] = set()
    pending: list[tuple[Any, str]] = [(tree, "")]
    while pending:
        node, path = pending.pop()
        if isinstance(node, StoredTensor):
            yield from _lost(path or "tensor", [_number(node, examined)])
            continue
        if not isinstance(node, Mapping | list | tuple | PickledObject) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, PickledObject) and (array := numpy_array(node)) is not None:
            yield from _lost_in_array(path, array)
            continue
        apart: tuple[type, ...] = ()
        if isinstance(node, list | tuple):
            yield from _lost(path, [_number(part, examined) for part in node])
            apart = (float, StoredTensor)
        elif scaler_fields(node) is not None:  # AMP401 to AMP404 judge it
            apart = (float, StoredTensor)
        kept = [
            (key, part)
            for key, part in _parts(node)
            if type(part) not in _PLAIN_NUMBERS and not isinstance(part, apart)
        ]
        kept = kept if path else [(key, part) for key, part in kept if key not in told]
        for key, part in kept:
            if isinstance(part, float):
                yield from _lost(join(path, key), [part])
        pending.extend((part, join(path, key)) for key, part in reversed(kept) if not isinstance(part, float))


def _parts(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a container's parts with their keys, without an optimizer's groups, which AMP505 judges."""
    if isinstance(node, Mapping):
        yield from ((key, part) for key, part in node.items() if key != "param_groups" or not is_optimizer(node))
    elif not isinstance(node, PickledObject):
        yield from enumerate(node)
    elif not is_module(node):
        yield from ((key, part) for key, part in parts_of(node) if key != "param_groups")


def _number(node: Any, examined: Collection[int]) -> float | None:
    if isinstance(node, StoredTensor):
        alone = not node.shape and node.dtype.is_floating_point and id(node) not in examined
        return number(node) if alone else None
    return node if type(node) is float else None


def _lost(name: str, values: Sequence[float | None]) -> Iterator[LostNumbers]:
    numbers = [value for value in values if value is not None]
    nans, infs = sum(map(math.isnan, numbers)), sum(map(math.isinf, numbers))
    if nans or infs:
        yield LostNumbers(name=name, count=len(numbers), nans=nans, infs=infs, last=numbers[-1])


def _lost_in_array(name: str, array: NDArray[Any]) -> Iterator[LostNumbers]:
    if array.dtype.kind not in "fc":
        return
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if nans or infs:
        yield LostNumbers(name=name, count=array.size, nans=nans, infs=infs, last=float(np.abs(array[-1])))


MAIN_KEYS = (
    "model",
    "state_dict",
    "model_state_dict",
    "model_state",
    "module",
    "net",
    "network",
    "weights",
    "ema",
    "ema_state_dict",
)
"""Usual keys of the main model's state dict, the most specific first."""

_STEP_KEYS = ("global_step", "global_steps", "num_updates", "iteration", "iter", "iter_num", "step", "steps")
_STEP_HOLDERS = ("meta", "train_state", "trainer_state", "training_state", "extra_state", "optimizer_history")
"""Where frameworks keep a counter that is not at the top: mmengine, torchtitan, fairseq."""

_LOSS_KEYS = ("loss", "train_loss")

_BUFFER_ENTRIES = frozenset(
    {
        "running_mean", "running_var", "num_batches_tracked", "position_ids", "token_type_ids", "inv_freq",
        "masked_bias",
        "n_averaged",
        "min_val", "max_val", "min_vals", "max_vals", "alibi", "alibi_slopes", "cos_cached", "sin_cached",
    }
)  # fmt: skip
_MASK_ENTRY = re.compile(r"(^|_)mask$")
"""`attn_mask`, `mask`; not `mask_token`, which is a parameter."""

_AVERAGE = re.compile(r"(^|_)(ema|shadow|swa|polyak|averaged?|averaging)(_|$|callback|model|weights|params)")
_RANDOM = re.compile(r"(^|_)(rngs?|random(_rng)?_states?)(_|$)")

_MASTERS = ("fp32_groups", "fp32_from_fp16", "fp32_from_fp16_params", "fp32_from_float16_params")
"""Where half-precision optimizers keep their fp32 copies, group by group: DeepSpeed, Apex, Megatron."""
_MEGATRON_MODEL = re.compile(r"model\d*")
"""`model`, or one for each stage of an interleaved pipeline."""
_MASTER = re.compile(r"(^|_)(fp32|master)_|^fp32$")
MASTER_GROUP = "fp32"
"""The group of an optimizer's fp32 copies of half-precision weights."""


@dataclass(slots=True)
class FileContents:
    """The parts of one file. Keys are paths in the file ("model"; "" for a flat file), entries in stored order.

    `master_weights` are the fp32 copies that an optimizer steps, by its path: a list for each group. `places` are the
    paths in use, each with the number of entries that print like it.
    """

    models: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    optimizers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    scalers: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # as they were saved
    master_weights: dict[str, list[list[StoredTensor]]] = field(default_factory=dict)
    others: dict[str, StoredTensor] = field(default_factory=dict)  # tensors that belong to none of these
    global_step: int | None = None
    loss: float | None = None  # the one stored beside the weights
    skipped: list[Skipped] = field(default_factory=list)
    unsafe_globals: tuple[str, ...] = ()  # what `torch.load(weights_only=True)` refuses
    buffers: dict[str, frozenset[str]] = field(default_factory=dict)  # names of a model's buffers, if the file has them
    ordered: bool = True  # entries in the order of `named_parameters()`; safetensors sorts them
    search: Search = field(default_factory=Search, repr=False)
    places: dict[str, int] = field(default_factory=dict, repr=False)
    tree: Any = field(default=None, repr=False)  # the whole object; None for a file of tensors alone
    lost: tuple[LostNumbers, ...] = ()  # numbers outside of all these that are not finite

    def place(self, path: str, key: object) -> str:
        """Returns the path of an entry; keys that print alike (1 and "1", two objects) still get two paths."""
        told = at = join(path, key)
        while at in self.places:  # seldom twice: the counter belongs to the requested path
            self.places[told] += 1
            at = f"{told}#{self.places[told]}"
        self.places[at] = 1
        return at


def classify_contents(saved: Saved) -> FileContents:
    """Returns the parts of a saved object."""
    tree = _without_nests(_with_local_tensors(saved.tree, {}))
    sections = FileContents(unsafe_globals=saved.unsafe_globals, tree=tree)
    _visit(tree, "", sections, ContainsCache())
    losses: dict[str, float] = {}
    if isinstance(tree, Mapping):
        sections.global_step = _step_of(tree)
        losses = {key: loss for key in _LOSS_KEYS if (loss := number(tree.get(key))) is not None}
        sections.loss = next(iter(losses.values()), None)
        settings = {key: value for key, value in fields_of(tree.get("args")).items() if key in MEGATRON_DEFAULTS}
        sections.scalers = {path: {**settings, **saved} for path, saved in sections.scalers.items()}
    sections.lost = tuple(lost_numbers(tree, dict.fromkeys(list(losses)[:1]), _examined(sections)))
    return sections


def _with_local_tensors(node: Any, done: dict[int, Any]) -> Any:
    """Returns a tree with the rank's own tensor in place of each distributed one; a container is visited once."""
    if isinstance(node, PickledObject):
        return _local_tensor(node)
    if not isinstance(node, dict | list | tuple):
        return node
    if id(node) not in done:
        parts = list(node.values() if isinstance(node, dict) else node)
        made = [_with_local_tensors(part, done) for part in parts]
        changed = any(new is not old for new, old in zip(made, parts, strict=True))
        done[id(node)] = node if not changed else dict(zip(node, made, strict=True)) if isinstance(node, dict) else made
    return done[id(node)]


def _local_tensor(node: PickledObject) -> Any:
    """Returns the piece that FSDP saves in a rank's own file, in a `DTensor` or a `ShardedTensor` (FSDP1)."""
    if not node.name.startswith("torch.distributed.") or not node.name.endswith((".DTensor", ".ShardedTensor")):
        return node
    piece = fields_of(node).get("_local_tensor")
    if isinstance(node.state, tuple) and node.state and isinstance(node.state[0], list):
        if not node.state[0]:  # this rank has no piece
            return node
        piece = fields_of(node.state[0][0]).get("tensor") if len(node.state[0]) == 1 else None
    whole = isinstance(piece, StoredTensor | Skipped)
    return piece if whole else unread("a distributed tensor of a form that is not read")


def _examined(sections: FileContents) -> set[int]:
    master_weights = (tensor for groups in sections.master_weights.values() for group in groups for tensor in group)
    models = (tensor for model in sections.models.values() for tensor in model.values())
    states = (tensor for node in sections.optimizers.values() for _, tensor in tensors_in(node["state"]))
    return {id(tensor) for some in (models, sections.others.values(), master_weights, states) for tensor in some}


def main_model(paths: Sequence[str]) -> str | None:
    """Returns which of several state dicts is the model: the one under the most specific key, else the first."""
    by_key = [p for key in ("", *MAIN_KEYS) for p in paths if p.rpartition(".")[2] == key]
    return next(iter([*by_key, *paths]), None)


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Maps stored names to those of the bare model: no `_orig_mod.`, and no `module.` where every name begins so."""
    cleaned = {name: name.replace("_orig_mod.", "") for name in names}
    while cleaned and all(c.startswith("module.") for c in cleaned.values()):
        cleaned = {name: c.removeprefix("module.") for name, c in cleaned.items()}
    return cleaned


def role_of(name: str) -> TensorRole:
    """Guesses `weight` or `buffer` from the entry's name; a state dict does not say which tensors are buffers."""
    entry = name.rpartition(".")[2]
    return "buffer" if entry in _BUFFER_ENTRIES or _MASK_ENTRY.search(entry) else "weight"


def is_average(path: str) -> bool:
    """Whether a path names an averaged copy: "ema", "model_ema", "callbacks.EMACallback.state_dict"."""
    return any(_AVERAGE.search(part) for part in path.lower().split("."))


def is_master(path: str) -> bool:
    """Whether a path names an optimizer's fp32 copies of the weights: "optimizer.fp32_groups_flat"."""
    return any(_MASTER.search(part) for part in path.split("."))


def tensors_in(node: Any, path: str = "") -> Iterator[tuple[str, StoredTensor | Skipped]]:
    """Yields every tensor below a node with its dotted path, in stored order."""
    return leaves(node, path, (StoredTensor, Skipped))


def _objects_in(node: Any, path: str) -> Iterator[tuple[str, PickledObject]]:
    return leaves(node, path, (PickledObject,))


def _visit(node: Any, path: str, into: FileContents, below: ContainsCache) -> None:
    if isinstance(node, StoredTensor):
        if node.shape or not path:  # a single number belongs to a log or a callback, like plain numbers
            into.others[path or "tensor"] = node
    elif isinstance(node, PickledObject):
        _visit_object(node, path, into)
    elif isinstance(node, SparseTensor):
        into.others[into.place(path or "tensor", "values")] = node.values
        into.skipped.append(Skipped(what=path or "tensor", reason="a sparse tensor, of which the values are examined"))
    elif isinstance(node, Skipped):
        into.skipped.append(replace(node, what=path or "tensor"))
    elif isinstance(node, list | tuple):
        _visit_sequence(node, path, into, below)
    elif isinstance(node, Mapping):
        _visit_mapping(node, path, into, below)


def _visit_sequence(node: Sequence[Any], path: str, into: FileContents, below: ContainsCache) -> None:
    if is_average(path) and node and all(isinstance(value, StoredTensor) for value in node):
        into.models[path] = {str(index): value for index, value in enumerate(node)}
        return
    for index, value in entries_of(node):
        if below.part(value):
            _visit(value, into.place(path, index), into, below)


def _visit_mapping(node: Mapping[Any, Any], path: str, into: FileContents, below: ContainsCache) -> None:
    if is_optimizer(node):
        _take_optimizer(node, path, into, below)
        return
    scaler = scaler_fields(node)
    if scaler is not None:
        if scaler:
            into.scalers[path] = scaler
        for key, value in node.items():
            if not is_own_field(key, value):
                _visit_entry(key, value, path, into, below)
    elif _is_state_dict(node, path, below):
        _take_model(node, path, into, below)
    else:
        taken = _take_master_weights(node, path, into)
        for key, value in node.items():
            if key not in taken:
                _visit_entry(key, value, path, into, below)


def _visit_entry(key: Any, value: Any, path: str, into: FileContents, below: ContainsCache) -> None:
    random = _is_random(key) and isinstance(value, StoredTensor | Skipped | PickledObject | Mapping | list | tuple)
    if random and not any(map(_is_random, path.split("."))) and not _holds_numbers(value, into.search):
        into.skipped.append(Skipped(what=into.place(path, key), reason="random state"))
    elif below.part(value):
        _visit(value, into.place(path, key), into, below)


def _holds_numbers(node: Any, search: Search) -> bool:
    """Whether a tensor in what is named like a random state could be trained."""
    inside = (found for _, one in _objects_in(node, "") for found in tensors_inside(one, search))
    return any(
        isinstance(tensor, StoredTensor) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        for _, tensor in (*tensors_in(node), *inside)
    )


def _is_random(key: Any) -> bool:
    return isinstance(key, str) and _RANDOM.search(key) is not None


def _visit_object(node: PickledObject, path: str, into: FileContents) -> None:
    """Visit an object: a whole module is a model; in any other object, all tensors count."""
    if is_module(node):
        content = read_module(node, into.search)
        into.models[path] = content.tensors
        into.buffers[path] = content.buffers
        into.skipped.extend(replace(s, what=join(path, s.what)) for s in content.skipped)
        return
    optimizer = optimizer_fields(node, into.search)
    if optimizer is not None:
        _take_optimizer(optimizer, path, into, ContainsCache())
        return
    scaler = scaler_fields(node)
    if scaler:
        into.scalers[path] = scaler
    for at, tensor in tensors_inside(node, into.search):
        if isinstance(tensor, Skipped):
            into.skipped.append(replace(tensor, what=join(path, at) if at else path or "tensor"))
        elif scaler is None or not is_own_field(at, tensor):
            into.others[into.place(path, at or "tensor")] = tensor


def _take_optimizer(node: Mapping[Any, Any], path: str, into: FileContents, below: ContainsCache) -> None:
    into.optimizers[path] = node
    for key, value in node.items():
        if key == "param_groups":
            into.others.update((at, t) for at, t in leaves(value, join(path, key), (StoredTensor,)) if t.shape)
        elif key != "state":  # saved into the same dict: a model, fp32 copies
            _visit_entry(key, value, path, into, below)
    unread = [(at, t) for at, t in tensors_in(node["state"], join(path, "state")) if isinstance(t, Skipped)]
    into.skipped.extend(replace(t, what=at) for at, t in unread)
    for at, moment in _objects_in(node["state"], join(path, "state")):  # tensor subclasses of 8-bit optimizers
        _visit_object(moment, at, into)
    if number(node.get("loss_scale")) is not None:  # fairseq's half-precision optimizer, which is its own scaler
        into.scalers[path] = {"loss_scale": node["loss_scale"], "unskipped": 0}


def _take_master_weights(node: Mapping[Any, Any], path: str, into: FileContents) -> set[str]:
    """Take fp32 copies beside the only optimizer, which steps them; returns the handled keys."""
    steppers = [key for key, value in node.items() if is_optimizer(value)]
    for key in _MASTERS:
        groups = node.get(key)
        if len(steppers) != 1 or not isinstance(groups, list | tuple):
            continue
        if all(isinstance(g, list | tuple) and all(isinstance(t, StoredTensor) for t in g) for g in groups):
            into.master_weights[join(path, steppers[0])] = [list(group) for group in groups]
            return {key}
    return set()


def _take_model(node: Mapping[Any, Any], path: str, into: FileContents, below: ContainsCache) -> None:
    into.models[path] = {key: value for key, value in node.items() if isinstance(value, StoredTensor)}
    for key, value in node.items():
        if not isinstance(value, StoredTensor):
            _visit_entry(key, value, path, into, below)


def _is_state_dict(node: Mapping[Any, Any], path: str, below: ContainsCache) -> bool:
    """Whether a mapping maps names to tensors: not only scalars, as a log does, unless a model is expected here."""
    if not all(isinstance(key, str) for key in node):
        return False
    values = list(node.values())
    tensors = [v for v in values if isinstance(v, StoredTensor)]
    expected = not path or path.rpartition(".")[2] in MAIN_KEYS
    if not tensors or (not expected and not any(t.shape for t in tensors)):
        return False
    return not any(below.tensor(v) for v in values if not isinstance(v, StoredTensor | Skipped))


def _without_nests(tree: Any) -> Any:
    """Flatten a Megatron file's models; elsewhere a dict of dicts is several models."""
    if not isinstance(tree, Mapping) or not tree.keys() >= {"checkpoint_version", "args"}:
        return tree
    chunks = [key for key in tree if isinstance(key, str) and _MEGATRON_MODEL.fullmatch(key)]
    return {**tree, **{key: dict(tensors_in(tree[key])) for key in chunks if isinstance(tree[key], Mapping)}}


def _step_of(tree: Mapping[Any, Any]) -> int | None:
    holders = [tree, *(tree.get(key) for key in _STEP_HOLDERS)]
    rows = [holder[-1] if isinstance(holder, list) and holder else holder for holder in holders]
    found = (row.get(key) for row in rows if isinstance(row, Mapping) for key in _STEP_KEYS)
    return next((step for step in found if type(step) is int and 0 <= step < 2**63), None)


# -- averaged weights that share a flat state dict with the weights, under their own prefix --

LEAST_PAIRED = 0.5
"""Minimum share of a prefix's names that must also exist without it: a module called `shadow_net` has none."""


def averaged_names(names: Sequence[str]) -> frozenset[str]:
    """Returns names under a prefix that says average (`model_ema.`) if the weights exist, too, with or without dots."""
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        prefix, dot, rest = name.partition(".")
        if dot and is_average(prefix):
            by_prefix.setdefault(prefix, []).append(rest)
    if not by_prefix:
        return frozenset()
    own = [name for name in names if name.partition(".")[0] not in by_prefix]
    there = {_bare(name) for name in own} | {_bare(name.partition(".")[2]) for name in own}
    averaged = {
        prefix
        for prefix, rests in by_prefix.items()
        if sum(_bare(rest) in there for rest in rests) >= LEAST_PAIRED * len(rests)
    }
    return frozenset(name for name in names if name.partition(".")[0] in averaged)


def _bare(name: str) -> str:
    return name.replace(".", "")
