"""Names for the optimizer's numbered state: from the file, or by the order of the parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampdoctor.checkpoints.file_contents import clean_names, role_of
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.checkpoints.unpickler import run_together
from ampdoctor.evidence.checkpoint_stats import TensorRole

# -- names if the weights were saved in another order (safetensors sorts them) --
#
# An optimizer over `model.parameters()` numbers them as `named_parameters()` walks: a module's own parameters, then
# child after child, each child completely. The order in which children were registered is not saved, but little freedom
# is left: numbered names (`layers.0`, `ln_1`) were registered in that order, `weight` before `bias`, and the shapes
# must fit. This code computes, over all arrangements that fit, where each parameter can stand. Only a parameter with a
# single place has its number for certain.

MAX_ARRANGEMENTS = 50_000
"""Maximum number of partial arrangements that are tried, over all modules; a dozen children have 4,096."""

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_LEAF_ORDER = ("weight", "bias")


class _TooManyError(Exception):
    """More arrangements than `MAX_ARRANGEMENTS`."""


@dataclass(slots=True)
class _Node:
    """A module, or a parameter (which has a shape and no children)."""

    name: str  # full name
    shape: _Shape | None = None
    own: dict[str, _Node] = field(default_factory=dict)  # a module's own parameters
    modules: dict[str, _Node] = field(default_factory=dict)
    size: int = 0  # number of parameters in it


def place_names(weights: Sequence[tuple[str, _Shape]], shapes: Sequence[_Shape | None]) -> dict[int, str] | None:
    """Maps each certain place in the optimizer's sequence of shapes to the parameter's name.

    `weights` come in any order; an unknown shape is None. Returns None if no arrangement fits, because the optimizer
    holds other parameters.
    """
    if len(weights) != len(shapes):
        return None
    try:
        return _Search(shapes).run(_tree(weights))
    except _TooManyError:
        return {}


def _tree(weights: Sequence[tuple[str, _Shape]]) -> _Node:
    root = _Node("")
    for name, shape in weights:
        node = root
        node.size += 1
        *owners, entry = name.split(".")
        for owner in owners:
            node = node.modules.setdefault(owner, _Node(f"{node.name}.{owner}" if node.name else owner))
            node.size += 1
        node.own[entry] = _Node(name, shape, size=1)
    return root


class _Search:
    def __init__(self, shapes: Sequence[_Shape | None]) -> None:
        self._shapes = shapes
        self._fits: dict[tuple[int, int], bool] = {}
        self._looked_at = 0

    def run(self, root: _Node) -> dict[int, str] | None:
        if not self._fit(root, 0):
            return None
        places: dict[str, set[int]] = {}
        seen: set[tuple[int, int]] = set()
        pending = [(root, 0)]
        while pending:
            node, at = pending.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            if node.shape is not None:
                places.setdefault(node.name, set()).add(at)
                continue
            pending.extend(self._possible(node, at))
        return {min(where): name for name, where in places.items() if len(where) == 1}

    def _fit(self, node: _Node, at: int) -> bool:
        if node.shape is not None:
            return self._shapes[at] in {None, node.shape}
        key = (id(node), at)
        if key not in self._fits:
            self._fits[key] = any(True for _ in self._possible(node, at)) or not node.size
        return self._fits[key]

    def _possible(self, node: _Node, at: int) -> list[tuple[_Node, int]]:
        """Returns every child with every place that it has in some fitting arrangement of the node."""
        found: list[tuple[_Node, int]] = []
        for children in (node.own, node.modules):
            nodes = list(children.values())
            before = _predecessors(list(children))
            placed = self._arrange(nodes, before, at)
            if placed is None:
                return []
            found += placed
            at += sum(child.size for child in nodes)
        return found

    def _arrange(self, nodes: list[_Node], before: Mapping[int, int], at: int) -> list[tuple[_Node, int]] | None:
        """Go forwards over sets of children that can stand first, then backwards over those that can be completed."""
        full = (1 << len(nodes)) - 1
        steps: list[dict[int, list[tuple[int, int]]]] = [{0: []}]
        for _ in nodes:
            following: dict[int, list[tuple[int, int]]] = {}
            for chosen in steps[-1]:
                start = at + sum(n.size for i, n in enumerate(nodes) if chosen >> i & 1)
                for index in _open(len(nodes), chosen, before):
                    self._looked_at += 1
                    if self._looked_at > MAX_ARRANGEMENTS:
                        raise _TooManyError
                    if self._fit(nodes[index], start):
                        following.setdefault(chosen | 1 << index, []).append((index, start))
            steps.append(following)
        if nodes and full not in steps[-1]:
            return None
        alive, found = {full}, set()
        for step in reversed(steps[1:]):
            arrived = [(chosen, index, start) for chosen in alive for index, start in step.get(chosen, [])]
            found |= {(index, start) for _, index, start in arrived}
            alive = {chosen & ~(1 << index) for chosen, index, _ in arrived}
        return [(nodes[index], start) for index, start in found]


def _open(count: int, chosen: int, before: Mapping[int, int]) -> Iterator[int]:
    """Yields the children that can stand next."""
    for index in range(count):
        if not chosen >> index & 1 and (index not in before or chosen >> before[index] & 1):
            yield index


def _predecessors(names: list[str]) -> dict[int, int]:
    """Maps each child to the one that was registered before it, as far as names show."""
    chains: dict[str, list[tuple[int, int]]] = {}
    for index, name in enumerate(names):
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            chains.setdefault(match["stem"], []).append((int(match["number"]), index))
        elif name in _LEAF_ORDER:
            chains.setdefault(" ", []).append((_LEAF_ORDER.index(name), index))
    before: dict[int, int] = {}
    for chain in chains.values():
        ordered = [index for _, index in sorted(chain)]
        before.update(zip(ordered[1:], ordered[:-1], strict=True))
    return before


_Shape = tuple[int, ...]
_Named = list[tuple[str, _Shape]]

_ELEMENTWISE = (
    "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "max_exp_avg_sq", "acc_delta", "prev",
    "grad_avg", "state1", "state2",
)  # fmt: skip
"""State entries with the parameter's shape, including bitsandbytes' 8-bit `state1` and `state2`."""
_FACTORED = (("exp_avg_sq_row", "exp_avg_sq_col", 0), ("row_var", "col_var", 1))
"""A second moment stored as the means of its rows and columns (Adafactor): fairseq's and transformers' without the
reduced dimension, torch's with size 1 there."""
_NO_MOMENTS = re.compile(r"step|t|k|(qmap|new_max|max|min)\d*|.*_step")
"""Counters, and the code books of 8-bit state. Its block scales (absmax) are part of the moments, like the codes."""


def name_parameters(
    optimizer: Mapping[str, Any], models: Sequence[Mapping[str, StoredTensor]], *, ordered: bool
) -> dict[Any, str]:
    """Maps the parameter ids of an optimizer's state to parameter names, for every id whose name is certain.

    `models` are state dicts that it may belong to, the most likely first; `ordered` says that their entries are in the
    order of `named_parameters()`.
    """
    groups = [_ids(group) for group in optimizer["param_groups"]]
    shapes = {pid: _shape_of(optimizer["state"].get(pid)) for ids in groups for pid in ids}
    given = _given_names(optimizer, groups)
    if given:
        return given
    candidates = [_weights(model) for model in models]
    if not ordered:
        return _match_unordered(groups, shapes, candidates[0]) if len(candidates) == 1 else {}
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


def _match_unordered(groups: list[list[Any]], shapes: Mapping[Any, _Shape | None], weights: _Named) -> dict[Any, str]:
    """Names on which all splits that fit in some registration order agree; else those of shapes that occur once."""
    fitting: list[dict[Any, str]] = []
    for split in _SPLITS:
        parts = split(weights)
        if [len(p) for p in parts] != [len(ids) for ids in groups]:
            continue
        placed = [place_names(part, [shapes[pid] for pid in ids]) for ids, part in zip(groups, parts, strict=True)]
        known = [places for places in placed if places is not None]
        if len(known) == len(groups):
            fitting.append(
                {ids[at]: name for ids, at_name in zip(groups, known, strict=True) for at, name in at_name.items()}
            )
    if fitting:
        return {pid: name for pid, name in fitting[0].items() if all(other.get(pid) == name for other in fitting)}
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
    lambda weights: list(reversed(_two(weights, lambda _, shape: len(shape) >= 2))),
    lambda weights: list(reversed(_two(weights, _decayed_by_name))),
)
"""Usual splits of parameters into groups: none, matrices from vectors, by name, and the latter two with groups
swapped."""
