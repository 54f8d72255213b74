"""The folder of a run with its checkpoints: which there are, and in which order they were saved.

A folder is a family only if its names, or else its files' contents, leave no doubt. Two models of one training
(`model.safetensors`, `model_1.safetensors`), shards, and the files of several processes are one checkpoint. In doubt,
everything in it is read as one checkpoint: that costs time, while the opposite mistake would skip files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.layouts.folder import MAX_FOLDER_ENTRIES, may_hold_tensors, open_folder
from ampdoctor.checkpoints.layouts.step_names import Moment, alias_of, moment_of
from ampdoctor.checkpoints.opening import open_checkpoint
from ampdoctor.checkpoints.storage.files import identity_of, is_folder
from ampdoctor.errors import CheckpointError, LimitExceededError

_DISTRIBUTED = (".distcp", ".metadata")
_FINAL = "(final model)"
MAX_FOLDERS_BELOW = 100
"""Maximum number of folders that are searched for the one with the checkpoints; a data set's folder has thousands."""
_EVENLY = 5
"""Smallest common distance of numbers that count as saves although no word in the name says so; several models of one
training are numbered 0, 1, 2."""
_TRAINING_STATE = ("optimizer", "scheduler", "rng_state", "random_states", "scaler", "latest", "zero_to_fp32")
"""Files that only a checkpoint made during training has: a folder with one of them and a single folder that looks like
a step (`global_step500/`) is one checkpoint on two levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One checkpoint of a family.

    Attributes:
        name: Relative to the family's folder; `(final model)` for the files that lie there beside the checkpoints.
        inside: Folder of its files, relative to the family's folder; "" for that folder itself.
        path: The path to open; a folder with other things in it if `files` is not empty.
        files: Names of the files in `path` that form the checkpoint; () for all of it.
        unit: What `step` counts; "number" if that is unknown.
        step: Number in the name, or else the step stored inside; None if both are missing.
        placed: False if nothing tells when it was saved; such members come last.
        alias: Its name has a word instead of a number: `last.ckpt`, `model_best.pth`.
    """

    name: str
    path: Path
    inside: str = ""
    files: tuple[str, ...] = ()
    unit: Literal["step", "epoch", "number"] = "step"
    step: int | None = None
    placed: bool = True
    alias: bool = False

    @property
    def final(self) -> bool:
        """Is it the model that a training leaves beside its checkpoints?"""
        return self.name == _FINAL

    def open(self) -> Checkpoint:
        """Read its structure.

        Raises:
            CheckpointError: It cannot be read.
        """
        return open_folder(self.path, self.files) if self.files else open_checkpoint(self.path)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or a folder that may be a checkpoint."""

    name: str
    path: Path
    folder: bool
    moment: Moment | None
    alias: Literal["last", "chosen"] | None

    @property
    def key(self) -> tuple[int, int, int]:
        """Epoch if the name has it beside the step, number, and version."""
        moment = self.moment
        return (moment.epoch or 0, moment.number, moment.version) if moment is not None else (0, 0, 0)


def members(path: str | os.PathLike[str]) -> tuple[Member, ...] | None:
    """Returns the checkpoints of a run's folder, in the order in which they were saved; None if it is no such folder.

    Args:
        path: A run's folder, or a folder that contains one (Lightning's `version_0/checkpoints`).

    Raises:
        CheckpointError: It cannot be listed.
        LimitExceededError: It holds more than `MAX_FOLDER_ENTRIES` entries.
    """
    root = Path(path)
    if not is_folder(root):
        return None
    found = _family(root)
    if found is not None:
        return found
    entries = listed(root)
    if any(not folder and may_hold_tensors(name) for name, folder in entries):
        return None
    folders = [name for name, folder in entries if folder]
    if len(folders) > MAX_FOLDERS_BELOW:
        return None
    below = [(name, family) for name in folders if (family := _family_below(root / name)) is not None]
    if len(below) != 1:
        return None
    (name, family) = below[0]
    return tuple(
        replace(m, name=m.name if m.final else f"{name}/{m.name}", inside=f"{name}/{m.inside}".rstrip("/"))
        for m in family
    )


def _family_below(folder: Path) -> tuple[Member, ...] | None:
    """Do the same for a folder that nobody named: None if it cannot be listed."""
    try:
        return _family(folder)
    except CheckpointError:
        return None


def _family(root: Path) -> tuple[Member, ...] | None:
    there = listed(root)
    entries = [_entry(root, name, folder=folder) for name, folder in there]
    candidates = [e for e in entries if (_is_candidate(e) if e.folder else may_hold_tensors(e.name))]
    series = [e for e in candidates if e.moment is not None and e.moment.unit != "unsure"]
    series += _proved([e for e in candidates if e.moment is not None and e.moment.unit == "unsure"], series)
    named = {e.name for e in series}
    aliases = [e for e in candidates if e.alias is not None and e.name not in named]
    named |= {e.name for e in aliases}
    rest = [e for e in candidates if not e.folder and e.name not in named]
    groups = _together(series)
    if not groups:
        return None
    final = _final(root, rest, {name for name, _ in there}, groups)
    if len(groups) + len(aliases) + (final is not None) < 2 and not _alone(groups[0], rest, {n for n, _ in there}):
        return None
    return _ordered(groups, _unique(aliases, series), final, rest if final is None else [])


def _is_candidate(folder: _Entry) -> bool:
    return (folder.moment is not None or folder.alias is not None) and _holds_tensors(folder.path)


def _entry(root: Path, name: str, *, folder: bool) -> _Entry:
    return _Entry(name, root / name, folder, moment_of(name, folder=folder), alias_of(name, folder=folder))


def listed(folder: Path) -> list[tuple[str, bool]]:
    """Returns the names in a folder, sorted, and whether each is a folder.

    Raises:
        CheckpointError: It cannot be listed.
        LimitExceededError: It holds more than `MAX_FOLDER_ENTRIES` entries.
    """
    names: list[tuple[str, bool]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append((entry.name, _leads_to_folder(entry)))
                if len(names) > MAX_FOLDER_ENTRIES:
                    raise LimitExceededError(f"{folder.name}: files in the folder", MAX_FOLDER_ENTRIES, len(names))
    except OSError as error:
        raise CheckpointError(f"{folder.name} cannot be listed: {(error.strerror or str(error)).lower()}.") from None
    return sorted(names)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    """Is it a folder or a link to one? A link to itself is neither; opening it gives an error."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _holds_tensors(folder: Path, levels: int = 2) -> bool:
    """Does a checkpoint lie in a folder, or in one inside it?"""
    try:
        there = listed(folder)
    except CheckpointError:
        return True  # it is a member that cannot be read, and is reported as such
    if any(not inner and (may_hold_tensors(name) or name.endswith(_DISTRIBUTED)) for name, inner in there):
        return True
    return levels > 1 and any(_holds_tensors(folder / name, levels - 1) for name, inner in there if inner)


def _proved(unsure: Sequence[_Entry], series: Sequence[_Entry]) -> list[_Entry]:
    """Returns names with a number and no word for time that are still moments of one training."""
    stems: dict[str, list[_Entry]] = {}
    for entry in sorted(unsure, key=lambda e: e.key):
        if entry.moment is not None:
            stems.setdefault(entry.moment.stem, []).append(entry)
    sure = [group for group in stems.values() if len(group) > 1 and _is_series(group)]
    moments = [{e.key for e in group} for group in (*sure, *_stems(series).values()) if len(group) > 1]
    companions = [g for g in stems.values() if g not in sure and {e.key for e in g} in moments]
    return [entry for group in (*sure, *companions) for entry in group]


def _is_series(group: Sequence[_Entry]) -> bool:
    """Are the models the same and do the stored steps grow, or do at least the numbers look like steps?"""
    first, last = (_look(Member(name=e.name, path=e.path)) for e in (group[0], group[-1]))
    if first is None or last is None or not first[1] or first[1] != last[1]:
        return False
    if first[0] is not None and last[0] is not None:
        return first[0] < last[0]
    numbers = [e.key[1] for e in group]
    step = math.gcd(*numbers)
    return len(numbers) > 2 and step >= _EVENLY and max(numbers) // step <= 2 * len(numbers)


def _look(member: Member) -> tuple[int | None, frozenset[tuple[str, tuple[int, ...]]]] | None:
    """Returns the stored step and the outline of a member's weights; None if it cannot be read."""
    try:
        with member.open() as checkpoint:
            return checkpoint.global_step, frozenset((r.name, r.shape) for r in checkpoint if r.role == "weight")
    except CheckpointError:
        return None


def _stems(entries: Iterable[_Entry]) -> dict[str, list[_Entry]]:
    stems: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.moment is not None:
            stems.setdefault(entry.moment.stem, []).append(entry)
    return stems


def _together(series: Sequence[_Entry]) -> list[list[_Entry]]:
    """Group entries of one moment that form one checkpoint: series of files that share all their moments.

    `model_100.pt` and `optimizer_100.pt` do; `epoch=1-step=100.ckpt` and its `-v1` do not, nor do a folder and a file.
    """
    kinds: dict[tuple[bool, frozenset[tuple[int, int, int]]], list[list[_Entry]]] = {}
    for group in _stems(series).values():
        moments = frozenset(e.key for e in group)
        kinds.setdefault((any(e.folder for e in group), moments), []).append(group)
    out: list[list[_Entry]] = []
    for (folders, moments), alike in kinds.items():
        if folders or len(moments) < 2 or len(alike) == 1:
            out += [[entry] for group in alike for entry in group]
        else:
            out += [[e for group in alike for e in group if e.key == moment] for moment in sorted(moments)]
    return out


def _final(root: Path, rest: Sequence[_Entry], there: set[str], groups: Sequence[Sequence[_Entry]]) -> Member | None:
    """Returns the model that a training leaves beside the folders of its checkpoints."""
    if not rest or not all(e.folder for group in groups for e in group):
        return None
    if len(groups) == 1 and any(name.startswith(_TRAINING_STATE) for name in there):
        return None
    files = tuple(name for name in sorted(there) if name == "trainer_state.json" or name in {e.name for e in rest})
    return Member(name=_FINAL, path=root, files=files)


def _alone(group: Sequence[_Entry], rest: Sequence[_Entry], there: set[str]) -> bool:
    """Does a run's folder hold a single checkpoint so far, in its own folder, and nothing else of it?"""
    return group[0].folder and not rest and not any(name.startswith(_TRAINING_STATE) for name in there)


def _unique(aliases: Sequence[_Entry], series: Sequence[_Entry]) -> list[_Entry]:
    """Returns the aliases that are not links to a member under its own name."""
    known = {identity_of(e.path) for e in series}
    return [e for e in aliases if (identity := identity_of(e.path)) is None or identity not in known]


def _ordered(
    groups: Sequence[Sequence[_Entry]], aliases: Sequence[_Entry], final: Member | None, rest: Sequence[_Entry]
) -> tuple[Member, ...]:
    unit = _unit(groups)
    placed: list[tuple[tuple[int, ...], Member]] = []
    ends: list[Member] = []
    lost: list[Member] = []
    by_epoch = unit == "step" and not _steps_follow_epochs(groups)
    for group in groups:
        main = group[0]
        member = _member(group, unit)
        moment = main.moment
        if moment is None or (moment.unit == "epoch") != (unit == "epoch"):
            step = None if by_epoch else _stored_step(member)
            if step is None:
                lost.append(member)
            else:
                placed.append(((step, 1, 0), replace(member, step=step)))
            continue
        first = (moment.epoch or 0,) if by_epoch else ()
        placed.append(((*first, moment.number, 0, moment.version), replace(member, step=moment.number)))
    comparable = unit == "step" and not by_epoch
    if unit == "number" and aliases:
        comparable = _counts_steps(placed)
    for entry in aliases:
        member = replace(_member([entry], unit), alias=True)
        step = _stored_step(member) if comparable else None
        if step is not None:
            placed.append(((step, 1, 0), replace(member, step=step)))
        elif entry.alias == "last":
            ends.append(member)
        else:
            lost.append(member)
    lost += [Member(name=e.name, path=e.path) for e in rest]
    ends += [final] if final is not None else []
    in_order = [member for _, member in sorted(placed, key=lambda pair: (pair[0], pair[1].name))]
    return (*in_order, *ends, *(replace(member, placed=False) for member in lost))


def _unit(groups: Sequence[Sequence[_Entry]]) -> Literal["step", "epoch", "number"]:
    units = [group[0].moment.unit for group in groups if group[0].moment is not None]
    if all(unit == "epoch" for unit in units):
        return "epoch"
    return "step" if "step" in units else "number"


def _steps_follow_epochs(groups: Sequence[Sequence[_Entry]]) -> bool:
    """Do steps grow with the epochs of the names? If not, they are counted anew in each epoch."""
    both = [m for group in groups if (m := group[0].moment) is not None and m.epoch is not None]
    steps = [m.number for m in sorted(both, key=lambda m: (m.epoch or 0, m.number))]
    return steps == sorted(steps)


def _counts_steps(placed: Sequence[tuple[tuple[int, ...], Member]]) -> bool:
    """Are numbers without a word for steps (`checkpoint-500`) the steps stored inside?"""
    last = max(placed, key=lambda pair: pair[0], default=None)
    return last is not None and _stored_step(last[1]) == last[1].step


def _stored_step(member: Member) -> int | None:
    found = _look(member)
    return found[0] if found is not None else None


def _member(group: Sequence[_Entry], unit: Literal["step", "epoch", "number"]) -> Member:
    main = group[0]
    if len(group) == 1:
        return Member(name=main.name, path=main.path, inside=main.name if main.folder else "", unit=unit)
    names = tuple(e.name for e in group)
    return Member(name=_common(names), path=main.path.parent, files=names, unit=unit)


def _common(names: Sequence[str]) -> str:
    return f"{names[0]} + {len(names) - 1} more" if len(names) > 2 else " + ".join(names)
