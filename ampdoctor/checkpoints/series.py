"""Checkpoints of one run in the order of their steps, and the step in a file's or folder's name."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.files import Listing, identity_of, list_folder
from ampdoctor.checkpoints.folder import (
    Subfolders,
    is_plain,
    may_hold_tensors,
    open_checkpoint,
    open_folder,
    parts_in,
    says_checkpoint,
    search_below,
)
from ampdoctor.errors import CheckpointError

# -- the step in a name --
#
# Only the word right before a number says what it counts: `step_100` is a step, `rank_100` a process, `model_1` either
# the first step or the second of two models. For an uncertain name ("unsure") the caller looks inside.

Unit = Literal["step", "epoch", "number", "unsure"]
"""What a name's number counts: steps; epochs; saves or steps (`checkpoint-500`); or perhaps not time (`model_500`)."""

_STEP_WORDS = frozenset({"step", "steps", "iter", "iters", "iteration", "iterations", "update", "updates"})
_EPOCH_WORDS = frozenset({"epoch", "epochs", "ep"})
_SAVE_WORDS = frozenset({"checkpoint", "checkpoints", "ckpt", "ckpts", "chkpt", "snapshot", "save"})
_LAST_WORDS = frozenset({"last", "latest", "final", "newest"})
_CHOSEN_WORDS = frozenset({"best"})
_NO_TIME = frozenset(
    {
        "rank", "ranks", "shard", "part", "of", "layer", "expert", "random", "rng", "worker", "fold", "seed", "node",
        "consolidated", "fsdp", "zero", "custom",
    }
)  # fmt: skip
"""A number next to one of these words, or beside one, counts pieces of one checkpoint."""

_PIECES = frozenset({"rank", "ranks", "shard", "part", "worker", "node", "gpu", "mp", "tp", "pp", "dp", "fsdp", "zero"})
"""A number after one of these words counts pieces of one checkpoint, even where the name has a step."""
_COMPONENTS = frozenset(
    {
        "model", "net", "network", "module", "weights", "params", "state", "optimizer", "optim", "opt", "optimizers",
        "scheduler", "sched", "scaler", "ema", "swa", "avg", "average", "averaged", "shadow", "raw", "g", "d", "dur",
        "netg", "netd", "gen", "generator", "disc", "discriminator", "critic", "actor", "policy", "value", "target",
        "online", "teacher", "student", "encoder", "decoder", "vae", "unet", "prior", "lora", "adapter", "head",
        "backbone", "embedding", "embeddings",
    }
)  # fmt: skip
"""Words for the part of a training that a file holds: files that differ only in these belong to one training."""
_RUN = re.compile(
    r"(?<![A-Za-z])(exp|experiment|run|trial|seed|fold|job)[-_=]?([A-Z]|\d+)(?![A-Za-z\d])", re.IGNORECASE | re.ASCII
)
"""The part of a name that says which training it belongs to: `exp1`, `seed=2`, `runB`."""
_TOKEN = re.compile(r"\d+\.\d+|[A-Za-z]+|\d+|#")

_SUFFIX = re.compile(r"(\.pth\.tar|\.[a-z]+)$")
_VERSION = re.compile(r"-v(\d+)$")
_NUMBERED = re.compile(r"([A-Za-z]*)([-_=. ]*)(?<!\d)(?<!\d\.)(\d+)((?:[-_]\d+)?)(?![\dA-Za-z]|\.\d)")
_WORD = re.compile(r"[a-z]+")
_PIECE = re.compile(r"\d+-of-\d+")
_PADDED = 4
"""A number right after a word counts if it has so many digits (`model010000`); with fewer it is the word's (`fp16`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAt:
    """When a checkpoint was saved, as its name says."""

    unit: Unit
    number: int  # the finest, if the name has several
    epoch: int | None  # if the name has it beside the step
    stem: str  # the name without these numbers: equal for the files of one series
    version: int = 0  # the number that Lightning adds to files of one step (`-v1`)


def moment_of(name: str, *, folder: bool) -> SavedAt | None:
    """Returns what a name says about the time of the save, or None. `name` has its suffix."""
    base = name.removesuffix(".ckpt") if folder else _SUFFIX.sub("", name)
    found = _VERSION.search(base)
    base = _VERSION.sub("", base)
    version = int(found.group(1)) if found else 0
    by_unit: dict[Unit, re.Match[str]] = {}
    for match in _NUMBERED.finditer(base):
        unit = _unit_of_name(match, base, folder=folder)
        if unit is not None:
            by_unit[unit] = match
    order: tuple[Unit, ...] = ("step", "epoch", "number", "unsure")
    unit = next((unit for unit in order if unit in by_unit), None)
    if unit is None:
        return None
    match = by_unit[unit]
    finest = match.group(3) if unit == "epoch" else match.group(4) or match.group(3)
    epoch = by_unit.get("epoch") if unit == "step" else None
    stem = base
    for part in sorted((m for m in (match, epoch) if m is not None), key=lambda m: -m.start()):
        stem = f"{stem[: part.start(3)]}#{stem[part.end() :]}"
    return SavedAt(
        unit=unit,
        number=int(finest.lstrip("-_")),
        epoch=int(epoch.group(3)) if epoch is not None else None,
        stem=stem,
        version=version,
    )


def step_in(path: Path) -> int | None:
    """Returns the step in a file's or folder's name; None if its number may count something else."""
    moment = moment_of(path.name, folder=path.is_dir())
    return moment.number if moment is not None and moment.unit == "step" else None


def run_of(stem: str, *, settings: bool = False) -> str:
    """Returns the rest of a stem, equal for the files of one training; with `settings`, decimals (`lr0.1`) count."""
    told: list[str] = []
    before = ""
    for token in _TOKEN.findall(stem):
        word = token.lower()
        part = before in _PIECES if word.isdigit() else "." in word and (before in _COMPONENTS or not settings)
        if not part and word not in _COMPONENTS | _CHOSEN_WORDS | _LAST_WORDS | _PIECES:
            told.append(word)
        before = word
    return " ".join(told)


def names_run(stem: str) -> str | None:
    """Returns the part of a stem that names one of several trainings (`exp1`), or None."""
    match = _RUN.search(stem)
    return match.group(0).lower() if match is not None else None


def alias_of(name: str, *, folder: bool) -> Literal["last", "chosen"] | None:
    """Returns "last" or "chosen" for a name with a word instead of a number: `last.ckpt`, `model_best.pth`."""
    base = _VERSION.sub("", name if folder else _SUFFIX.sub("", name))
    words = set(_WORD.findall(base.lower()))
    if words & _LAST_WORDS:
        return "last"
    return "chosen" if words & _CHOSEN_WORDS else None


def without_alias(name: str) -> str:
    """Returns a name in lower case without the words that `alias_of` recognises."""
    return _WORD.sub(lambda word: "" if word.group(0) in _LAST_WORDS | _CHOSEN_WORDS else word.group(0), name.lower())


def _unit_of_name(match: re.Match[str], base: str, *, folder: bool) -> Unit | None:
    word = match.group(1).lower()
    if word in _STEP_WORDS:
        return "step"
    if word in _EPOCH_WORDS:
        return "epoch"
    words = set(_WORD.findall(base.lower()))
    if _PIECE.search(base) or words & _NO_TIME:
        return None
    if word in _SAVE_WORDS:
        return "number"
    if folder:
        return "unsure" if base == match.group(3) else None  # `run_1` and `version_1` are different trainings
    attached = word and not match.group(2)
    return None if attached and len(match.group(3)) < _PADDED else "unsure"


_FINAL = "(final model)"
_EVENLY = 5
"""Smallest common distance of numbers that are saves without a word: models of one training are numbered 0, 1, 2."""
_TRAINING_STATE = ("optimizer", "scheduler", "rng_state", "random_states", "scaler", "latest", "zero_to_fp32")
"""Files that a checkpoint has: with one of them a folder that looks like a step (`global_step500/`) is its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """One checkpoint of a family; `name` and `inside` are relative to the family's folder, `path` is opened."""

    name: str  # `(final model)` for files that lie beside the checkpoints
    path: Path
    inside: str = ""
    files: tuple[str, ...] = ()
    unit: Literal["step", "epoch", "number"] = "step"  # "number" if unknown
    step: int | None = None  # from the name, else the one stored inside
    placed: bool = True  # False if its time is unknown; such members come last
    alias: bool = False  # named by a word instead of a number: `last.ckpt`, `model_best.pth`
    beside: bool = False  # in a folder beside the series, and no part of it
    stored: bool = False  # in order only by the step stored inside
    listing: Listing | None = field(default=None, compare=False, repr=False)

    @property
    def final(self) -> bool:
        """Whether it is the model that a training leaves beside its checkpoints."""
        return self.name == _FINAL

    def open(self) -> Checkpoint:
        """Read its structure."""
        if self.listing is None:
            return open_checkpoint(self.path)
        listing = self.listing.only(self.files) if self.files else self.listing
        return open_folder(listing, below=True, one_save=bool(self.files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One of several runs, or checkpoints, that lie in a folder."""

    name: str  # relative to the folder; "" for the folder's own files
    names: tuple[str, ...]  # its checkpoints, in order
    paths: tuple[str, ...]  # arguments that select only it, relative to the folder

    def __str__(self) -> str:
        """One line for a list."""
        if not self.name:
            return f"{self.names[0]} to {self.names[-1]}" if len(self.names) > 1 else self.names[0]
        if len(self.names) > 1:
            return f"{self.name} ({len(self.names)} checkpoints, {self.names[0]} to {self.names[-1]})"
        return self.name


@dataclass(frozen=True, slots=True)
class Contents:
    """The checkpoints in a folder."""

    members: tuple[SavedCheckpoint, ...] = ()  # of the only run, in the order of their saving; () if there is none
    home: Listing | None = None  # their folder
    several: tuple[Series, ...] = ()  # the runs, and checkpoints beside them, if there are several
    below: Subfolders = field(default_factory=Subfolders)  # what was skipped below the folder

    @property
    def by_name(self) -> bool:
        """Whether their names show that the members are of one run, so that not each has to be read."""
        return not any(member.stored for member in self.members)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or folder that may be a checkpoint; `listing` is set once the folder has been listed."""

    name: str
    path: Path
    folder: bool
    moment: SavedAt | None
    alias: Literal["last", "chosen"] | None
    listing: Listing | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Epoch (if the name has it beside the step), number, and version."""
        moment = self.moment
        return (moment.epoch or 0, moment.number, moment.version) if moment is not None else (0, 0, 0)


def contents_of(root: Listing) -> Contents:
    """Returns the checkpoints in a folder, and in folders in it (Lightning's `version_0/checkpoints`)."""
    groups = _groups(root)
    members = _members(root, groups)
    parts = parts_in(root)
    itself = bool(parts) or any(map(says_checkpoint, root.files))
    known = {*parts, *(Path(member.inside).parts[0] for member in members if member.inside)}
    below = search_below(root, known, _is_run)
    counted = [(name, listing, _groups(listing, sure=True)) for name, listing in below.folders]
    runs = [(name, inner, found) for name, inner, found in counted if found is not None and found.count > 1]
    single = [(name, listing) for name, listing, found in counted if found is None or found.count < 2]
    rest = replace(below, folders=())
    apart = _apart(groups)
    if apart:
        inside = _several(root, (), runs, single) if below.folders else ()
        return Contents(several=(*apart, *(one for one in inside if one.name)), below=rest)
    if runs and (members or itself or len(below.folders) > 1):
        return Contents(several=tuple(_several(root, members, runs, single)), below=rest)
    if members:
        beside = (
            SavedCheckpoint(name=name, path=listing.path, inside=name, placed=False, beside=True, listing=listing)
            for name, listing in single
        )
        return Contents((*members, *beside), root, below=rest)
    if itself:
        return Contents()  # opening it also reads the folders below
    if runs:
        ((name, inner, found),) = runs
        apart = _apart(found, name)
        if apart:
            return Contents(several=apart, below=rest)
        return Contents(_within(name, _ordered(inner, found)), inner, below=rest)
    if len(single) == 1:
        return Contents(_only(*single[0]), single[0][1], below=rest)
    return Contents(several=tuple(Series(name=n, names=(n,), paths=(n,)) for n, _ in single), below=rest)


def _members(root: Listing, groups: _Groups | None) -> tuple[SavedCheckpoint, ...]:
    return _by_stored_step(root) if groups is None else _ordered(root, groups)


def _by_stored_step(root: Listing) -> tuple[SavedCheckpoint, ...]:
    """Returns files that each hold the same model and a step of their own, in the order of the steps; () for others."""
    names = [name for name in root.files if may_hold_tensors(name)]
    told = all(not name.lower().endswith(".safetensors") for name in names)  # those hold no step
    if len(names) < 2 or not told or not is_plain(root) or len({names_run(name) for name in names}) > 1:
        return ()
    by_step: dict[int, SavedCheckpoint] = {}
    outlines = set()
    for name in names:
        member = SavedCheckpoint(name=name, path=root.path / name, stored=True)
        step, outline, _ = _look(member) or (None, frozenset(), False)
        outlines.add(outline)
        if step is None or step in by_step or not outline or len(outlines) > 1:
            return ()
        by_step[step] = replace(member, step=step)
    return tuple(by_step[step] for step in sorted(by_step))


def _is_run(listing: Listing) -> bool:
    """Whether the names in a folder alone show a series of checkpoints."""
    found = _groups(listing, sure=True)
    return found is not None and found.count > 1


def _apart(groups: _Groups | None, inside: str = "") -> tuple[Series, ...]:
    """Returns the trainings whose checkpoints lie side by side, by names or contents; () unless there are several."""
    entries = [entry for group in groups.series for entry in group] if groups is not None else []
    entries = [entry for entry in entries if entry.alias is None]
    saves: dict[tuple[str, object], set[str]] = {}
    for entry in entries:
        saves.setdefault((_run_of(entry), entry.key), set()).add(_run_of(entry, settings=True))
    settings = any(len(said) > 1 for said in saves.values())  # `lr0.1_step100.pt` beside `lr0.01_step100.pt`
    lines: dict[str, list[_Entry]] = {}
    for entry in entries:
        lines.setdefault(_run_of(entry, settings=settings), []).append(entry)
    if len(lines) < 2 or not any(_of_two_runs(one, other) for one, other in itertools.combinations(lines.values(), 2)):
        return ()
    told: list[Series] = []
    for line in lines.values():
        names = [entry.name for entry in sorted(line, key=lambda e: (e.key, e.name))]
        at = tuple(os.path.join(inside, name) for name in names)  # noqa: PTH118 - as typed
        told.append(Series(name="", names=at, paths=at))
    return tuple(told)


def _run_of(entry: _Entry, *, settings: bool = False) -> str:
    return run_of(entry.moment.stem, settings=settings) if entry.moment is not None else ""


def _of_two_runs(one: Sequence[_Entry], other: Sequence[_Entry]) -> bool:
    pairs = [(a, b) for a in one for b in other if a.key == b.key and a.folder == b.folder]
    a, b = pairs[0] if pairs else (one[0], other[0])
    if a.moment is None or b.moment is None or a.moment.unit != b.moment.unit:
        return False
    said, by = names_run(a.moment.stem), names_run(b.moment.stem)
    if said is not None and by is not None:
        return said != by
    if not pairs and (len(one) < 2 or len(other) < 2):
        return False
    looks = [_look(SavedCheckpoint(name=entry.name, path=entry.path)) for entry in (a, b)]
    first, second = looks
    return first is not None and second is not None and bool(first[1]) and first[1:] == second[1:]


def _only(name: str, listing: Listing) -> tuple[SavedCheckpoint, ...]:
    """Returns what the only folder with checkpoints holds, which may be a series."""
    members = _members(listing, _groups(listing))
    if not members:
        return (SavedCheckpoint(name=name, path=listing.path, inside=name, listing=listing),)
    return _within(name, members)


def _within(name: str, members: Iterable[SavedCheckpoint]) -> tuple[SavedCheckpoint, ...]:
    return tuple(
        replace(m, name=m.name if m.final else f"{name}/{m.name}", inside=f"{name}/{m.inside}".rstrip("/"))
        for m in members
    )


def _several(
    root: Listing,
    members: Sequence[SavedCheckpoint],
    runs: Sequence[tuple[str, Listing, _Groups]],
    single: Sequence[tuple[str, Listing]],
) -> Iterator[Series]:
    """Yields the runs in a folder, that of the folder itself first."""
    own = [m.name for m in members if not m.final] or [name for name in root.files if may_hold_tensors(name)]
    own = own or sorted(parts_in(root))
    if own:
        yield Series(name="", names=tuple(own), paths=tuple(own))
    found = {name: _ordered(listing, groups) for name, listing, groups in runs}
    for name in sorted([*found, *(name for name, _ in single)]):
        inner = tuple(member.name for member in found.get(name, ())) or (name,)
        yield Series(name=name, names=inner, paths=(name,))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The checkpoints among the names in a folder, not yet ordered."""

    series: list[list[_Entry]]
    aliases: list[_Entry]
    final: SavedCheckpoint | None
    rest: list[_Entry]

    @property
    def count(self) -> int:
        return len(self.series) + len(self.aliases) + (self.final is not None)


def _groups(root: Listing, *, sure: bool = False) -> _Groups | None:
    entries = [_entry(root, name) for name in root.names]
    candidates = [seen for e in entries if (seen := _candidate(e)) is not None]
    series = [e for e in candidates if e.moment is not None and e.moment.unit != "unsure"]
    unsure = [e for e in candidates if e.moment is not None and e.moment.unit == "unsure"]
    series += [] if sure else _proved(unsure, series)
    named = {e.name for e in series}
    aliases = [e for e in candidates if e.alias is not None and e.name not in named]
    named |= {e.name for e in aliases}
    rest = [e for e in candidates if not e.folder and e.name not in named]
    groups = _together(series)
    if not groups and (rest or not _stand_for_a_series(aliases)):
        return None
    final = _final(root, rest, groups)
    found = _Groups(groups, _unique(aliases, series), final, rest if final is None else [])
    if len(groups) + len(aliases) + (final is not None) < 2 and not _alone(groups[0], rest, root.names):
        return None
    return found


def _stand_for_a_series(aliases: Sequence[_Entry]) -> bool:
    """Whether words alone name checkpoints of one training: `best.pt` and `last.pt`, which differ only in those."""
    said = {without_alias(entry.name) for entry in aliases}
    return len(aliases) > 1 and len(said) == 1 and any(entry.alias == "last" for entry in aliases)


def _entry(root: Listing, name: str) -> _Entry:
    folder = name in root.folders
    return _Entry(name, root.path / name, folder, moment_of(name, folder=folder), alias_of(name, folder=folder))


def _candidate(entry: _Entry) -> _Entry | None:
    """Returns the entry if its name, and the contents of a folder, allow a checkpoint."""
    if not entry.folder:
        return entry if may_hold_tensors(entry.name) else None
    if entry.moment is None and entry.alias is None:
        return None
    try:
        listing = list_folder(entry.path)
    except CheckpointError:
        return entry  # opening it reports the error
    if not _holds_checkpoint(listing):
        return None
    return None if _is_run(listing) else replace(entry, listing=listing)  # no run, whatever its number


def _holds_checkpoint(listing: Listing) -> bool:
    if any(map(says_checkpoint, listing.files)):
        return True
    try:
        inner = [list_folder(listing.path / name) for name in sorted(listing.folders)]
    except CheckpointError:
        return True
    return any(says_checkpoint(name) for one in inner for name in one.files)


def _proved(unsure: Sequence[_Entry], series: Sequence[_Entry]) -> list[_Entry]:
    """Returns those of the unsure entries that are saves of one training."""
    stems = _stems(sorted(unsure, key=lambda e: e.key))
    sure = [group for group in stems.values() if len(group) > 1 and _is_series(group)]
    moments = [{e.key for e in group} for group in (*sure, *_stems(series).values()) if len(group) > 1]
    companions = [g for g in stems.values() if g not in sure and {e.key for e in g} in moments]
    return [entry for group in (*sure, *companions) for entry in group]


def _is_series(group: Sequence[_Entry]) -> bool:
    """Whether the models are equal, and the stored steps grow or, without them, the numbers look like steps."""
    first, last = (_look(SavedCheckpoint(name=e.name, path=e.path)) for e in (group[0], group[-1]))
    if first is None or last is None or not first[1] or first[1] != last[1]:
        return False
    if first[0] is not None and last[0] is not None:
        return first[0] < last[0]
    numbers = [e.key[1] for e in group]
    step = math.gcd(*numbers)
    return len(numbers) > 2 and step >= _EVENLY and max(numbers) // step <= 2 * len(numbers)


def _look(member: SavedCheckpoint) -> tuple[int | None, frozenset[tuple[str, tuple[int, ...]]], bool] | None:
    """Returns the stored step, names and shapes of the weights, and whether optimizers exist; None if unreadable."""
    try:
        with member.open() as checkpoint:
            outline = frozenset((r.name, r.shape) for r in checkpoint if r.role == "weight")
            return checkpoint.global_step, outline, bool(checkpoint.optimizers())
    except CheckpointError:
        return None


def _stems(entries: Iterable[_Entry]) -> dict[str, list[_Entry]]:
    stems: dict[str, list[_Entry]] = {}
    for entry in entries:
        if entry.moment is not None:
            stems.setdefault(entry.moment.stem, []).append(entry)
    return stems


def _together(series: Sequence[_Entry]) -> list[list[_Entry]]:
    """Groups the entries of one step that form one checkpoint: series of files with exactly the same steps."""
    kinds: dict[tuple[bool, frozenset[tuple[int, int, int]]], list[list[_Entry]]] = {}
    for group in _stems(series).values():
        moments = frozenset(e.key for e in group)
        kinds.setdefault((any(e.folder for e in group), moments), []).append(group)
    out: list[list[_Entry]] = []
    for (folders, moments), alike in kinds.items():
        if len(moments) == 1 and not folders:  # the model and the optimizer of the only step so far
            lines: dict[tuple[str, bool], list[_Entry]] = {}
            for entry in (e for group in alike for e in group):
                lines.setdefault((_run_of(entry, settings=True), entry.alias is None), []).append(entry)
            out += list(lines.values())
        elif folders or len(alike) == 1:
            out += [[entry] for group in alike for entry in group]
        else:
            out += [[e for group in alike for e in group if e.key == moment] for moment in sorted(moments)]
    return out


def _final(root: Listing, rest: Sequence[_Entry], groups: Sequence[Sequence[_Entry]]) -> SavedCheckpoint | None:
    """Returns the model that a training leaves beside the folders of its checkpoints."""
    if not rest or not all(e.folder for group in groups for e in group):
        return None
    if len(groups) == 1 and any(name.startswith(_TRAINING_STATE) for name in root.names):
        return None
    files = tuple(name for name in root.names if name == "trainer_state.json" or name in {e.name for e in rest})
    return SavedCheckpoint(name=_FINAL, path=root.path, files=files, listing=root)


def _alone(group: Sequence[_Entry], rest: Sequence[_Entry], there: Sequence[str]) -> bool:
    """Whether a run's folder holds one checkpoint so far, in a folder of its own, and no other file of a checkpoint."""
    return group[0].folder and not rest and not any(name.startswith(_TRAINING_STATE) for name in there)


def _unique(aliases: Sequence[_Entry], series: Sequence[_Entry]) -> list[_Entry]:
    known = {identity_of(e.path) for e in series}
    return [e for e in aliases if (identity := identity_of(e.path)) is None or identity not in known]


def _ordered(root: Listing, found: _Groups) -> tuple[SavedCheckpoint, ...]:
    groups, aliases, final = found.series, found.aliases, found.final
    unit = _unit(groups)
    placed: list[tuple[tuple[int, ...], SavedCheckpoint]] = []
    ends: list[SavedCheckpoint] = []
    lost: list[SavedCheckpoint] = []
    both = [m for group in groups if (m := group[0].moment) is not None and m.epoch is not None]
    steps = [m.number for m in sorted(both, key=lambda m: (m.epoch or 0, m.number))]
    by_epoch = unit == "step" and steps != sorted(steps)  # steps that begin anew in each epoch
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
    if unit == "number" and aliases and placed:  # `checkpoint-500` may count steps
        _, last = max(placed, key=lambda pair: pair[0])
        comparable = _stored_step(last) == last.step
    for entry in aliases:
        member = replace(_member(root, [entry], unit), alias=True)
        step = _stored_step(member) if comparable else None
        if step is not None:
            placed.append(((step, 1, 0), replace(member, step=step)))
        elif entry.alias == "last":
            ends.append(member)
        else:
            lost.append(member)
    lost += [SavedCheckpoint(name=e.name, path=e.path) for e in found.rest]
    ends += [final] if final is not None else []
    in_order = [member for _, member in sorted(placed, key=lambda pair: (pair[0], pair[1].name))]
    return (*in_order, *ends, *(replace(member, placed=False) for member in lost))


def _unit(groups: Sequence[Sequence[_Entry]]) -> Literal["step", "epoch", "number"]:
    units = {group[0].moment.unit for group in groups if group[0].moment is not None}
    return "epoch" if units == {"epoch"} else "step" if "step" in units or not units else "number"


def _stored_step(member: SavedCheckpoint) -> int | None:
    found = _look(member)
    return found[0] if found is not None else None


def _member(root: Listing, group: Sequence[_Entry], unit: Literal["step", "epoch", "number"]) -> SavedCheckpoint:
    main = group[0]
    if len(group) == 1:
        inside = main.name if main.folder else ""
        return SavedCheckpoint(name=main.name, path=main.path, inside=inside, unit=unit, listing=main.listing)
    names = tuple(e.name for e in group)
    name = f"{names[0]} + {len(names) - 1} more" if len(names) > 2 else " + ".join(names)
    return SavedCheckpoint(name=name, path=root.path, files=names, unit=unit, listing=root)
