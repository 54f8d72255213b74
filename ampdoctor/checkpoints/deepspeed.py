"""DeepSpeed's folder: one model file for each model-parallel rank, one optimizer file for each rank.

`mp_rank_00_model_states.pt` holds the module (with ZeRO 3: a file for each rank, with buffers only).
`[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt` holds a rank's partition of the fp32 weights and of the moments
(runtime/engine.py). Partitions that do not add up stay as they are, named after their rank
and group: a wrong name would send the user to a healthy layer.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampdoctor.checkpoints.checkpoint import FilePart
from ampdoctor.checkpoints.file_contents import MASTER_GROUP, FileContents, classify_contents, tensors_in
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.gathering import CheckpointBuilder, FolderState, Layout
from ampdoctor.checkpoints.pickled_objects import Saved
from ampdoctor.checkpoints.scalers import scaler_state
from ampdoctor.checkpoints.stored_tensor import (
    MAX_DIMENSIONS,
    JoinedTensor,
    Shard,
    StoredTensor,
    StridedTensor,
    contiguous_stride,
)
from ampdoctor.errors import CheckpointError

# -- each parameter's place in the flat partitions that ZeRO splits between its ranks --
#
# ZeRO 1 and 2 concatenate the parameters of a group, pad the end to a multiple of twice the ranks, and cut the whole
# into equal partitions, saved without the padding (runtime/zero/stage_1_and_2.py). ZeRO 3 cuts each parameter into
# ceil(numel / ranks) elements for each rank (runtime/zero/stage3.py). Names and shapes are in the model file, in that
# order.

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


# -- tensors that no joined tensor uses --
#
# If each rank wrote a file, a checkpoint has copies (buffers, scalers, old files of other settings), and a join needs
# only one of them. The others can be broken while that one is sound.


def add_unused(parts: Sequence[FilePart], saved: Sequence[Saved]) -> None:
    """Add to each part's `others` its file's tensors in storages that no part uses, and scalers that differ."""
    used = {place for part in parts for _, tensor in _tensors(part.sections) for place in _places(tensor)}
    scalers = {scaler_state(scaler, "", "") for part in parts for scaler in part.sections.scalers.values()} - {None}
    for part, content in zip(parts, saved, strict=True):
        told = classify_contents(content)
        part.sections.lost = told.lost
        for path, tensor in _tensors(told):
            if tensor.shape and tensor.numel and not used.issuperset(_places(tensor)):
                part.sections.others[path] = tensor
        for path, scaler in told.scalers.items():
            state = scaler_state(scaler, "", "")
            if state not in scalers:
                part.sections.scalers[path] = scaler
                scalers |= {state} - {None}


def _tensors(sections: FileContents) -> Iterator[tuple[str, StoredTensor]]:
    """Yields every tensor of a file with its path in it."""
    yield from sections.others.items()
    for path, model in sections.models.items():
        yield from ((f"{path}.{name}" if path else name, tensor) for name, tensor in model.items())
    trees = {**{path: found["state"] for path, found in sections.optimizers.items()}, **sections.master_weights}
    for path, tree in trees.items():
        yield from ((at, tensor) for at, tensor in tensors_in(tree, path) if isinstance(tensor, StoredTensor))


def _places(tensor: StoredTensor) -> set[object]:
    shards = tensor.shards if isinstance(tensor, JoinedTensor) else (tensor,)
    pieces = [shard.stored if isinstance(shard, Shard) else shard for shard in shards]
    return {(piece.file_name, piece.file.origin + piece.offset) for piece in pieces if isinstance(piece, StridedTensor)}


_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,6})_)?mp_rank_(?P<mp>\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_?optim_states\.pt")
_MODULE = "module"
"""Key of the weights in a model file, and therefore the model's path."""
MAX_RANKS = 65_536
"""No run has more ranks; a larger number in a file is ignored."""


@dataclass(slots=True)
class _File:
    file: RegularFile
    saved: Saved


@dataclass(slots=True)
class _Slice:
    """The files of one model-parallel rank, by data-parallel rank."""

    models: dict[int, _File] = field(default_factory=dict)
    optimizers: dict[int, _File] = field(default_factory=dict)


def _claims(name: str) -> bool:
    return (_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)) is not None


def _read(into: CheckpointBuilder, level: FolderState, names: Sequence[str]) -> None:
    level.taken |= set(names)
    found: dict[int, dict[tuple[bool, str], list[tuple[int, _File]]]] = {}
    for name in names:
        opened = into.open(level.path / name, level.prefix + name)
        match = _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)
        if opened is None or match is None:
            continue
        kind = match.re is _OPTIMIZER, name.partition("_rank_")[0]
        families = found.setdefault(int(match["mp"]), {})
        families.setdefault(kind, []).append((int(match["dp"] or 0), _File(*opened)))
    for number in sorted(found):
        mine = _settled(into, found[number])
        files = [table[rank] for table in (mine.models, mine.optimizers) for rank in sorted(table)]
        parts = _joined_parts(into, mine, files, number)
        add_unused(parts, [file.saved for file in files])
        into.parts += parts


def _settled(into: CheckpointBuilder, families: Mapping[tuple[bool, str], list[tuple[int, _File]]]) -> _Slice:
    """Returns which files belong together; those of other settings, of which there are fewer, are refused."""
    mine = _Slice()
    for is_optimizer, table in ((True, mine.optimizers), (False, mine.models)):
        kinds = [kind for kind in families if kind[0] is is_optimizer]
        kinds.sort(key=lambda kind: (-len(families[kind]), kind[1]))
        for kind in kinds:
            for rank, file in families[kind]:
                if kind == kinds[0] and rank not in table:
                    table[rank] = file
                else:
                    file.file.close()
                    said = "claims the rank of another file, as after a change of settings, and is not read."
                    into.refuse(file.file.name, CheckpointError(f"{file.file.name} {said}"))
    return mine


def _joined_parts(into: CheckpointBuilder, mine: _Slice, files: Sequence[_File], number: int) -> list[FilePart]:
    """Returns the parts of one model-parallel rank; the first file's part holds the joined tensors."""
    index = files[0].file.name
    parts = [FilePart(f.file, FileContents(unsafe_globals=f.saved.unsafe_globals), f.file.name, index) for f in files]
    main = mine.models.get(min(mine.models, default=0))
    tree = main.saved.tree if main is not None and isinstance(main.saved.tree, Mapping) else {}
    if main is not None:
        parts[0].sections = _model_sections(main)
    missing = _note_missing(into, mine, tree, number)
    if not mine.optimizers:
        return parts
    first = parts[len(mine.models)].sections
    told = classify_contents(mine.optimizers[min(mine.optimizers)].saved)
    first.scalers, first.skipped = told.scalers, told.skipped
    ranks = [read_rank(mine.optimizers[rank].saved.tree) for rank in sorted(mine.optimizers)]
    if any(rank is None for rank in ranks):
        into.remarks.append(f"{index}: the partitions of its optimizer have a form that is not known")
        for part, rank in zip(parts[len(mine.models) :], sorted(mine.optimizers), strict=True):
            part.sections = classify_contents(mine.optimizers[rank].saved)
        return parts
    known = [rank for rank in ranks if rank is not None]
    joined = _Joined(tree, known, complete=not missing)
    _add_weights(parts[0].sections if mine.models else first, mine, joined)
    first.optimizers = {"optimizer_state_dict": joined.optimizer} if joined.optimizer["state"] else {}
    if joined.flat:
        into.remarks.append(
            f"{index}: {joined.flat} flat partitions do not add up to the parameters and keep the names of their ranks"
        )
    return parts


def _model_sections(main: _File) -> FileContents:
    """Returns the model file alone; it lists its buffers, and frozen parameters are in the module already (ZeRO 2)."""
    sections = classify_contents(main.saved)
    sections.models.pop("frozen_param_fragments", None)
    tree = main.saved.tree
    names = tree.get("buffer_names") if isinstance(tree, Mapping) else None
    if isinstance(names, list | tuple) and _MODULE in sections.models:
        sections.buffers[_MODULE] = frozenset(name for name in names if isinstance(name, str))
    return sections


def _note_missing(into: CheckpointBuilder, mine: _Slice, tree: Mapping[Any, Any], number: int) -> bool:
    """Note the ranks whose files are missing; returns whether there are any."""
    expected = _rank_count(mine, tree)
    absent = [rank for rank in range(expected) if rank not in mine.optimizers] if mine.optimizers else []
    by_rank = [f.file.name.rpartition("/")[2].startswith("zero_") for f in mine.models.values()]
    models = [rank for rank in range(expected) if rank not in mine.models] if any(by_rank) else []
    for what, ranks in (("optimizer", absent), ("model", models)):
        if ranks:
            shown = f"{ranks[0]}{f' and of {len(ranks) - 1} more' if len(ranks) > 1 else ''} is missing"
            into.lack(
                f"mp_rank_{number:02d}", f"The {what} file of rank {shown}: {expected} ranks saved this checkpoint."
            )
    if not mine.models:
        absent_model = f"mp_rank_{number:02d}_model_states.pt"
        into.lack(absent_model, f"{absent_model} is missing: parameters have no names.")
    return bool(absent or models)


def _rank_count(mine: _Slice, tree: Mapping[Any, Any]) -> int:
    """Returns how many data-parallel ranks saved: what the files say, but at least the number of files."""
    saved = next((opened.saved.tree for opened in mine.optimizers.values()), None)
    state = saved.get("optimizer_state_dict") if isinstance(saved, Mapping) else None
    count = state.get("partition_count") if isinstance(state, Mapping) else None
    claims = list(count) if count and isinstance(count, list | tuple) else [count or tree.get("dp_world_size")]
    believed = [claim for claim in claims if type(claim) is int and 0 < claim <= MAX_RANKS]
    return max([*believed, max(mine.optimizers, default=-1) + 1])


class _Joined:
    """Joined partitions by parameter name; those that could not be mapped (`flat` of them) by rank and group."""

    def __init__(self, tree: Mapping[Any, Any], ranks: Sequence[RankState], *, complete: bool) -> None:
        self.master_weights: dict[str, StoredTensor] = {}
        self.loose: dict[str, StoredTensor] = {}
        self.optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
        self.flat = 0
        shapes = _shapes(tree.get("param_shapes"))
        groups = len(ranks[0].master_weights)
        by_parameter = ranks[0].by_parameter
        alike = all(len(rank.master_weights) == groups for rank in ranks)
        placed: list[dict[str, list[Piece]]] = [{} for _ in range(groups)]
        if complete and alike and shapes and by_parameter:
            placed = place_by_parameter(shapes, ranks)
        elif complete and alike and len(shapes) == groups and not _round_robin(tree):
            placed = [place_group(group, wanted, ranks) for group, wanted in enumerate(shapes)]
        sizes = {name: shape for group in shapes for name, shape in group.items()}
        for group, parameters in enumerate(placed):
            if not self._take(group, parameters, sizes, ranks):
                self._keep_flat(group, ranks)
        if not self.flat:
            self.optimizer["param_groups"] = _groups(placed, ranks)

    def _take(
        self, group: int, placed: Mapping[str, list[Piece]], wanted: Mapping[str, Shape], ranks: Sequence[RankState]
    ) -> bool:
        master_weights, states = {}, {}
        flat = [rank.master_weights[group] for rank in ranks]
        told = partitions_of_state(ranks, group)
        if told is None:
            return False
        cut, alike = told
        for name, pieces in placed.items():
            master = join(flat, pieces, wanted[name])
            state = join_state(cut, pieces, wanted[name])
            if master is None or state is None:
                return False
            master_weights[name], states[name] = master, {**alike, **state}
        self.master_weights.update(master_weights)
        self.optimizer["state"].update({name: state for name, state in states.items() if state})
        return bool(placed) or not any(rank.master_weights[group].numel for rank in ranks)

    def _keep_flat(self, group: int, ranks: Sequence[RankState]) -> None:
        for number, rank in enumerate(ranks):
            if group < len(rank.master_weights):
                name = f"rank {number} group {group}"
                self.loose[name] = rank.master_weights[group]
                self.optimizer["state"][name] = rank.states[group]
                self.flat += 1


def _add_weights(into: FileContents, mine: _Slice, joined: _Joined) -> None:
    """Add the fp32 weights beside the module's, or instead of them if the module has none (ZeRO 3)."""
    trees = [mine.models[rank].saved.tree for rank in sorted(mine.models)]
    module = into.models.get(_MODULE, {})
    buffers = into.buffers.get(_MODULE, frozenset())
    hollow = [name for name, stored in module.items() if name not in buffers and not stored.numel]
    if not hollow:
        copies = {**joined.master_weights, **joined.loose}
        if copies:
            into.models[MASTER_GROUP] = copies
        return
    whole = {**joined.master_weights, **_frozen(trees)}
    shared = trees[0].get("shared_params")
    ties = {name: of for name, of in shared.items() if isinstance(of, str)} if isinstance(shared, Mapping) else {}
    for name in hollow:
        stored = whole.get(name, whole.get(ties.get(name, name)))
        if stored is None:
            del module[name]
        else:
            module[name] = stored
    if not module:
        del into.models[_MODULE]
    if joined.loose:
        into.models[MASTER_GROUP] = dict(joined.loose)


def _frozen(trees: Sequence[Any]) -> dict[str, StoredTensor]:
    """Returns the parameters that the optimizer does not have, from every rank's fragments."""
    saved = [tree.get("frozen_param_fragments") for tree in trees if isinstance(tree, Mapping)]
    fragments = [held for held in saved if isinstance(held, Mapping)]
    if not fragments or len(fragments) != len(trees):
        return {}
    shapes = _shapes(trees[0].get("frozen_param_shapes"))
    found = {}
    for name, shape in (shapes[0] if shapes else {}).items():
        held = [f[name] for f in fragments if isinstance(f.get(name), StoredTensor)]
        stored = join_fragments(held, shape) if len(held) == len(fragments) else None
        if stored is not None:
            found[name] = stored
    return found


def _shapes(saved: Any) -> list[dict[str, Shape]]:
    """Returns `param_shapes`: parameter -> shape for each group; one mapping in old versions. [] for anything else."""
    groups = [saved] if isinstance(saved, Mapping) else saved
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        return []
    flat = [(name, shape) for group in groups for name, shape in group.items()]
    sound = all(isinstance(name, str) and _is_shape(shape) for name, shape in flat)
    return [dict(group) for group in groups] if sound and len({name for name, _ in flat}) == len(flat) else []


def _is_shape(value: Any) -> bool:
    """Whether a tensor can have these sizes. A pickle can use one tuple of many sizes for every parameter."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**48 for n in value)
        and math.prod(value) < 2**63
    )


def _round_robin(tree: Mapping[Any, Any]) -> bool:
    """Whether a group's parameters were dealt out to the ranks in turn, so that their order is not the optimizer's."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("round_robin_gradients") is True


def _groups(placed: Sequence[Mapping[str, list[Piece]]], ranks: Sequence[RankState]) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups, with parameters in the order in which the user passed them."""
    names = [list(group) for group in placed]
    groups = []
    for options, count in zip(ranks[0].options, ranks[0].per_option, strict=True):
        mine, names = names[:count], names[count:]
        groups.append({**options, "params": [name for group in mine for name in group]})
    return groups


DEEPSPEED = Layout(name="deepspeed", claims=_claims, read=_read)
