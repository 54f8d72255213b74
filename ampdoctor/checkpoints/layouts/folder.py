"""The folders that make up a checkpoint: which are opened, in which layouts, and which are left alone, and why."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.contents.parts import Part
from ampdoctor.checkpoints.formats.json_file import read_weight_map
from ampdoctor.checkpoints.formats.run_log_files import is_run_log
from ampdoctor.checkpoints.formats.sniff import sniff
from ampdoctor.checkpoints.layouts.deepspeed import DEEPSPEED
from ampdoctor.checkpoints.layouts.distributed.dcp_folder import DISTRIBUTED
from ampdoctor.checkpoints.layouts.folder_logs import longest_log, may_be_log
from ampdoctor.checkpoints.layouts.gathering import Gathering, read_sections
from ampdoctor.checkpoints.layouts.layout import Layout, Level
from ampdoctor.checkpoints.layouts.loose_files import LOOSE_FILES, RANDOM_STATES, TRAINER_STATE, may_hold_tensors
from ampdoctor.checkpoints.layouts.pointers import folder_inside, is_pointer, pointer_in, target_of
from ampdoctor.checkpoints.layouts.rank_files import join_rank_files
from ampdoctor.checkpoints.layouts.run_log_folder import add_run_log, has_run_log, run_logs, steps_of
from ampdoctor.checkpoints.layouts.shards import INDEXED, add_shards, remark_duplicates
from ampdoctor.checkpoints.storage.files import RegularFile, identity_of
from ampdoctor.checkpoints.storage.listing import Listing, list_folder
from ampdoctor.errors import CheckpointError, NoCheckpointError
from ampdoctor.evidence.report import Skipped

LAYOUTS: tuple[Layout, ...] = (
    DISTRIBUTED,
    INDEXED,
    DEEPSPEED,
    LOOSE_FILES,
)
"""How a checkpoint may lie in a folder. Each reads what it claims and those before it have left, so that the one that
takes any file of weights is the last."""

_LOGS_SEARCHED = 20
"""Folders in a folder that holds nothing else, the last by name, in which a run's log is looked for."""
_FOLDERS_BELOW = 100
"""Folders in a folder that are looked through for checkpoints, at most; a data set's folder has thousands."""
_LEVELS_BELOW = 3
"""How deep they are looked for: a run's folder with `version_0/checkpoints/last.ckpt/`."""
_BUNDLE = frozenset({"manifest.json", "calls.safetensors"})
"""Files of a step that `ampdoctor run` has recorded: inputs and gradients of a sick step, and no checkpoint."""
_MEGATRON_RANK = re.compile(r"mp_rank_\d{2,6}(_\d{3,6}){0,2}")
_WRITERS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((".metadata", "meta.pt"), "lightning-fsdp"),
    ((".metadata", "metadata.json"), "megatron-dist"),
    ((".metadata",), "torch-dcp"),
    ((TRAINER_STATE,), "hf-trainer"),
    ((RANDOM_STATES,), "accelerate"),
    (("mp_rank_*",), "megatron"),
    (("*.index.json",), "sharded"),
)
"""What the names in a folder say of who wrote it, the most telling first. Only reports say it: what is read is decided
by the layouts."""


def open_file(path: Path) -> Checkpoint:
    """Returns a checkpoint that is one file, or the index of a sharded one.

    Raises:
        CheckpointError: The file cannot be read.
    """
    file = RegularFile(path, path.name)
    if is_run_log(file):
        file.close()
        return _open_run_log(path)
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


def _open_run_log(path: Path) -> Checkpoint:
    """One file of a run's log, whatever its name."""
    gathering = Gathering()
    try:
        gathering.log = steps_of(path.parent, [path.name], "", gathering.skipped)
        add_run_log(gathering, path.parent, [path.name])
        return _finish(gathering, path.name)
    except BaseException:
        gathering.close()
        raise


def open_folder(listing: Listing, *, below: bool = False) -> Checkpoint:
    """A checkpoint that is a folder: weights, and optimizer, scaler and the Trainer's log where they are.

    A folder that holds no more than the log of a run is that log.

    A run's folder with a file that names the latest of its checkpoints is read as that checkpoint.

    Args:
        listing: The folder, and the names in it that belong to the checkpoint.
        below: Read the files in folders below with it, which a pipeline of several models has (`unet/`): to judge the
            folder, all of it counts; to resume from it, its own files.

    Raises:
        CheckpointError: Nothing in it can be read.
    """
    gathering = Gathering()
    try:
        _add_with_ranks(gathering, listing, "")
        followed = _follow(gathering, listing)
        if below and gathering.parts:
            _add_below(gathering, listing, followed)
        if not gathering.parts and not gathering.errors and (logs := run_logs(listing.path, listing.names)):
            add_run_log(gathering, listing.path, logs[0])
        if gathering.layout == "folder":
            gathering.layout = _writer(listing.names)
        return _finish(gathering, listing.path.name or str(listing.path), listing)
    except BaseException:
        gathering.close()
        raise


def may_be_read(name: str) -> bool:
    """Whether a file of this name is part of its folder: read with it, or telling what the folder is."""
    telling = (pattern for patterns, _ in _WRITERS for pattern in patterns)
    return (
        any(layout.claims(name) for layout in LAYOUTS)
        or may_be_log(name)
        or is_pointer(name)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in telling)
    )


def says_checkpoint(name: str) -> bool:
    """Whether a checkpoint lies where a file of this name does."""
    return may_hold_tensors(name) or any(layout.claims(name) for layout in LAYOUTS if layout is not LOOSE_FILES)


@dataclass(frozen=True, slots=True)
class Below:
    """What lies in the folders below one.

    Attributes:
        folders: Those with files of a checkpoint: their names from the first folder on, and they. Of a folder with such
            files nothing further below is listed.
        skipped: What was passed over, and why.
        unlisted: Names of folders that cannot be listed, and the errors.
    """

    folders: tuple[tuple[str, Listing], ...] = ()
    skipped: tuple[Skipped, ...] = ()
    unlisted: tuple[tuple[str, CheckpointError], ...] = ()


def search_below(root: Listing, apart: Collection[str], is_run: Callable[[Listing], bool] = lambda _: False) -> Below:
    """Look through the folders below one for files of checkpoints. A folder to which two ways lead is listed once.

    Hidden folders are another tool's and are not looked through, nor are those of a folder with very many; a step that
    `ampdoctor run` has recorded is no checkpoint.

    Args:
        root: The folder.
        apart: Names of folders in it that are known.
        is_run: Whether a folder is that of a run, whose checkpoints lie in folders: it is named as one.
    """
    folders: list[tuple[str, Listing]] = []
    skipped: list[Skipped] = []
    unlisted: list[tuple[str, CheckpointError]] = []
    seen = {identity_of(root.path), *(identity_of(root.path / name) for name in apart)}

    def walk(listing: Listing, prefix: str, names: Sequence[str], levels: int) -> None:
        if len(names) > _FOLDERS_BELOW:
            where = prefix.rstrip("/") or listing.path.name
            reason = f"{len(names)} folders in it, which were not looked through for checkpoints"
            skipped.append(Skipped(what=where, reason=reason))
            return
        for name in names:
            path = listing.path / name
            identity = identity_of(path)
            if identity in seen:
                continue
            seen.add(identity)
            try:
                inner = list_folder(path)
            except CheckpointError as error:
                unlisted.append((prefix + name, error))
                continue
            if set(inner.files) >= _BUNDLE:
                skipped.append(Skipped(what=prefix + name, reason="a recorded step, which bisect-nan replays"))
            elif any(map(says_checkpoint, inner.names)) or is_run(inner):
                folders.append((prefix + name, inner))
            elif levels > 1:
                walk(inner, f"{prefix}{name}/", _searched(inner, ()), levels - 1)

    walk(root, "", _searched(root, apart), _LEVELS_BELOW)
    return Below(tuple(folders), tuple(skipped), tuple(unlisted))


def _searched(listing: Listing, apart: Collection[str]) -> list[str]:
    return [n for n in listing.names if n in listing.folders and n not in apart and not n.startswith((".", "__"))]


def parts_in(listing: Listing) -> set[str]:
    """Returns the names of the folders in a checkpoint's that are read with it.

    They are those of ranks, of parts that are saved apart, and the one that a file names as the latest.
    """
    apart = [layout for layout in LAYOUTS if layout is not LOOSE_FILES]
    own = {n for n in listing.folders if _MEGATRON_RANK.fullmatch(n) or any(one.claims(n) for one in apart)}
    pointer = pointer_in(listing)
    try:
        return own | ({target_of(listing.path, pointer)} if pointer is not None else set())
    except CheckpointError:  # following it says why
        return own


def _add_below(into: Gathering, listing: Listing, followed: str | None) -> None:
    """Open the files in the folders below, which no other part of the checkpoint has taken."""
    taken = parts_in(listing) | ({followed} if followed is not None else set())
    below = search_below(listing, taken)
    into.skipped += below.skipped
    for name, error in below.unlisted:
        into.refuse(name, error)
    log, step, layout = (into.log, into.own_log), into.global_step, into.layout
    for name, inner in below.folders:
        _add_with_ranks(into, inner, f"{name}/")
        (into.log, into.own_log), into.global_step, into.layout = log, step, layout


def _writer(names: Sequence[str]) -> str:
    return next(
        (writer for patterns, writer in _WRITERS if all(fnmatch.filter(names, pattern) for pattern in patterns)),
        "folder",
    )


def _add_with_ranks(into: Gathering, listing: Listing, prefix: str) -> None:
    """Open what belongs to a checkpoint in a folder and in the folders of its ranks, each of them once.

    Otherwise links could lead the walk round in circles, or through one large folder a thousand times.
    """
    folder = listing.path
    _add_folder(into, listing, prefix)
    seen = {identity_of(folder): folder.name}
    for name in sorted(filter(_MEGATRON_RANK.fullmatch, listing.folders)):
        inner = folder / name
        identity = identity_of(inner)
        if identity in seen:
            into.remarks.append(f"{prefix}{name} is a link to {seen[identity]}, and is read once")
            continue
        seen[identity] = name
        try:
            below = list_folder(inner)
        except CheckpointError as error:
            into.refuse(prefix + name, error)
        else:
            _add_folder(into, below, f"{prefix}{name}/")


def _add_folder(into: Gathering, listing: Listing, prefix: str) -> None:
    """Open the checkpoint files among a folder's files; `prefix` is the prefix of their names in reports."""
    level = Level(listing, prefix)
    before = len(into.parts)
    for layout in LAYOUTS:
        at = len(into.parts)
        layout.read(into, level, [name for name in listing.names if layout.claims(name)])
        if layout.name and len(into.parts) > at:
            into.layout = layout.name
    _add_log(into, listing, prefix)
    for part in into.parts[before:]:
        part.index = part.index or level.unit


def _follow(into: Gathering, listing: Listing) -> str | None:
    """Open the folder that a run's folder says is its latest checkpoint; returns its name.

    If the files beside the pointer form a checkpoint themselves (the Trainer's folder of a DeepSpeed run), a missing
    target is only a remark: people delete the optimizer's state to save space.
    """
    folder, names = listing.path, listing.names
    pointer = pointer_in(listing)
    if pointer is None:
        return None
    try:
        target = target_of(folder, pointer)
    except CheckpointError as error:
        into.refuse(pointer, error)
        return None
    there = folder / target
    if target in names and there.is_symlink():
        found = folder_inside(folder, target)
        if found is None:
            said = f"{pointer} names {target}, which is a link to no other folder in this one; name what it leads to."
            into.refuse(pointer, CheckpointError(said))
            return target
        there = found
    if target in names and target in listing.folders:
        try:
            below = list_folder(there)
        except CheckpointError as error:
            into.refuse(target, error)
        else:
            _add_with_ranks(into, below, f"{target}/")
        return target
    message = f"{pointer} names the folder {target}, which is not there"
    if into.parts:
        into.remarks.append(message)
    else:
        into.refuse(pointer, CheckpointError(f"{message}."))
    return target


def _add_log(into: Gathering, listing: Listing, prefix: str) -> None:
    """Take the longest log of the folder, unless the Trainer's own was read.

    A log that cannot be read does not harm the checkpoint.
    """
    if into.own_log:
        return
    log, unread = longest_log(listing.path, listing.names, prefix)
    into.log = max(into.log, log, key=len)
    into.skipped += unread


def _index_of(file: RegularFile) -> dict[str, str]:
    table = read_weight_map(file)
    if table is None:
        raise NoCheckpointError(f"{file.name} is a JSON file, but not the index of a sharded checkpoint.")
    return table


def _finish(gathered: Gathering, name: str, inside: Listing | None = None) -> Checkpoint:
    join_rank_files(gathered)
    remark_duplicates(gathered)
    if not gathered.parts:
        if gathered.refusals:
            raise gathered.refusals[0]
        raise NoCheckpointError(_nothing(name, inside))
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


def _nothing(name: str, listing: Listing | None) -> str:
    inner = sorted(listing.folders) if listing is not None else []
    likely = [n for n in inner if n.startswith(("checkpoint", "step", "epoch", "global_step", "iter_"))]
    if likely:
        return (
            f"{name} holds no checkpoint itself, but {len(likely)} folders that may be one; "
            f"name one of them, for example {likely[-1]}."
        )
    logs = [n for n in inner[-_LOGS_SEARCHED:] if listing is not None and has_run_log(listing.path / n)]
    if logs:
        return f"{name} holds no checkpoint, but the logs of runs; name one of them, for example {logs[-1]}."
    return (
        f"{name} holds no checkpoint: no file in it is in a format that is read "
        "(safetensors, torch.save, torch.distributed.checkpoint)."
    )
