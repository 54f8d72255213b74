"""Locates each parameter in the flat partitions that DeepSpeed's ZeRO splits between its ranks.

ZeRO 1 and 2 concatenate the parameters of a group, pad the end to a multiple of twice the ranks, and cut the whole into
equal partitions, saved without the padding (runtime/zero/stage_1_and_2.py). ZeRO 3 cuts each parameter into ceil(numel
/ ranks) elements for each rank (runtime/zero/stage3.py). Names and shapes are in the model file, in that order.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampdoctor.checkpoints.stored_tensor import JoinedTensor, Shard, StoredTensor, StridedTensor, contiguous_stride

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a parameter's elements in one rank's partition."""

    rank: int
    start: int  # its first element's index in the partition
    count: int  # of elements
    at: int  # its first element's index in the flattened parameter


@dataclass(frozen=True, slots=True)
class RankState:
    """The contents of one rank's optimizer file, in one form for all stages."""

    by_parameter: bool  # each parameter was cut by itself (ZeRO 3)
    master_weights: tuple[StridedTensor, ...]  # fp32 partition of each flat group
    states: tuple[Mapping[str, Any], ...]  # for each flat group: "exp_avg" etc., as long as the partition or padded
    options: tuple[Mapping[str, Any], ...] = ()  # settings of the parameter groups
    per_option: tuple[int, ...] = ()  # number of flat groups of each parameter group
    counts: tuple[int, ...] = ()  # number of ranks that share each flat group


def read_rank(tree: Any) -> RankState | None:
    """Converts a rank's optimizer file to one form; None if it has no known form."""
    state = tree.get("optimizer_state_dict") if isinstance(tree, Mapping) else None
    if not isinstance(state, Mapping):
        return None
    master_weights = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    if not isinstance(master_weights, list | tuple) or not all(_is_flat(m) for m in master_weights):
        return None
    gaps = state.get("param_alignment_paddings")  # free elements behind parameters (`parameter_alignment`)
    if isinstance(gaps, list | tuple) and any(any(group) for group in gaps if isinstance(group, list | tuple)):
        return None
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states, options, counts = _base_state(base, len(master_weights))
    return RankState(
        by_parameter="fp32_flat_groups" in state,
        master_weights=tuple(master_weights),
        states=states,
        options=options,
        per_option=counts,
        counts=_counts(state.get("partition_count"), len(master_weights)),
    )


def place_by_parameter(
    shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[RankState]
) -> list[dict[str, list[Piece]]]:
    """Returns the same for ZeRO 3; all groups are {} if one does not add up."""
    lengths = [master.numel for master in ranks[0].master_weights]
    if any([m.numel for m in rank.master_weights] != lengths for rank in ranks):
        return [{} for _ in lengths]
    placed: list[dict[str, list[Piece]]] = [{} for _ in lengths]
    group, start = 0, 0
    for name, shape in itertools.chain.from_iterable(wanted.items() for wanted in shapes):
        each = -(-math.prod(shape) // len(ranks))
        while group < len(lengths) and start == lengths[group]:
            group, start = group + 1, 0
        if group == len(lengths) or start + each > lengths[group]:
            return [{} for _ in lengths]
        placed[group][name] = _cut(math.prod(shape), each, start, len(ranks))
        start += each
    return placed if start == sum(lengths[group:]) else [{} for _ in lengths]


def join_fragments(fragments: Sequence[StoredTensor], shape: Shape) -> StoredTensor | None:
    """Returns a frozen parameter of ZeRO 3 from every rank's fragment; None if they do not add up."""
    each = -(-math.prod(shape) // max(len(fragments), 1))
    flat = [f for f in fragments if isinstance(f, StridedTensor) and _is_flat(f) and f.numel >= each]
    if len(flat) != len(fragments):
        return None
    return join(flat, _cut(math.prod(shape), each, 0, len(flat)), shape)


def join(partitions: Sequence[StridedTensor], pieces: Sequence[Piece], shape: Shape) -> StoredTensor | None:
    """Returns a parameter's tensor from the ranks' partitions; None if a partition is too short for it."""
    shards = []
    for piece in pieces:
        whole = partitions[piece.rank]
        if whole.numel < piece.start + piece.count or whole.dtype != partitions[0].dtype:
            return None
        shards.append(Shard(stored=_run(whole, piece.start, (piece.count,)), at=piece.at))
    if len(shards) == 1:
        return _run(partitions[pieces[0].rank], pieces[0].start, shape)
    if not shards:
        return None if math.prod(shape) else _run(partitions[0], 0, shape)
    return JoinedTensor(dtype=partitions[0].dtype, shape=shape, shards=tuple(shards))


def partitions_of_state(
    ranks: Sequence[RankState], group: int
) -> tuple[dict[str, list[StridedTensor]], dict[str, Any]] | None:
    """Returns the ranks' partitions of each entry of a flat group's state, and single values; None if ranks differ."""
    states = [rank.states[group] for rank in ranks]
    if any(state.keys() != states[0].keys() for state in states):
        return None
    cut: dict[str, list[StridedTensor]] = {}
    alike: dict[str, Any] = {}
    sizes = [rank.master_weights[group].numel for rank in ranks]
    whole = max(sizes) if ranks[0].by_parameter else 2 * -(-sum(sizes) // (2 * len(ranks)))
    for entry, value in states[0].items():
        partitions = [state[entry] for state in states]
        if not any(isinstance(p, StoredTensor) and p.shape for p in partitions):
            alike[entry] = value
            continue
        flat = [p for p in partitions if isinstance(p, StridedTensor) and _is_flat(p)]
        if len(flat) < len(ranks) or any(not n <= p.numel <= max(n, whole) for p, n in zip(flat, sizes, strict=True)):
            return None
        cut[entry] = flat
    return cut, alike


def join_state(
    partitions: Mapping[str, Sequence[StridedTensor]], pieces: Sequence[Piece], shape: Shape
) -> dict[str, StoredTensor] | None:
    """Returns a parameter's moments from `partitions_of_state`; None if a partition is too short for it."""
    joined = {entry: join(flat, pieces, shape) for entry, flat in partitions.items()}
    found = {entry: tensor for entry, tensor in joined.items() if tensor is not None}
    return found if len(found) == len(joined) else None


def place_group(group: int, wanted: Mapping[str, Shape], ranks: Sequence[RankState]) -> dict[str, list[Piece]]:
    """Returns where the parameters of a flat group are (ZeRO 1 and 2), in order; {} if they do not add up."""
    lengths = [rank.master_weights[group].numel for rank in ranks]
    starts = [0, *itertools.accumulate(lengths)]
    unit = 2 * len(ranks)
    total = sum(math.prod(shape) for shape in wanted.values())
    # versions differ in whether they save the padding of the last partitions; a partition shorter than the first is a
    # last one without its padding
    full = all(length == lengths[0] for length, after in itertools.pairwise(lengths) if after)
    padded = starts[-1] >= total and -(-starts[-1] // unit) == -(-total // unit)
    owners = ranks[0].counts[group] if ranks[0].counts else len(ranks)  # experts are split between fewer ranks
    if not full or not padded or owners != len(ranks):
        return {}
    placed: dict[str, list[Piece]] = {}
    begin = 0
    for name, shape in wanted.items():
        end = begin + math.prod(shape)
        placed[name] = list(_across(begin, end, starts))
        begin = end
    return placed


def _across(begin: int, end: int, starts: Sequence[int]) -> Iterator[Piece]:
    """Yields a parameter's pieces in the partitions from its first on."""
    rank = bisect.bisect_right(starts, begin) - 1
    while begin < end and rank + 1 < len(starts) and starts[rank] < end:
        low, high = max(begin, starts[rank]), min(end, starts[rank + 1])
        if low < high:
            yield Piece(rank, low - starts[rank], high - low, low - begin)
        rank += 1


def _cut(numel: int, each: int, start: int, ranks: int) -> list[Piece]:
    return [
        Piece(rank, start, min(each, numel - rank * each), rank * each) for rank in range(ranks) if numel > rank * each
    ]


def _base_state(
    base: Any, groups: int
) -> tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...], tuple[int, ...]]:
    """Returns the inner optimizer's state by flat group; DeepSpeed saves a list if elastic (any number of ranks)."""
    nothing: tuple[Mapping[str, Any], ...] = tuple({} for _ in range(groups))
    if isinstance(base, list | tuple) and len(base) == groups and all(isinstance(s, Mapping) for s in base):
        return tuple(base), (), ()
    if not isinstance(base, Mapping) or not isinstance(base.get("state"), Mapping):
        return nothing, (), ()
    options = base.get("param_groups")
    if not isinstance(options, list | tuple) or not all(
        isinstance(o, Mapping) and isinstance(o.get("params"), list | tuple) for o in options
    ):
        return nothing, (), ()
    ids = [pid for option in options for pid in option["params"]]
    states = [base["state"].get(pid, {}) if isinstance(pid, int | str) else {} for pid in ids]
    if len(ids) != groups or not all(isinstance(state, Mapping) for state in states):
        return nothing, (), ()
    settings = tuple({k: v for k, v in option.items() if k != "params"} for option in options)
    return tuple(states), settings, tuple(len(option["params"]) for option in options)


def _counts(saved: Any, groups: int) -> tuple[int, ...]:
    counts = saved if isinstance(saved, list | tuple) else [saved] * groups
    return tuple(counts) if len(counts) == groups and all(type(count) is int for count in counts) else ()


def _is_flat(value: Any) -> bool:
    return isinstance(value, StridedTensor) and len(value.shape) == 1 and (value.numel < 2 or value.stride == (1,))


def _run(whole: StridedTensor, start: int, shape: Shape) -> StridedTensor:
    return StridedTensor(
        file=whole.file,
        offset=whole.offset,
        storage_bytes=whole.storage_bytes,
        dtype=whole.dtype,
        shape=shape,
        stride=contiguous_stride(shape),
        start=whole.start + start,
    )
