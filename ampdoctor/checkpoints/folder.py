"""Files and folders that make up a checkpoint: which are opened, which are left alone, and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.files import RegularFile, is_folder
from ampdoctor.checkpoints.json_file import read_trainer_state, read_weight_map
from ampdoctor.checkpoints.log_files import is_log, read_log
from ampdoctor.checkpoints.parts import Part
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.checkpoints.sniff import Format, sniff
from ampdoctor.checkpoints.structure import Sections, sort_out
from ampdoctor.checkpoints.torch_legacy import read_torch_legacy
from ampdoctor.checkpoints.torchzip import read_torch_zip
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.checkpoint import LogEntry
from ampdoctor.evidence.report import ErrorNote, Skipped

MAX_FOLDER_ENTRIES = 20_000
"""A checkpoint folder holds hundreds of files; a data set's folder given by mistake holds millions."""

_TRAINER_STATE = "trainer_state.json"

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
"""Known neighbours of a checkpoint that hold no weights, moments or scaler."""

_TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".index.json")
"""Inside a folder only these are looked at; the format is then decided by content."""


@dataclass(slots=True)
class _Gathering:
    """What opening a folder's files has found so far."""

    parts: list[Part] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    errors: list[ErrorNote] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    refusals: list[CheckpointError] = field(default_factory=list)
    log: tuple[LogEntry, ...] = ()
    global_step: int | None = None

    def refuse(self, name: str, error: CheckpointError) -> None:
        kind = "limit" if isinstance(error, LimitExceededError) else "unreadable"
        self.errors.append(ErrorNote(what=name, kind=kind, message=str(error)))
        self.refusals.append(error)

    def close(self) -> None:
        for part in self.parts:
            part.file.close()


def open_file(path: Path) -> Checkpoint:
    """A checkpoint that is one file, or the index of a sharded one.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = RegularFile(path, path.name)
    try:
        found = sniff(file)
        if found == "json":
            table = _index_of(file)
        else:
            return Checkpoint(path=path.name, format=found, parts=[Part(file, _sections(file, found), path.name)])
    except BaseException:
        file.close()
        raise
    file.close()
    gathering = _Gathering()
    try:
        _add_shards(gathering, path, table)
        return _finish(gathering, path.name, "sharded")
    except BaseException:
        gathering.close()
        raise


def open_folder(path: Path, only: Sequence[str] | None = None) -> Checkpoint:
    """A checkpoint that is a folder: weights, and optimizer, scaler and the Trainer's log where they are.

    Args:
        path: The folder.
        only: Names of the files that belong to it, where the folder holds others as well; None for all of them.

    Raises:
        CheckpointError: Nothing in it can be read.
    """
    gathering = _Gathering()
    try:
        names = _names(path) if only is None else list(only)
        shards: set[str] = set()
        for name in [n for n in names if n.endswith(".index.json")]:
            shards |= _add_index(gathering, path, name)
        for name in names:
            if name not in shards and not name.endswith(".index.json"):
                _add_file(gathering, path, name, indexed=bool(shards))
        return _finish(gathering, path.name or str(path), "folder", inside=path)
    except BaseException:
        gathering.close()
        raise


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


def _add_index(into: _Gathering, folder: Path, name: str) -> set[str]:
    """Open an index's shards; returns their names, so that they are not opened twice."""
    try:
        with RegularFile(folder / name, name) as file:
            table = read_weight_map(file)
    except CheckpointError as error:
        into.refuse(name, error)
        return set()
    if table is None:
        return set()
    return _add_shards(into, folder / name, table)


def _add_shards(into: _Gathering, index: Path, table: Mapping[str, str]) -> set[str]:
    shards = sorted(set(table.values()))
    listed: dict[str, set[str]] = {shard: set() for shard in shards}
    for key, shard in table.items():
        listed[shard].add(key)
    there = set(_names(index.parent))
    for shard in shards:
        before = len(into.parts)
        try:
            file = RegularFile(index.parent / shard, shard)
        except CheckpointError as error:
            missing = shard not in there
            into.errors.append(
                ErrorNote(
                    what=shard,
                    kind="missing" if missing else "unreadable",
                    message=f"{index.name} names this shard: {error}",
                )
            )
            into.refusals.append(error)
            continue
        _open_part(into, file, shard, index.name)
        if len(into.parts) > before:
            _compare(into, index.name, shard, listed[shard])
    return set(shards)


def _compare(into: _Gathering, index: str, shard: str, listed: set[str]) -> None:
    sections = into.parts[-1].sections
    present = {name for model in sections.models.values() for name in model} | {s.what for s in sections.skipped}
    absent = sorted(listed - present)
    if absent:
        message = f"{index} puts {len(absent)} tensors into {shard} that are not there, {absent[0]!r} first."
        into.errors.append(ErrorNote(what=shard, kind="missing_keys", message=message))
    extra = sorted(present - listed)
    if extra:
        into.remarks.append(f"{shard} holds {len(extra)} tensors that {index} does not list, {extra[0]!r} first")


def _add_file(into: _Gathering, folder: Path, name: str, *, indexed: bool) -> None:
    path = folder / name
    if is_log(name):
        _add_log(into, path, name)
        return
    reason = next((why for pattern, why in _LEFT_ALONE if fnmatch.fnmatchcase(name, pattern)), None)
    if name != _TRAINER_STATE and not name.endswith(_TENSOR_SUFFIXES):
        return
    if is_folder(path):
        return
    if reason is not None:
        into.skipped.append(Skipped(what=name, reason=reason))
        return
    if indexed and fnmatch.fnmatchcase(name, "*-[0-9]*-of-[0-9]*"):
        into.skipped.append(Skipped(what=name, reason="a shard that no index names"))
        return
    try:
        file = RegularFile(path, name)
    except CheckpointError as error:
        into.refuse(name, error)
        return
    if name == _TRAINER_STATE:
        try:
            with file:
                into.global_step, log = read_trainer_state(file)
                into.log = log or into.log
        except CheckpointError as error:
            into.refuse(name, error)
        return
    _open_part(into, file, name)


def _add_log(into: _Gathering, path: Path, name: str) -> None:
    """Take the longest log of the folder; one that cannot be read takes nothing from the checkpoint."""
    if is_folder(path):
        return
    try:
        with RegularFile(path, name) as file:
            entries = read_log(file)
    except CheckpointError as error:
        into.skipped.append(Skipped(what=name, reason=f"not read as a log: {error}"))
        return
    if len(entries) > len(into.log):
        into.log = entries


def _open_part(into: _Gathering, file: RegularFile, name: str, index: str = "") -> None:
    try:
        found = sniff(file)
        into.parts.append(Part(file, _sections(file, found), name, index))
    except CheckpointError as error:
        file.close()
        into.refuse(name, error)


def _index_of(file: RegularFile) -> dict[str, str]:
    table = read_weight_map(file)
    if table is None:
        raise CheckpointError(f"{file.name} is a JSON file, but not the index of a sharded checkpoint.")
    return table


def _sections(file: RegularFile, found: Format) -> Sections:
    if found == "json":
        raise CheckpointError(f"{file.name} is a JSON file, not a checkpoint.")
    if found == "safetensors":
        content = read_safetensors(file)
        return Sections(
            models={"": content.tensors} if content.tensors else {}, skipped=list(content.skipped), ordered=False
        )
    return sort_out(read_torch_legacy(file) if found == "torch-legacy" else read_torch_zip(file))


def _finish(gathered: _Gathering, name: str, layout: str, inside: Path | None = None) -> Checkpoint:
    if not gathered.parts:
        if gathered.refusals:
            raise gathered.refusals[0]
        raise CheckpointError(_nothing(name, inside))
    return Checkpoint(
        path=name,
        format=layout,
        parts=gathered.parts,
        log=gathered.log,
        global_step=gathered.global_step,
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
    return f"{name} holds no checkpoint: no file in it is in a format that is read (safetensors, torch.save)."


def may_hold_tensors(name: str) -> bool:
    """Whether a file of this name is looked at inside a folder, and not known to hold something else."""
    return name.endswith(_TENSOR_SUFFIXES) and not any(fnmatch.fnmatchcase(name, known) for known, _ in _LEFT_ALONE)
