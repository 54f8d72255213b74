"""Files and folders of a checkpoint: which are opened, which are left alone, and why."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.formats.json_file import read_trainer_state, read_weight_map
from ampdoctor.checkpoints.formats.sniff import sniff
from ampdoctor.checkpoints.layouts.dcp_folder import distributed_parts
from ampdoctor.checkpoints.layouts.deepspeed import add_deepspeed, deepspeed_names
from ampdoctor.checkpoints.layouts.folder_logs import longest_log, may_be_log
from ampdoctor.checkpoints.layouts.gathering import Gathering, read_saved, read_sections
from ampdoctor.checkpoints.layouts.pointers import folder_inside, is_pointer, pointer_in, target_of
from ampdoctor.checkpoints.layouts.rank_files import join_rank_files
from ampdoctor.checkpoints.layouts.shards import (
    add_index,
    add_shards,
    check_numbers,
    is_numbered,
    numbered_family,
    remark_duplicates,
)
from ampdoctor.checkpoints.storage.files import RegularFile, identity_of, is_folder
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.report import Skipped

MAX_FOLDER_ENTRIES = 20_000
"""A checkpoint folder holds hundreds of files; a data set's folder given by mistake holds millions."""

_TRAINER_STATE = "trainer_state.json"
_MEGATRON_RANK = re.compile(r"mp_rank_\d{2,6}(_\d{3,6}){0,2}")
_RANDOM_STATES = "random_states_*.pkl"

_LEFT_ALONE: tuple[tuple[str, str], ...] = (
    ("training_args.bin", "pickled arguments; never opened"),
    ("rng_state*.pth", "random state"),
    ("random_states_*.pkl", "random state"),
    ("scheduler*.pt", "learning-rate schedule"),
    ("scheduler*.bin", "learning-rate schedule"),
    ("custom_checkpoint_*.pkl", "pickled object; never opened"),
    ("sampler*.bin", "pickled object; never opened"),
    ("tokenizer*", "tokenizer"),
)
"""Usual neighbours of a checkpoint that hold no weights, moments or scaler."""

_TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".index.json")
"""In a folder only these are opened, in upper case as well; the content then decides the format."""
_OTHER_WEIGHTS = re.compile(
    r"\.(safetensors|pt|pth|bin|ckpt|pkl|tar)[.~]|\.(weights|params|h5|keras|npz|npy|gguf|ggml|onnx|msgpack|ot|pickle|state)$",
    re.IGNORECASE,
)
"""Names of files that hold weights, in a format that is not read or as a copy that no loader takes. Reports name such
files: what was not examined must not pass for healthy."""


def open_file(path: Path) -> Checkpoint:
    """Returns a checkpoint that is one file, or the index of a sharded one.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = RegularFile(path, path.name)
    try:
        found = sniff(file)
        if found == "json":
            table = _index_of(file)
        else:
            return Checkpoint(path=path.name, format=found, parts=[Part(file, read_sections(file, found), path.name)])
    except BaseException:
        file.close()
        raise
    file.close()
    gathering = Gathering(layout="sharded")
    try:
        add_shards(gathering, path, table, "")
        return _finish(gathering, path.name)
    except BaseException:
        gathering.close()
        raise


def open_folder(path: Path, only: Sequence[str] | None = None) -> Checkpoint:
    """Returns a checkpoint that is a folder: its weights, and optimizer, scaler and the Trainer's log if present.

    A run's folder with a file that names the latest of its checkpoints is read as that checkpoint.

    Args:
        path: The folder.
        only: Names of the files that belong to it, if the folder holds others as well; None for all of them.

    Raises:
        CheckpointError: Nothing in it can be read.
    """
    gathering = Gathering()
    try:
        names = _names(path) if only is None else list(only)
        _add_level(gathering, path, names, "")
        _follow(gathering, path, names)
        if gathering.layout == "folder":
            gathering.layout = _layout(names)
        return _finish(gathering, path.name or str(path), inside=path)
    except BaseException:
        gathering.close()
        raise


_LAYOUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((".metadata", "meta.pt"), "lightning-fsdp"),
    ((".metadata", "metadata.json"), "megatron-dist"),
    ((".metadata",), "torch-dcp"),
    ((_TRAINER_STATE,), "hf-trainer"),
    ((_RANDOM_STATES,), "accelerate"),
    (("mp_rank_*",), "megatron"),
    (("*.index.json",), "sharded"),
)
"""Which names in a folder tell who wrote it, the most telling first. Only reports use this: each file decides for
itself how it is read."""


def _layout(names: Sequence[str]) -> str:
    return next(
        (layout for patterns, layout in _LAYOUTS if all(fnmatch.filter(names, pattern) for pattern in patterns)),
        "folder",
    )


def _add_level(into: Gathering, folder: Path, names: list[str], prefix: str) -> None:
    """Open the files of a checkpoint in a folder and in the folders of its ranks, each folder once.

    Otherwise links could lead the walk round in circles, or through one large folder a thousand times.
    """
    _add_names(into, folder, names, prefix)
    seen = {identity_of(folder): folder.name}
    for name in names:
        inner = folder / name
        if not (_MEGATRON_RANK.fullmatch(name) and is_folder(inner)):
            continue
        identity = identity_of(inner)
        if identity in seen:
            into.remarks.append(f"{prefix}{name} is a link to {seen[identity]}, and is read once")
            continue
        seen[identity] = name
        try:
            below = _names(inner)
        except CheckpointError as error:
            into.refuse(prefix + name, error)
        else:
            _add_names(into, inner, below, f"{prefix}{name}/")


def _add_names(into: Gathering, folder: Path, names: list[str], prefix: str) -> None:
    """Open the checkpoint files among a folder's files; `prefix` is the prefix of their names in reports."""
    before = len(into.parts)
    distributed = distributed_parts(folder, names, prefix)
    into.add_distributed(distributed)
    done: set[str] = set()
    indices: dict[object, str] = {}
    for name in [n for n in names if n.endswith(".index.json")]:
        done.add(name)
        known = indices.setdefault(identity_of(folder / name) or name, name)
        if known == name:
            done |= add_index(into, folder, name, prefix)
        else:  # a thousand links to one index would otherwise open all its shards a thousand times
            into.remarks.append(f"{prefix}{name} is a link to {known}, and is read once")
    indexed = len(done) > 0 and any(is_numbered(name) for name in done)
    together = deepspeed_names(names)
    if together:
        add_deepspeed(into, folder, together, prefix)
    done |= distributed.taken
    opened = [n for n in names if n not in done and n not in together and _add_file(into, folder, n, prefix, indexed)]
    check_numbers(into, opened, prefix)
    _add_log(into, folder, names, prefix)
    for part in into.parts[before:]:
        part.index = part.index or distributed.index


def _follow(into: Gathering, folder: Path, names: list[str]) -> None:
    """Open the folder that a run's folder names as its latest checkpoint.

    If the files beside the pointer form a checkpoint themselves (the Trainer's folder of a DeepSpeed run), a missing
    target is only a remark: people delete the optimizer's state to save space.
    """
    pointer = pointer_in(folder, names)
    if pointer is None:
        return
    try:
        target = target_of(folder, pointer)
    except CheckpointError as error:
        into.refuse(pointer, error)
        return
    there = folder / target
    if target in names and (folder / target).is_symlink():
        found = folder_inside(folder, target)
        if found is None:
            said = f"{pointer} names {target}, which is a link to no other folder in this one; name what it leads to."
            into.refuse(pointer, CheckpointError(said))
            return
        there = found
    if target in names and is_folder(there):
        try:
            below = _names(there)
        except CheckpointError as error:
            into.refuse(target, error)
        else:
            _add_level(into, there, below, f"{target}/")
        return
    message = f"{pointer} names the folder {target}, which is not there"
    if into.parts:
        into.remarks.append(message)
    else:
        into.refuse(pointer, CheckpointError(f"{message}."))


def _names(path: Path) -> list[str]:
    try:
        entries = []
        for entry in path.iterdir():
            entries.append(entry.name)
            if len(entries) > MAX_FOLDER_ENTRIES:
                raise LimitExceededError(f"{path.name}: files in the folder", MAX_FOLDER_ENTRIES, len(entries))
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be listed: {(error.strerror or str(error)).lower()}.") from None
    return sorted(entries)


def _add_file(into: Gathering, folder: Path, name: str, prefix: str, indexed: bool) -> bool:  # noqa: FBT001
    """Open a single file; returns whether it became a part."""
    path = folder / name
    if may_be_log(name):
        return False
    if is_folder(path) or (name != _TRAINER_STATE and not _says_weights(name)):
        return False
    reason = _left_alone(name, indexed)
    if reason is not None:
        into.skipped.append(Skipped(what=prefix + name, reason=reason))
        if fnmatch.fnmatchcase(name, _RANDOM_STATES):
            _take_step(into, path, prefix + name)
        return False
    try:
        file = RegularFile(path, prefix + name)
    except CheckpointError as error:
        into.refuse(prefix + name, error)
        return False
    if name != _TRAINER_STATE:
        return into.add(file, index=prefix + numbered_family(name) if is_numbered(name) else "") is not None
    try:
        with file:
            into.global_step, log = read_trainer_state(file)
            into.log, into.own_log = (log, True) if log else (into.log, into.own_log)
    except CheckpointError as error:
        into.refuse(prefix + name, error)
    return False


def _says_weights(name: str) -> bool:
    return name.lower().endswith(_TENSOR_SUFFIXES) or _OTHER_WEIGHTS.search(name) is not None


def _left_alone(name: str, indexed: bool) -> str | None:  # noqa: FBT001
    """Returns why a file is not opened; None if it is."""
    if name != _TRAINER_STATE and not name.lower().endswith(_TENSOR_SUFFIXES):
        return "not the name of a format that is read"
    if indexed and is_numbered(name):
        return "a shard that no index names"
    return neighbour(name)


def _add_log(into: Gathering, folder: Path, names: Sequence[str], prefix: str) -> None:
    """Take the folder's longest log, unless the Trainer's own was read.

    A log that cannot be read does not harm the checkpoint.
    """
    if into.own_log:
        return
    log, unread = longest_log(folder, names, prefix)
    into.log = max(into.log, log, key=len)
    into.skipped += unread


def _take_step(into: Gathering, path: Path, name: str) -> None:
    """Take the step that Accelerate keeps beside the random state; a file that cannot be read has none.

    It counts batches, and may restart with each epoch, so it is only used if nothing else counts steps.
    """
    try:
        with RegularFile(path, name) as file:
            tree = read_saved(file, sniff(file)).tree
    except CheckpointError:
        return
    step = tree.get("step") if isinstance(tree, Mapping) else None
    if type(step) is int and step > 0:
        into.spare_step = max(step, into.spare_step or 0)


def _index_of(file: RegularFile) -> dict[str, str]:
    table = read_weight_map(file)
    if table is None:
        raise CheckpointError(f"{file.name} is a JSON file, but not the index of a sharded checkpoint.")
    return table


def _finish(gathered: Gathering, name: str, inside: Path | None = None) -> Checkpoint:
    join_rank_files(gathered)
    remark_duplicates(gathered)
    if not gathered.parts:
        if gathered.refusals:
            raise gathered.refusals[0]
        raise CheckpointError(_nothing(name, inside))
    return Checkpoint(
        path=name,
        format=gathered.layout,
        parts=gathered.parts,
        log=gathered.log,
        global_step=gathered.global_step,
        spare_step=gathered.spare_step,
        skipped=tuple(gathered.skipped),
        errors=tuple(gathered.errors),
        remarks=tuple(gathered.remarks),
    )


def _nothing(name: str, folder: Path | None) -> str:
    inner = sorted(p.name for p in folder.iterdir() if is_folder(p)) if folder is not None else []
    likely = [n for n in inner if n.startswith(("checkpoint", "step", "epoch", "global_step", "iter_"))]
    if likely:
        return (
            f"{name} holds no checkpoint itself, but {len(likely)} folders that may be one; "
            f"name one of them, for example {likely[-1]}."
        )
    return (
        f"{name} holds no checkpoint: no file in it is in a format that is read "
        "(safetensors, torch.save, torch.distributed.checkpoint)."
    )


def may_be_read(name: str) -> bool:
    """Does a file of this name belong to its folder: is it read, or does it tell what the folder is?"""
    telling = (_TRAINER_STATE, *(pattern for patterns, _ in _LAYOUTS for pattern in patterns), "*.metadata", "*.distcp")
    return (
        _says_weights(name)
        or may_be_log(name)
        or is_pointer(name)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in telling)
    )


def may_hold_tensors(name: str) -> bool:
    """Is a file of this name opened inside a folder, rather than known to hold something else?"""
    return name.lower().endswith(_TENSOR_SUFFIXES) and neighbour(name) is None


def neighbour(name: str) -> str | None:
    """Returns the contents of a file with the name of a usual neighbour of checkpoints; None for any other name."""
    return next((what for pattern, what in _LEFT_ALONE if fnmatch.fnmatchcase(name.lower(), pattern)), None)
