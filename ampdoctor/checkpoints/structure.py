"""Which part of a saved object is what: weights, optimizer, loss scaler, step counter.

People save under names of their own choosing, so the parts are recognised by their shape first (an optimizer has
`param_groups` and `state`, a GradScaler has its five keys wherever it lies) and by name only where the shape says
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampdoctor.checkpoints.inert import Inert
from ampdoctor.checkpoints.objects import Search, is_module, read_module, tensors_inside
from ampdoctor.checkpoints.stored import StoredTensor
from ampdoctor.checkpoints.tree import Saved
from ampdoctor.evidence.checkpoint import ScalerState, TensorRole
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
"""Keys under which the main model's state dict is usually saved, most telling first."""

_SCALER_KEYS = frozenset({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
_APEX_KEYS = frozenset({"loss_scale", "unskipped"})
_STEP_KEYS = ("global_step", "global_steps", "num_updates", "iteration", "iter", "step")

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

_AVERAGE = re.compile(r"(^|_)(ema|shadow|swa|averaged)(_|$)")


@dataclass(slots=True)
class Sections:
    """The parts of one file.

    Attributes:
        models: State dicts by their path in the file ("model", "ema"; "" for a flat file), entries in stored order.
        optimizers: Optimizer state dicts by path.
        scalers: GradScaler-like states by path, as they were saved.
        others: Tensors that belong to none of these, by path.
        global_step: The stored step counter, if one was found under a usual name.
        loss: The loss stored beside the weights, if one was found under its usual name.
        skipped: Tensors that are not read.
        buffers: For models whose file tells, by path: the names of their buffers.
        foreign: Names of classes and functions that the file asks for and `torch.load(weights_only=True)` refuses.
        ordered: Whether the order of `models`' entries is that of `named_parameters()`; safetensors sorts them.
        search: What looking into its objects has taken.
    """

    models: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    optimizers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    scalers: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    others: dict[str, StoredTensor] = field(default_factory=dict)
    global_step: int | None = None
    loss: float | None = None
    skipped: list[Skipped] = field(default_factory=list)
    foreign: tuple[str, ...] = ()
    buffers: dict[str, frozenset[str]] = field(default_factory=dict)
    ordered: bool = True
    search: Search = field(default_factory=Search, repr=False)


def sort_out(saved: Saved) -> Sections:
    """The parts of a saved object."""
    tree = saved.tree
    sections = Sections(foreign=saved.foreign)
    _visit(tree, "", sections, {})
    if isinstance(tree, Mapping):
        sections.global_step = next(
            (tree[k] for k in _STEP_KEYS if type(tree.get(k)) is int and 0 <= tree[k] < 2**63), None
        )
        sections.loss = next((loss for k in _LOSS_KEYS if (loss := number(tree.get(k))) is not None), None)
    return sections


def main_model(paths: Sequence[str]) -> str | None:
    """Which of several state dicts is the model: the one under the most telling key, else the first."""
    by_key = [p for key in ("", *MAIN_KEYS) for p in paths if p.rpartition(".")[2] == key]
    return next(iter([*by_key, *paths]), None)


def clean_names(names: Sequence[str]) -> dict[str, str]:
    """Stored name -> name as in `named_parameters()` of the bare model.

    `_orig_mod.` (torch.compile) goes wherever it stands; a leading `module.` (DataParallel, DDP) only if every name has
    it, because a model may well have one child of that name beside others.
    """
    cleaned = {name: name.replace("_orig_mod.", "") for name in names}
    while cleaned and all(c.startswith("module.") for c in cleaned.values()):
        cleaned = {name: c.removeprefix("module.") for name, c in cleaned.items()}
    return cleaned


def role_of(name: str) -> TensorRole:
    """`weight` or `buffer`, by the entry's name: a state dict does not say which of its tensors are buffers."""
    entry = name.rpartition(".")[2]
    return "buffer" if entry in _BUFFER_ENTRIES or _MASK_ENTRY.search(entry) else "weight"


def scaler_state(saved: Mapping[str, Any], key: str, file: str) -> ScalerState | None:
    """A saved scaler as numbers; None where one of its values is no number."""
    if saved.keys() >= _APEX_KEYS:
        scale, tracker = number(saved["loss_scale"]), number(saved["unskipped"])
        return None if scale is None else ScalerState(scale=scale, growth_tracker=_count(tracker), key=key, file=file)
    values = {k: number(saved[k]) for k in _SCALER_KEYS}
    if any(v is None for v in values.values()):
        return None
    return ScalerState(
        scale=values["scale"] or 0.0,
        growth_factor=values["growth_factor"] or 0.0,
        backoff_factor=values["backoff_factor"] or 0.0,
        growth_interval=_count(values["growth_interval"]),
        growth_tracker=_count(values["_growth_tracker"]),
        key=key,
        file=file,
    )


def number(value: Any) -> float | None:
    """A Python number or a one-element stored tensor as a float; None for anything else.

    Raises:
        CheckpointError: The tensor's bytes cannot be read.
    """
    if isinstance(value, StoredTensor):
        return float(value.load().double().item()) if value.numel == 1 and not value.dtype.is_complex else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 2.0**1023 or isinstance(value, float) else None
    return None


def is_average(path: str) -> bool:
    """Whether a state dict's path says that it is an averaged copy: "ema", "model_ema", "ema_state_dict"."""
    return _AVERAGE.search(path.rpartition(".")[2].lower()) is not None


def tensors_in(node: Any, path: str = "") -> Iterator[tuple[str, StoredTensor | Skipped]]:
    """Every tensor below a node with its dotted path, in stored order."""
    if isinstance(node, StoredTensor | Skipped):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from tensors_in(value, _join(path, key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from tensors_in(value, _join(path, index))


def is_optimizer(node: Any) -> bool:
    """Whether a mapping is an optimizer's state dict."""
    return (
        isinstance(node, Mapping)
        and isinstance(node.get("param_groups"), list | tuple)
        and isinstance(node.get("state"), Mapping)
    )


def _visit(node: Any, path: str, into: Sections, holders: dict[int, bool]) -> None:
    if isinstance(node, StoredTensor):
        into.others[path or "tensor"] = node
    elif isinstance(node, Inert):
        _visit_object(node, path, into)
    elif isinstance(node, Skipped):
        into.skipped.append(Skipped(what=path or "tensor", reason=node.reason))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _visit(value, _join(path, index), into, holders)
    elif isinstance(node, Mapping):
        _visit_mapping(node, path, into, holders)


def _visit_mapping(node: Mapping[Any, Any], path: str, into: Sections, holders: dict[int, bool]) -> None:
    if node.keys() >= _SCALER_KEYS or node.keys() >= _APEX_KEYS:
        into.scalers[path] = node
    elif is_optimizer(node):
        into.optimizers[path] = node
        unread = [(at, t) for at, t in tensors_in(node["state"], _join(path, "state")) if isinstance(t, Skipped)]
        into.skipped.extend(Skipped(what=at, reason=t.reason) for at, t in unread)
    elif _is_state_dict(node, holders):
        _take_model(node, path, into)
    else:
        for key, value in node.items():
            _visit(value, _join(path, key), into, holders)


def _visit_object(node: Inert, path: str, into: Sections) -> None:
    """An object of some class: a whole module is a model; of any other the tensors count, wherever they lie in it."""
    if is_module(node):
        content = read_module(node, into.search)
        into.models[path] = content.tensors
        into.buffers[path] = content.buffers
        into.skipped.extend(Skipped(what=_join(path, s.what), reason=s.reason) for s in content.skipped)
        return
    for at, tensor in tensors_inside(node, into.search):
        if isinstance(tensor, Skipped):
            into.skipped.append(Skipped(what=_join(path, at) if at else path or "tensor", reason=tensor.reason))
        else:
            into.others[_join(path, at) if at else path or "tensor"] = tensor


def _take_model(node: Mapping[Any, Any], path: str, into: Sections) -> None:
    into.models[path] = {key: value for key, value in node.items() if isinstance(value, StoredTensor)}
    for key, value in node.items():
        if isinstance(value, Skipped):
            into.skipped.append(Skipped(what=_join(path, key), reason=value.reason))


def _is_state_dict(node: Mapping[Any, Any], holders: dict[int, bool]) -> bool:
    """A mapping of names to tensors; a container with tensors inside is another part of the checkpoint."""
    if not all(isinstance(key, str) for key in node):
        return False
    values = list(node.values())
    tensors = sum(isinstance(v, StoredTensor) for v in values)
    return tensors > 0 and not any(_holds_tensor(v, holders) for v in values if isinstance(v, Mapping | list | tuple))


def _holds_tensor(node: Any, holders: dict[int, bool]) -> bool:
    """Whether a tensor lies below; known once for each container, which `holders` has by address.

    Asked at every level of a nest, a search without this memory would take the square of its size.
    """
    if isinstance(node, StoredTensor | Skipped):
        return True
    if not isinstance(node, Mapping | list | tuple):
        return False
    if id(node) not in holders:
        values = node.values() if isinstance(node, Mapping) else node
        holders[id(node)] = any(_holds_tensor(value, holders) for value in values)
    return holders[id(node)]


def _count(value: float | None) -> int:
    """A counter that was saved as any number; what is no finite number counts as 0."""
    return int(value) if value is not None and abs(value) < 2.0**63 else 0


def _join(path: str, key: object) -> str:
    text = str(key) if isinstance(key, str | int | float | bool) or key is None else type(key).__name__
    return f"{path}.{text}" if path else text
