"""The folder of a run with its checkpoints: which there are, and in which order they were saved.

A folder is a family only if its names, or else its files' contents, leave no doubt. Two models of one training
(`model.safetensors`, `model_1.safetensors`), shards, and the files of several processes are one checkpoint. In doubt,
everything in it is read as one checkpoint: that costs time, while the opposite mistake would skip files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ampdoctor.checkpoints.contents.checkpoint import Checkpoint
from ampdoctor.checkpoints.layouts.folder import open_folder, says_checkpoint
from ampdoctor.checkpoints.layouts.loose_files import may_hold_tensors
from ampdoctor.checkpoints.layouts.step_names import Moment, alias_of, moment_of
from ampdoctor.checkpoints.opening import open_checkpoint
from ampdoctor.checkpoints.storage.files import identity_of
from ampdoctor.checkpoints.storage.listing import Listing, list_folder
from ampdoctor.errors import CheckpointError

_FINAL = "(final model)"
MAX_FOLDERS_BELOW = 100
"""Most folders that are searched for the one with the checkpoints; a data set's folder has thousands."""
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
        path: What is opened; a folder with other things in it where `files` is not empty.
        files: Names of the files in `path` that are the checkpoint; () for all of it.
        unit: What `step` counts; "number" where that is not known.
        step: Number in the name, or the step stored inside where the name has none; None where neither tells.
        placed: False where nothing tells when it was saved; such members come last.
        alias: Its name says which of a series it is in place of a number: `last.ckpt`, `model_best.pth`.
        listing: The folder of its files as it was found; None for a file, and for a folder that cannot be listed.
    """

    name: str
    path: Path
    inside: str = ""
    files: tuple[str, ...] = ()
    unit: Literal["step", "epoch", "number"] = "step"
    step: int | None = None
    placed: bool = True
    alias: bool = False
    listing: Listing | None = field(default=None, compare=False, repr=False)

    @property
    def final(self) -> bool:
        """Is it the model that a training leaves beside its checkpoints?"""
        return self.name == _FINAL

    def open(self) -> Checkpoint:
        """Read its structure.

        Raises:
            CheckpointError: It cannot be read.
        """
        if self.listing is None:
            return open_checkpoint(self.path)
        return open_folder(self.listing.only(self.files) if self.files else self.listing)


@dataclass(frozen=True, slots=True)
class Family:
    """The checkpoints of a run.

    Attributes:
        members: They, in the order in which they were saved; at least one.
        home: The folder in which they lie.
    """

    members: tuple[Member, ...]
    home: Listing


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or a folder that may be a checkpoint; the folder's content, where it has been listed."""

    name: str
    path: Path
    folder: bool
    moment: Moment | None
    alias: Literal["last", "chosen"] | None
    listing: Listing | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Epoch if the name has it beside the step, number, and version."""
        moment = self.moment
        return (moment.epoch or 0, moment.number, moment.version) if moment is not None else (0, 0, 0)


def family_in(root: Listing) -> Family | None:
    """The checkpoints in a run's folder; None where it is no such folder.

    Args:
        root: The folder, or one with such a folder in it (Lightning's `version_0/checkpoints`).
    """
    found = _family(root)
    if found is not None:
        return Family(found, root)
    if any(map(may_hold_tensors, root.files)) or len(root.folders) > MAX_FOLDERS_BELOW:
        return None
    below = [(name, family) for name in sorted(root.folders) if (family := _family_below(root.path / name)) is not None]
    if len(below) != 1:
        return None
    (name, family) = below[0]
    named = tuple(
        replace(m, name=m.name if m.final else f"{name}/{m.name}", inside=f"{name}/{m.inside}".rstrip("/"))
        for m in family.members
    )
    return Family(named, family.home)


def _family_below(folder: Path) -> Family | None:
    """The same for a folder that nobody named: one that cannot be listed is none."""
    try:
        home = list_folder(folder)
        found = _family(home)
    except CheckpointError:
        return None
    return None if found is None else Family(found, home)


def _family(root: Listing) -> tuple[Member, ...] | None:
    entries = [_entry(root, name) for name in root.names]
    candidates = [seen for e in entries if (seen := _candidate(e)) is not None]
    series = [e for e in candidates if e.moment is not None and e.moment.unit != "unsure"]
    series += _proved([e for e in candidates if e.moment is not None and e.moment.unit == "unsure"], series)
    named = {e.name for e in series}
    aliases = [e for e in candidates if e.alias is not None and e.name not in named]
    named |= {e.name for e in aliases}
    rest = [e for e in candidates if not e.folder and e.name not in named]
    groups = _together(series)
    if not groups:
        return None
    final = _final(root, rest, groups)
    if len(groups) + len(aliases) + (final is not None) < 2 and not _alone(groups[0], rest, root.names):
        return None
    return _ordered(root, groups, _unique(aliases, series), final, rest if final is None else [])


def _entry(root: Listing, name: str) -> _Entry:
    folder = name in root.folders
    return _Entry(name, root.path / name, folder, moment_of(name, folder=folder), alias_of(name, folder=folder))


def _candidate(entry: _Entry) -> _Entry | None:
    """The entry if it may be a checkpoint, by its name and, of a folder, by what lies in it."""
    if not entry.folder:
        return entry if may_hold_tensors(entry.name) else None
    if entry.moment is None and entry.alias is None:
        return None
    try:
        listing = list_folder(entry.path)
    except CheckpointError:
        return entry  # it is a member that cannot be read, and said to be one
    return replace(entry, listing=listing) if _holds_checkpoint(listing) else None


def _holds_checkpoint(listing: Listing, levels: int = 2) -> bool:
    """Whether a checkpoint lies in a folder, or in one inside it."""
    if any(map(says_checkpoint, listing.files)):
        return True
    return levels > 1 and any(_may_hold(listing.path / name, levels - 1) for name in sorted(listing.folders))


def _may_hold(folder: Path, levels: int) -> bool:
    try:
        return _holds_checkpoint(list_folder(folder), levels)
    except CheckpointError:
        return True


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


def _final(root: Listing, rest: Sequence[_Entry], groups: Sequence[Sequence[_Entry]]) -> Member | None:
    """The model that a training leaves beside the folders of its checkpoints."""
    if not rest or not all(e.folder for group in groups for e in group):
        return None
    if len(groups) == 1 and any(name.startswith(_TRAINING_STATE) for name in root.names):
        return None
    files = tuple(name for name in root.names if name == "trainer_state.json" or name in {e.name for e in rest})
    return Member(name=_FINAL, path=root.path, files=files, listing=root)


def _alone(group: Sequence[_Entry], rest: Sequence[_Entry], there: Sequence[str]) -> bool:
    """Whether a folder of a run holds one checkpoint so far, in a folder of its own, and says nothing else of it."""
    return group[0].folder and not rest and not any(name.startswith(_TRAINING_STATE) for name in there)


def _unique(aliases: Sequence[_Entry], series: Sequence[_Entry]) -> list[_Entry]:
    """Returns the aliases that are not links to a member under its own name."""
    known = {identity_of(e.path) for e in series}
    return [e for e in aliases if (identity := identity_of(e.path)) is None or identity not in known]


def _ordered(
    root: Listing,
    groups: Sequence[Sequence[_Entry]],
    aliases: Sequence[_Entry],
    final: Member | None,
    rest: Sequence[_Entry],
) -> tuple[Member, ...]:
    unit = _unit(groups)
    placed: list[tuple[tuple[int, ...], Member]] = []
    ends: list[Member] = []
    lost: list[Member] = []
    by_epoch = unit == "step" and not _steps_follow_epochs(groups)
    for group in groups:
        main = group[0]
        member = _member(root, group, unit)
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
        member = replace(_member(root, [entry], unit), alias=True)
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


def _member(root: Listing, group: Sequence[_Entry], unit: Literal["step", "epoch", "number"]) -> Member:
    main = group[0]
    if len(group) == 1:
        inside = main.name if main.folder else ""
        return Member(name=main.name, path=main.path, inside=inside, unit=unit, listing=main.listing)
    names = tuple(e.name for e in group)
    return Member(name=_common(names), path=root.path, files=names, unit=unit, listing=root)


def _common(names: Sequence[str]) -> str:
    return f"{names[0]} + {len(names) - 1} more" if len(names) > 2 else " + ".join(names)
