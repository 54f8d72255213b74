"""Tells the parts of a saved object: weights, optimizer, loss scaler, step counter.

People choose their own names. Parts are therefore recognised by their form first (an optimizer has `param_groups` and
`state`, a GradScaler has its five keys wherever it lies), and by name only if the form says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ampdoctor.checkpoints.contents.below import Below, entries_of, is_optimizer, join, leaves
from ampdoctor.checkpoints.contents.lost_numbers import lost_numbers
from ampdoctor.checkpoints.contents.rank_shards import with_local_shards
from ampdoctor.checkpoints.contents.scalers import MEGATRON_DEFAULTS, is_own_field, number, scaler_fields
from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.checkpoints.pickles.objects import (
    Search,
    fields_of,
    is_module,
    optimizer_fields,
    read_module,
    tensors_inside,
)
from ampdoctor.checkpoints.pickles.tree import Saved
from ampdoctor.checkpoints.storage.stored import SparseTensor, StoredTensor
from ampdoctor.evidence.checkpoint_stats import LostNumbers, TensorRole
from ampdoctor.evidence.report import Skipped

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
"""Usual keys of the main model's state dict, the most telling first."""

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
"""Where half-precision optimizers keep the fp32 copies that they step, group after group: DeepSpeed, Apex, Megatron."""
_MEGATRON_MODEL = re.compile(r"model\d*")
"""`model`, or one for each stage of an interleaved pipeline."""
_MASTER = re.compile(r"(^|_)(fp32|master)_|^fp32$")
MASTER_GROUP = "fp32"
"""The group of an optimizer's fp32 copies of half-precision weights."""


@dataclass(slots=True)
class Sections:
    """The parts of one file.

    Attributes:
        models: State dicts by their path in the file ("model", "ema"; "" for a flat file), entries in stored order.
        optimizers: Optimizer state dicts by path.
        scalers: Loss scalers by path, as they were saved.
        masters: fp32 copies of the parameters that an optimizer steps, by the optimizer's path: a list for each group.
        others: Tensors that belong to none of these, by path.
        global_step: The stored step counter, if one was found under a usual name.
        loss: The loss stored beside the weights, if one was found under its usual name.
        skipped: Tensors that are not read.
        buffers: Names of a model's buffers by its path, if the file tells them.
        foreign: Names of the file's classes and functions that `torch.load(weights_only=True)` refuses.
        ordered: True if `models`' entries are in the order of `named_parameters()`; safetensors sorts them.
        search: Counts the work of searching its objects.
        places: Paths in use, each with the number of entries that print like it.
        tree: The saved object as a whole; None where the file holds tensors alone.
        lost: Its numbers outside of all these that are not finite.
    """

    models: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    optimizers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    scalers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    masters: dict[str, list[list[StoredTensor]]] = field(default_factory=dict)
    others: dict[str, StoredTensor] = field(default_factory=dict)
    global_step: int | None = None
    loss: float | None = None
    skipped: list[Skipped] = field(default_factory=list)
    foreign: tuple[str, ...] = ()
    buffers: dict[str, frozenset[str]] = field(default_factory=dict)
    ordered: bool = True
    search: Search = field(default_factory=Search, repr=False)
    places: dict[str, int] = field(default_factory=dict, repr=False)
    tree: Any = field(default=None, repr=False)
    lost: tuple[LostNumbers, ...] = ()

    def place(self, path: str, key: object) -> str:
        """Returns the path of an entry; keys that print alike (1 and "1", two objects) still get two paths."""
        told = at = join(path, key)
        while at in self.places:  # seldom twice: the counter belongs to the requested path
            self.places[told] += 1
            at = f"{told}#{self.places[told]}"
        self.places[at] = 1
        return at


def sort_out(saved: Saved) -> Sections:
    """Returns the parts of a saved object."""
    tree = _without_nests(with_local_shards(saved.tree))
    sections = Sections(foreign=saved.foreign, tree=tree)
    _visit(tree, "", sections, Below())
    losses: dict[str, float] = {}
    if isinstance(tree, Mapping):
        sections.global_step = _step_of(tree)
        losses = {key: loss for key in _LOSS_KEYS if (loss := number(tree.get(key))) is not None}
        sections.loss = next(iter(losses.values()), None)
        settings = {key: value for key, value in fields_of(tree.get("args")).items() if key in MEGATRON_DEFAULTS}
        sections.scalers = {path: {**settings, **saved} for path, saved in sections.scalers.items()}
    sections.lost = tuple(lost_numbers(tree, dict.fromkeys(list(losses)[:1]), _examined(sections)))
    return sections


def _examined(sections: Sections) -> set[int]:
    """Returns the addresses of the tensors that belong to a part."""
    masters = (tensor for groups in sections.masters.values() for group in groups for tensor in group)
    models = (tensor for model in sections.models.values() for tensor in model.values())
    states = (tensor for node in sections.optimizers.values() for _, tensor in tensors_in(node["state"]))
    return {id(tensor) for some in (models, sections.others.values(), masters, states) for tensor in some}


def main_model(paths: Sequence[str]) -> str | None:
    """Returns which of several state dicts is the model: the one under the most telling key, else the first."""
    by_key = [p for key in ("", *MAIN_KEYS) for p in paths if p.rpartition(".")[2] == key]
    return next(iter([*by_key, *paths]), None)


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Maps stored names to names as in `named_parameters()` of the bare model.

    `_orig_mod.` (torch.compile) is removed everywhere. A leading `module.` (DataParallel, DDP) is removed only if every
    name has it, because a model may have a child of that name beside others.
    """
    cleaned = {name: name.replace("_orig_mod.", "") for name in names}
    while cleaned and all(c.startswith("module.") for c in cleaned.values()):
        cleaned = {name: c.removeprefix("module.") for name, c in cleaned.items()}
    return cleaned


def role_of(name: str) -> TensorRole:
    """Returns `weight` or `buffer`, by the entry's name: a state dict does not say which of its tensors are buffers."""
    entry = name.rpartition(".")[2]
    return "buffer" if entry in _BUFFER_ENTRIES or _MASK_ENTRY.search(entry) else "weight"


def is_average(path: str) -> bool:
    """Does a path name an averaged copy: "ema", "model_ema", "callbacks.EMACallback.state_dict"?"""
    return any(_AVERAGE.search(part) for part in path.lower().split("."))


def is_master(path: str) -> bool:
    """Does a path name an optimizer's fp32 copies of the weights: "optimizer.fp32_groups_flat"?"""
    return any(_MASTER.search(part) for part in path.split("."))


def tensors_in(node: Any, path: str = "") -> Iterator[tuple[str, StoredTensor | Skipped]]:
    """Yields every tensor below a node with its dotted path, in stored order."""
    return leaves(node, path, (StoredTensor, Skipped))


def _stored_in(node: Any, path: str) -> Iterator[tuple[str, StoredTensor]]:
    return leaves(node, path, (StoredTensor,))


def _objects_in(node: Any, path: str) -> Iterator[tuple[str, Inert]]:
    return leaves(node, path, (Inert,))


def _visit(node: Any, path: str, into: Sections, below: Below) -> None:
    if isinstance(node, StoredTensor):
        if node.shape or not path:  # a single number belongs to a log or a callback, like plain numbers
            into.others[path or "tensor"] = node
    elif isinstance(node, Inert):
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


def _visit_sequence(node: Sequence[Any], path: str, into: Sections, below: Below) -> None:
    if is_average(path) and node and all(isinstance(value, StoredTensor) for value in node):
        into.models[path] = {str(index): value for index, value in enumerate(node)}
        return
    for index, value in entries_of(node):
        if below.part(value):
            _visit(value, into.place(path, index), into, below)


def _visit_mapping(node: Mapping[Any, Any], path: str, into: Sections, below: Below) -> None:
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
        taken = _take_masters(node, path, into)
        for key, value in node.items():
            if key not in taken:
                _visit_entry(key, value, path, into, below)


def _visit_entry(key: Any, value: Any, path: str, into: Sections, below: Below) -> None:
    random = _is_random(key) and isinstance(value, StoredTensor | Skipped | Inert | Mapping | list | tuple)
    if random and not any(_is_random(part) for part in path.split(".")):
        _visit_random(value, into.place(path, key), into, below)
    elif below.part(value):
        _visit(value, into.place(path, key), into, below)


def _visit_random(node: Any, path: str, into: Sections, below: Below) -> None:
    """Skip what is named a random state, which holds integers; anything in it that could be trained still counts."""
    inner = Sections(search=into.search, places=into.places)
    _visit(node, path, inner, below)
    models = {at: model for at, model in inner.models.items() if any(_is_real(t) for t in model.values())}
    others = {at: tensor for at, tensor in inner.others.items() if _is_real(tensor)}
    if not (models or others or inner.optimizers or inner.scalers or inner.masters):
        into.skipped.append(Skipped(what=path, reason="random state"))
        return
    into.models.update(models)
    into.others.update(others)
    into.optimizers.update(inner.optimizers)
    into.scalers.update(inner.scalers)
    into.masters.update(inner.masters)
    into.buffers.update(inner.buffers)
    into.skipped.extend(inner.skipped)


def _is_random(key: Any) -> bool:
    return isinstance(key, str) and _RANDOM.search(key) is not None


def _is_real(tensor: StoredTensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _visit_object(node: Inert, path: str, into: Sections) -> None:
    """Visit an object of some class: a whole module is a model; in any other, the tensors count wherever they lie."""
    if is_module(node):
        content = read_module(node, into.search)
        into.models[path] = content.tensors
        into.buffers[path] = content.buffers
        into.skipped.extend(replace(s, what=join(path, s.what)) for s in content.skipped)
        return
    optimizer = optimizer_fields(node, into.search)
    if optimizer is not None:
        _take_optimizer(optimizer, path, into, Below())
        return
    scaler = scaler_fields(node)
    if scaler:
        into.scalers[path] = scaler
    for at, tensor in tensors_inside(node, into.search):
        if isinstance(tensor, Skipped):
            into.skipped.append(replace(tensor, what=join(path, at) if at else path or "tensor"))
        elif scaler is None or not is_own_field(at, tensor):
            into.others[into.place(path, at or "tensor")] = tensor


def _take_optimizer(node: Mapping[Any, Any], path: str, into: Sections, below: Below) -> None:
    into.optimizers[path] = node
    for key, value in node.items():
        if key == "param_groups":
            into.others.update((at, t) for at, t in _stored_in(value, join(path, key)) if t.shape)
        elif key != "state":  # saved into the same dict: a model, fp32 copies
            _visit_entry(key, value, path, into, below)
    unread = [(at, t) for at, t in tensors_in(node["state"], join(path, "state")) if isinstance(t, Skipped)]
    into.skipped.extend(replace(t, what=at) for at, t in unread)
    for at, moment in _objects_in(node["state"], join(path, "state")):  # tensor subclasses of 8-bit optimizers
        _visit_object(moment, at, into)
    if number(node.get("loss_scale")) is not None:  # fairseq's half-precision optimizer, which is its own scaler
        into.scalers[path] = {"loss_scale": node["loss_scale"], "unskipped": 0}


def _take_masters(node: Mapping[Any, Any], path: str, into: Sections) -> set[str]:
    """Take fp32 copies beside the only optimizer, which steps them; returns the handled keys."""
    steppers = [key for key, value in node.items() if is_optimizer(value)]
    for key in _MASTERS:
        groups = node.get(key)
        if len(steppers) != 1 or not isinstance(groups, list | tuple):
            continue
        if all(isinstance(g, list | tuple) and all(isinstance(t, StoredTensor) for t in g) for g in groups):
            into.masters[join(path, steppers[0])] = [list(group) for group in groups]
            return {key}
    return set()


def _take_model(node: Mapping[Any, Any], path: str, into: Sections, below: Below) -> None:
    into.models[path] = {key: value for key, value in node.items() if isinstance(value, StoredTensor)}
    for key, value in node.items():
        if not isinstance(value, StoredTensor):
            _visit_entry(key, value, path, into, below)


def _is_state_dict(node: Mapping[Any, Any], path: str, below: Below) -> bool:
    """Does a mapping map names to tensors? A container with tensors inside is another part of the checkpoint.

    A few scalars are a log or a callback's best score, unless a model is expected at this place.
    """
    if not all(isinstance(key, str) for key in node):
        return False
    values = list(node.values())
    tensors = [v for v in values if isinstance(v, StoredTensor)]
    expected = not path or path.rpartition(".")[2] in MAIN_KEYS
    if not tensors or (not expected and not any(t.shape for t in tensors)):
        return False
    return not any(below.tensor(v) for v in values if not isinstance(v, StoredTensor | Skipped))


def _without_nests(tree: Any) -> Any:
    """Flatten a Megatron file's models: `{"language_model": {"embedding": {"weight": ...}}}` is one state dict.

    Elsewhere a dict of dicts is several models (`{"generator": ..., "discriminator": ...}`).
    """
    if not isinstance(tree, Mapping) or not tree.keys() >= {"checkpoint_version", "args"}:
        return tree
    chunks = [key for key in tree if isinstance(key, str) and _MEGATRON_MODEL.fullmatch(key)]
    return {**tree, **{key: dict(tensors_in(tree[key])) for key in chunks if isinstance(tree[key], Mapping)}}


def _step_of(tree: Mapping[Any, Any]) -> int | None:
    """Returns the step counter at the top, or at a framework's place for it."""
    holders = [tree, *(tree.get(key) for key in _STEP_HOLDERS)]
    rows = [holder[-1] if isinstance(holder, list) and holder else holder for holder in holders]
    found = (row.get(key) for row in rows if isinstance(row, Mapping) for key in _STEP_KEYS)
    return next((step for step in found if type(step) is int and 0 <= step < 2**63), None)
