"""Names for the optimizer's numbered state: from the file, or by the order of the parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ampdoctor.checkpoints.file_contents import clean_names, role_of
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.checkpoints.unpickler import run_together
from ampdoctor.evidence.checkpoint_stats import TensorRole

_Shape = tuple[int, ...]
_Named = list[tuple[str, _Shape]]

_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "max_exp_avg_sq", "acc_delta", "prev",
    "grad_avg", "state1", "state2",
)  # fmt: skip
"""State entries with the parameter's shape, including bitsandbytes' 8-bit `state1` and `state2`."""
_FACTORED = (("exp_avg_sq_row", "exp_avg_sq_col", 0), ("row_var", "col_var", 1))
"""A second moment as the means of its rows and columns (Adafactor), without the reduced dimension or with size 1."""
_NO_MOMENTS = re.compile(r"step|t|k|(qmap|new_max|max|min)\d*|.*_step")
"""Counters, and the code books of 8-bit state. Its block scales (absmax) are part of the moments, like the codes."""


def name_parameters(
    optimizer: Mapping[str, Any], models: Sequence[Mapping[str, StoredTensor]], *, ordered: bool
) -> dict[Any, str]:
    """Maps the parameter ids of an optimizer's state to names that are certain; `models` are the most likely first."""
    groups = [_ids(group) for group in optimizer["param_groups"]]
    shapes = {pid: _shape_of(optimizer["state"].get(pid)) for ids in groups for pid in ids}
    given = _given_names(optimizer, groups)
    if given:
        return given
    candidates = [_weights(model) for model in models]
    if not ordered:
        return _match_by_shape(shapes, candidates[0]) if len(candidates) == 1 else {}
    for weights in candidates:
        exact = _match_whole(groups, shapes, weights)
        if exact is not None:
            return exact
    return _match_part(groups, shapes, candidates[0]) if len(candidates) == 1 else {}


def name_listed(copies: Mapping[str, StoredTensor], model: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns names for an average saved as a list in parameter order (`shadow_params`); {} if unsure."""
    if list(copies) != [str(index) for index in range(len(copies))]:
        return {}
    weights = _weights(model)
    if [shape for _, shape in weights] != [copy.shape for copy in copies.values()]:
        return {}
    return dict(zip(copies, (name for name, _ in weights), strict=True))


def role_of_state(entry: str) -> TensorRole:
    """Returns `other` for an entry without a value for each of the parameter's elements ("step"), else `moment`."""
    return "other" if _NO_MOMENTS.fullmatch(entry.rpartition(".")[2]) else "moment"


def _ids(group: Any) -> list[Any]:
    params = group.get("params") if isinstance(group, Mapping) else None
    ids = [p for p in params if isinstance(p, int | str)] if isinstance(params, list | tuple) else []
    return ids if run_together(p for p in ids if isinstance(p, int)) else []


def _given_names(optimizer: Mapping[str, Any], groups: list[list[Any]]) -> dict[Any, str]:
    """Returns names that the file itself holds: `param_names` of torch 2.6 and later, or string ids (FSDP, DCP)."""
    names: dict[Any, str] = {}
    for group, ids in zip(optimizer["param_groups"], groups, strict=True):
        listed = group.get("param_names") if isinstance(group, Mapping) else None
        if isinstance(listed, list | tuple) and len(listed) == len(ids):
            names.update({pid: name for pid, name in zip(ids, listed, strict=True) if isinstance(name, str)})
    names.update({pid: pid for pid in optimizer["state"] if isinstance(pid, str)})
    cleaned = clean_names(list(names.values()))
    return {pid: cleaned[name] for pid, name in names.items()}


def _shape_of(state: Any) -> _Shape | None:
    """Returns the shape of the parameter behind a state entry, or None if the state does not show it."""
    if not isinstance(state, Mapping):
        return None
    whole = next((t.shape for t in (state.get(key) for key in _ELEMENTWISE) if isinstance(t, StoredTensor)), None)
    if whole is not None:
        return whole
    for rows, columns, kept in _FACTORED:
        row, column = state.get(rows), state.get(columns)
        if isinstance(row, StoredTensor) and isinstance(column, StoredTensor) and column.shape:
            return (*row.shape[: len(row.shape) - kept], column.shape[-1])
    return None


def _weights(model: Mapping[str, StoredTensor]) -> _Named:
    """Returns the candidates for parameters: floating point, not known as buffers, tied tensors once."""
    names = clean_names(list(model))
    seen: set[object] = set()
    out: _Named = []
    for name, tensor in model.items():
        if (
            not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            or role_of(name) == "buffer"
            or tensor.identity in seen
        ):
            continue
        if tensor.numel:
            seen.add(tensor.identity)
        out.append((names[name], tensor.shape))
    return out


def _match_whole(
    groups: list[list[Any]], shapes: Mapping[Any, _Shape | None], weights: _Named
) -> dict[Any, str] | None:
    """Match if every weight belongs to the optimizer: names on which all fitting splits agree; None if none fits."""
    exact: list[dict[Any, str]] = []
    for split in _SPLITS:
        parts = split(weights)
        if [len(p) for p in parts] == [len(ids) for ids in groups]:
            pairs = [
                (pid, named)
                for ids, part in zip(groups, parts, strict=True)
                for pid, named in zip(ids, part, strict=True)
            ]
            if all(shapes[pid] in {None, shape} for pid, (_, shape) in pairs):
                exact.append({pid: name for pid, (name, _) in pairs})
    if not exact:
        return None
    return {pid: name for pid, name in exact[0].items() if all(other[pid] == name for other in exact)}


def _match_part(groups: list[list[Any]], shapes: Mapping[Any, _Shape | None], weights: _Named) -> dict[Any, str]:
    """Match if some weights are frozen, or buffers with unusual names: each group is a subsequence of the weights."""
    found: dict[Any, str] = {}
    for ids in groups:
        found.update(_embed(ids, shapes, weights))
    taken = Counter(found.values())
    return {pid: name for pid, name in found.items() if taken[name] == 1}


def _match_by_shape(shapes: Mapping[Any, _Shape | None], weights: _Named) -> dict[Any, str]:
    """Match weights in an unknown order (safetensors sorts them): only shapes that occur once are certain."""
    stored = Counter(shape for _, shape in weights)
    wanted = Counter(shapes.values())
    by_shape = {shape: name for name, shape in weights if stored[shape] == 1}
    return {pid: by_shape[shape] for pid, shape in shapes.items() if shape in by_shape and wanted[shape] == 1}


def _embed(ids: list[Any], shapes: Mapping[Any, _Shape | None], weights: _Named) -> dict[Any, str]:
    """Place ids as a subsequence of the weights: certain if the leftmost and the rightmost placement agree."""
    first = _place(ids, shapes, range(len(weights)), weights)
    last = _place(list(reversed(ids)), shapes, range(len(weights) - 1, -1, -1), weights)
    if first is None or last is None:
        return {}
    return {pid: weights[at][0] for pid, at in first.items() if last[pid] == at}


def _place(
    ids: list[Any], shapes: Mapping[Any, _Shape | None], positions: range, weights: _Named
) -> dict[Any, int] | None:
    placed: dict[Any, int] = {}
    free = iter(positions)
    for pid in ids:
        at = next((i for i in free if shapes[pid] in {None, weights[i][1]}), None)
        if at is None:
            return None
        placed[pid] = at
    return placed


def _two(weights: _Named, first: Callable[[str, _Shape], bool]) -> list[_Named]:
    return [[w for w in weights if first(*w)], [w for w in weights if not first(*w)]]


def _decayed_by_name(name: str, _shape: _Shape) -> bool:
    """Whether the Hugging Face Trainer's rule by names decays it: all but norms and biases."""
    lowered = name.lower()
    return not lowered.endswith("bias") and not any(part in lowered for part in ("norm", "ln_", ".ln"))


_SPLITS: tuple[Callable[[_Named], list[_Named]], ...] = (
    lambda weights: [weights],
    lambda weights: _two(weights, lambda _, shape: len(shape) >= 2),
    lambda weights: _two(weights, _decayed_by_name),
)
"""Usual splits of parameters into groups: none, matrices from vectors, by name."""
