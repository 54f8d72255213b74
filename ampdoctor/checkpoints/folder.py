"""Opens a folder or a file as a checkpoint: each layout reads the files that it claims."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import Checkpoint, FilePart
from ampdoctor.checkpoints.dcp import DISTRIBUTED
from ampdoctor.checkpoints.deepspeed import DEEPSPEED
from ampdoctor.checkpoints.files import Listing, RegularFile, identity_of, is_folder, list_folder, plain_name
from ampdoctor.checkpoints.gathering import CheckpointBuilder, FolderState, Layout
from ampdoctor.checkpoints.json_files import read_global_step, read_weight_map
from ampdoctor.checkpoints.torch_files import sniff
from ampdoctor.errors import CheckpointError, NoCheckpointError
from ampdoctor.evidence.report import ErrorNote, Skipped

# -- files that name the newest of several checkpoints beside them --

_MAX_BYTES = 256


_MEGATRON = "latest_checkpointed_iteration.txt"
_POINTERS = ("latest", _MEGATRON)
"""Pointer files: DeepSpeed's names a folder, Megatron's an iteration or "release"."""


def is_pointer(name: str) -> bool:
    """Whether a file of this name points to the newest checkpoint beside it."""
    return name in _POINTERS


def pointer_in(listing: Listing) -> str | None:
    """Returns the pointer among a folder's files, or None."""
    return next((name for name in _POINTERS if name in listing.names and name not in listing.folders), None)


def target_of(folder: Path, pointer: str) -> str:
    """Returns the folder that a pointer names, which need not exist."""
    with RegularFile(folder / pointer, pointer) as file:
        if file.size > _MAX_BYTES:
            raise CheckpointError(f"{pointer} is {file.size} bytes long, which is no folder's name.")
        try:
            text = file.read(0, file.size).decode("utf-8").strip()
        except UnicodeDecodeError:
            raise CheckpointError(f"{pointer} is not text.") from None
    if pointer == _MEGATRON and text.isascii() and text.isdigit() and len(text) < 16:
        text = f"iter_{int(text):07d}"
    return plain_name(text, pointer, "folder")


# -- weights over several files, which an index lists or their names count --

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})(?P<suffix>\.[a-z]+)")


def is_numbered(name: str) -> bool:
    """Whether a file of this name is a shard."""
    return _NUMBERED.fullmatch(name) is not None


def numbered_family(name: str) -> str:
    """Returns the common part of the names of a model's shards ("model-of-00003.safetensors"), or ""."""
    match = _NUMBERED.fullmatch(name)
    return f"{match['stem']}-of-{match['total']}{match['suffix']}" if match else ""


def _read_indexed(into: CheckpointBuilder, level: FolderState, names: Sequence[str]) -> None:
    done: set[str] = set(names)
    indices: dict[object, str] = {}
    for name in names:
        known = indices.setdefault(identity_of(level.path / name) or name, name)
        if known == name:
            done |= _add_index(into, level.path, name, level.prefix)
        else:  # otherwise each link would open all shards again
            into.remarks.append(f"{level.prefix}{name} is a link to {known}, and is read once")
    level.indexed = any(map(is_numbered, done))
    level.taken |= done


INDEXED = Layout(name="", claims=lambda name: name.endswith(".index.json"), read=_read_indexed)


def _add_index(into: CheckpointBuilder, folder: Path, name: str, prefix: str) -> frozenset[str]:
    """Open the shards that an index lists; returns their names, so that they are not opened twice."""
    try:
        with RegularFile(folder / name, prefix + name) as file:
            table = read_weight_map(file)
    except CheckpointError as error:
        into.refuse(prefix + name, error)
        return frozenset()
    return add_shards(into, folder / name, table, prefix) if table is not None else frozenset()


def add_shards(into: CheckpointBuilder, index: Path, table: Mapping[str, str], prefix: str) -> frozenset[str]:
    """Open the shards of an index's table (tensor -> shard) and compare both; returns the shards' names."""
    shards = sorted(set(table.values()))
    opened: list[FilePart] = []
    for shard in shards:
        try:
            file = RegularFile(index.parent / shard, prefix + shard)
        except CheckpointError as error:
            kind = "unreadable" if (index.parent / shard).exists() else "missing"
            message = f"{index.name} names this shard: {error}"
            into.errors.append(ErrorNote(what=prefix + shard, kind=kind, message=message))
            into.refusals.append(error)
            continue
        part = into.add(file, index=prefix + index.name)
        if part is not None:
            opened.append(part)
    check_numbers(into, shards, prefix, index.name)
    _note_absent(into, index.name, table, opened, prefix)
    return frozenset(shards)


def check_numbers(into: CheckpointBuilder, names: Iterable[str], prefix: str, index: str = "") -> None:
    """Note missing shards: those that only the names of the others show, or that an index does not list."""
    for matches in _families(names):
        missing = _first_absent(matches)
        if missing is None:
            continue
        there = f"{len(matches)} of {int(matches[0]['total'])} shards"
        message = f"{index} does not list {missing}: it lists {there}."
        into.lack(prefix + missing, message if index else f"{missing} is missing: {there} are there, and no index.")


def _families(names: Iterable[str]) -> list[list[re.Match[str]]]:
    families: dict[str, list[re.Match[str]]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            families.setdefault(numbered_family(name), []).append(match)
    return list(families.values())


def _first_absent(family: Sequence[re.Match[str]]) -> str | None:
    there = {int(match["number"]) for match in family}
    total = int(family[0]["total"])
    first = 0 if 0 in there else 1
    absent = next((n for n in range(first, first + min(total, 2 * len(there) + 8)) if n not in there), None)
    if absent is None or len(there) >= total:
        return None
    like = family[0]
    return f"{like['stem']}-{absent:0{len(like['number'])}d}-of-{like['total']}{like['suffix']}"


def _note_absent(
    into: CheckpointBuilder, index: str, table: Mapping[str, str], opened: Sequence[FilePart], prefix: str
) -> None:
    """Note tensors that no shard holds; loaders read whole shards, so one in another shard is harmless."""
    there = {name for part in opened for name in _names_in(part)}
    for part in opened:
        shard = part.name.removeprefix(prefix)
        gone = sorted(name for name, place in table.items() if place == shard and name not in there)
        if gone:
            message = f"{index} puts {len(gone)} tensors into {shard} that are not there, {gone[0]!r} first."
            into.errors.append(ErrorNote(what=part.name, kind="missing_keys", message=message))


def _names_in(part: FilePart) -> set[str]:
    names = {name for model in part.sections.models.values() for name in model}
    return names | {s.what for s in part.sections.skipped}


# -- the last layout: files that no other layout has taken, each by itself --

_OTHER = "not the name of a format that is read"
TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_*.pkl"

_LEFT_ALONE: tuple[tuple[str, str], ...] = (
    ("training_args.bin", "pickled arguments; never opened"),
    ("rng_state*.pth", "random state"),
    (RANDOM_STATES, "random state"),
    ("scheduler*.pt", "learning-rate schedule"),
    ("scheduler*.bin", "learning-rate schedule"),
    ("dl_state_dict*.bin", "a data loader's place"),
    ("custom_checkpoint_*.pkl", "pickled object; never opened"),
    ("sampler*.bin", "pickled object; never opened"),
    ("tokenizer*", "tokenizer"),
)
"""Usual neighbours of a checkpoint that hold no weights, moments or scaler."""

_TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".index.json")
"""In a folder only these are opened, in upper case as well; the contents then decide the format."""
_OTHER_WEIGHTS = re.compile(
    r"\.(safetensors|pt|pth|bin|ckpt|pkl|tar)[.~]|\.(weights|params|h5|keras|npz|npy|gguf|ggml|onnx|msgpack|ot|pickle|state)$",
    re.IGNORECASE,
)
"""Names of weights in a format that is not read, or of copies: reports list them, because they are not examined."""


def may_hold_tensors(name: str) -> bool:
    """Whether a file of this name is opened inside a folder; others are known to hold something else."""
    return name.lower().endswith(_TENSOR_SUFFIXES) and neighbour(name) is None


def neighbour(name: str) -> str | None:
    """Returns what a usual neighbour of checkpoints holds, by its name; None for any other name."""
    return next((what for pattern, what in _LEFT_ALONE if fnmatch.fnmatchcase(name.lower(), pattern)), None)


def _claims(name: str) -> bool:
    if name.startswith("events.out.tfevents."):  # TensorBoard's: a host's name follows, which may hold ".pt."
        return False
    says_weights = name.lower().endswith(_TENSOR_SUFFIXES) or _OTHER_WEIGHTS.search(name) is not None
    return name == TRAINER_STATE or says_weights


def _read(into: CheckpointBuilder, level: FolderState, names: Sequence[str]) -> None:
    left = [n for n in names if n not in level.taken and n not in level.listing.folders]
    check_numbers(into, [name for name in left if _add_file(into, level, name)], level.prefix)
    level.taken |= set(left)


def _add_file(into: CheckpointBuilder, level: FolderState, name: str) -> bool:
    """Open a single file; returns whether it became a part."""
    path, shown = level.path / name, level.prefix + name
    reason = _left_alone(name, indexed=level.indexed)
    if reason is not None:
        into.skipped.append(
            Skipped(what=shown, reason=reason, kind="other_weights" if reason == _OTHER else "left_out")
        )
        return False
    if name != TRAINER_STATE:
        family = level.prefix + numbered_family(name) if is_numbered(name) else ""
        return into.add_file(path, shown, family) is not None
    try:
        with RegularFile(path, shown) as file:
            into.global_step = read_global_step(file)
    except CheckpointError as error:
        into.refuse(shown, error)
    return False


def _left_alone(name: str, *, indexed: bool) -> str | None:
    """Returns why a file is not opened; None if it is."""
    if name != TRAINER_STATE and not name.lower().endswith(_TENSOR_SUFFIXES):
        return _OTHER
    if indexed and is_numbered(name):
        return "a shard that no index names"
    return neighbour(name)


LOOSE_FILES = Layout(name="", claims=_claims, read=_read)


LAYOUTS: tuple[Layout, ...] = (DISTRIBUTED, INDEXED, DEEPSPEED, LOOSE_FILES)
"""The layouts of a folder, in order. Each reads the files that it claims and that those before it have left."""

_FOLDERS_BELOW = 100
"""Maximum number of inner folders that are searched for checkpoints; a data set's folder has thousands."""
_LEVELS_BELOW = 3
"""How deep they are searched: a run's folder with `version_0/checkpoints/last.ckpt/`."""
_BUNDLE = frozenset({"manifest.json", "calls.safetensors"})
"""Files of a step that `ampdoctor run` has recorded: inputs and gradients of a sick step, no checkpoint."""
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
"""Which tool wrote a folder, by the names in it, the most specific first; used in reports only."""


def open_file(path: Path) -> Checkpoint:
    """Returns a checkpoint that is one file, or the index of a sharded one."""
    gathering = CheckpointBuilder(layout="sharded")
    file = RegularFile(path, path.name)
    try:
        found = sniff(file)
        if found == "json":
            with file:
                table = read_weight_map(file)
            if table is None:
                said = f"{path.name} is a JSON file, but not the index of a sharded checkpoint."
                gathering.refusals.append(NoCheckpointError(said))
            add_shards(gathering, path, table or {}, "")
        else:
            gathering.layout = found
            gathering.add(file)
        return _finish(gathering, path.name)
    except BaseException:
        file.close()
        gathering.close()
        raise


def open_folder(listing: Listing, *, below: bool = False, one_save: bool = False) -> Checkpoint:
    """Opens a folder; one that names its latest checkpoint is read as that. `below` reads inner folders, too.

    `one_save` says that its files are known to be saved together, because their names have one step.
    """
    gathering = CheckpointBuilder()
    try:
        gathering.folders.append((listing, ""))
        _add_with_ranks(gathering, listing, "")
        followed = _follow(gathering, listing)
        if below and gathering.parts:
            _add_below(gathering, listing, followed)
        if gathering.layout == "folder":
            gathering.layout = _writer(listing.names)
        return _finish(gathering, listing.path.name or str(listing.path), one_save=one_save)
    except BaseException:
        gathering.close()
        raise


def may_be_read(name: str) -> bool:
    """Whether a file of this name is read with its folder, or shows what the folder is."""
    telling = (pattern for patterns, _ in _WRITERS for pattern in patterns)
    return (
        any(layout.claims(name) for layout in LAYOUTS)
        or is_pointer(name)
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in telling)
    )


def says_checkpoint(name: str) -> bool:
    """Whether a file of this name shows that its folder holds a checkpoint."""
    return may_hold_tensors(name) or any(layout.claims(name) for layout in LAYOUTS if layout is not LOOSE_FILES)


@dataclass(frozen=True, slots=True)
class Subfolders:
    """What lies in the folders below a folder."""

    folders: tuple[tuple[str, Listing], ...] = ()  # those with files of a checkpoint, by path from the first folder
    skipped: tuple[Skipped, ...] = ()  # what was not searched, and why
    unlisted: tuple[tuple[str, CheckpointError], ...] = ()  # folders that cannot be listed


def search_below(
    root: Listing, apart: Collection[str], is_run: Callable[[Listing], bool] = lambda _: False
) -> Subfolders:
    """Search the folders below `root` for files of checkpoints, not those named `apart`; a run's folder is one."""
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
    return Subfolders(tuple(folders), tuple(skipped), tuple(unlisted))


def _searched(listing: Listing, apart: Collection[str]) -> list[str]:
    return [n for n in listing.names if n in listing.folders and n not in apart and not n.startswith((".", "__"))]


def parts_in(listing: Listing) -> set[str]:
    """Returns the inner folders that are read with a checkpoint: of ranks, saved apart, and the latest by a pointer."""
    apart = [layout for layout in LAYOUTS if layout is not LOOSE_FILES]
    own = {n for n in listing.folders if _MEGATRON_RANK.fullmatch(n) or any(one.claims(n) for one in apart)}
    pointer = pointer_in(listing)
    try:
        return own | ({target_of(listing.path, pointer)} if pointer is not None else set())
    except CheckpointError:  # following it reports the error
        return own


def is_plain(listing: Listing) -> bool:
    """Whether no name in a folder shows a layout: each of its files stands by itself."""
    apart = [layout for layout in LAYOUTS if layout is not LOOSE_FILES]
    claimed = any(layout.claims(name) for layout in apart for name in listing.names)
    return not claimed and not parts_in(listing) and _writer(listing.names) == "folder"


def _add_below(into: CheckpointBuilder, listing: Listing, followed: str | None) -> None:
    """Open the files in the folders below that no other part of the checkpoint has taken."""
    taken = parts_in(listing) | ({followed} if followed is not None else set())
    below = search_below(listing, taken)
    into.skipped += below.skipped
    for name, error in below.unlisted:
        into.refuse(name, error)
    step, layout = into.global_step, into.layout
    for name, inner in below.folders:
        _add_with_ranks(into, inner, f"{name}/")
        into.global_step, into.layout = step, layout


def _writer(names: Sequence[str]) -> str:
    return next(
        (writer for patterns, writer in _WRITERS if all(fnmatch.filter(names, pattern) for pattern in patterns)),
        "folder",
    )


def _add_with_ranks(into: CheckpointBuilder, listing: Listing, prefix: str) -> None:
    """Open a folder's checkpoint files and those in the folders of its ranks, each once, whatever links there are."""
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


def _add_folder(into: CheckpointBuilder, listing: Listing, prefix: str) -> None:
    """Open the checkpoint files among a folder's files; reports show them with `prefix`."""
    level = FolderState(listing, prefix)
    before = len(into.parts)
    for layout in LAYOUTS:
        at = len(into.parts)
        layout.read(into, level, [name for name in listing.names if layout.claims(name)])
        if layout.name and len(into.parts) > at:
            into.layout = layout.name
    for part in into.parts[before:]:
        part.index = part.index or level.unit


def _follow(into: CheckpointBuilder, listing: Listing) -> str | None:
    """Open the folder that a pointer names as the latest, which may be gone where files lie beside; returns it."""
    folder, names = listing.path, listing.names
    pointer = pointer_in(listing)
    if pointer is None:
        return None
    try:
        target = target_of(folder, pointer)
    except CheckpointError as error:
        into.refuse(pointer, error)
        return None
    if target in names and (folder / target).is_symlink():
        into.refuse(pointer, CheckpointError(f"{pointer} names {target}, which is a link; name what it leads to."))
    elif target in listing.folders:
        try:
            below = list_folder(folder / target)
        except CheckpointError as error:
            into.refuse(target, error)
        else:
            into.folders.append((below, f"{target}/"))
            _add_with_ranks(into, below, f"{target}/")
    elif into.parts:
        into.remarks.append(f"{pointer} names the folder {target}, which is not there")
    else:
        into.refuse(pointer, CheckpointError(f"{pointer} names the folder {target}, which is not there."))
    return target


def _finish(gathered: CheckpointBuilder, name: str, *, one_save: bool = False) -> Checkpoint:
    if not gathered.parts:
        if gathered.refusals:
            raise gathered.refusals[0]
        raise NoCheckpointError(
            f"{name} holds no checkpoint: no file in it is in a format that is read "
            "(safetensors, torch.save, torch.distributed.checkpoint)."
        )
    return Checkpoint(
        path=name,
        format=gathered.layout,
        parts=gathered.parts,
        folders=tuple(gathered.folders),
        global_step=gathered.global_step,
        skipped=tuple(gathered.skipped),
        errors=tuple(gathered.errors),
        remarks=tuple(gathered.remarks),
        one_save=one_save,
    )


# -- the entry point --


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint's structure; the result holds files open, so use it as a context manager.

    `path` is a `.safetensors` file, an index of shards, a file of `torch.save`, or a folder of these or of
    `torch.distributed.checkpoint`; the contents decide the format. Raises CheckpointError if it does not exist, is
    refused, or nothing in it can be read, LimitExceededError if it asks for more than a safe bound.
    """
    target = Path(path)
    return open_folder(list_folder(target)) if is_folder(target) else open_file(target)
