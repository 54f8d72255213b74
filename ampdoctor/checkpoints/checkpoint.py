"""A checkpoint: its files, its tensors and scalers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from ampdoctor.checkpoints.file_contents import (
    MASTER_GROUP,
    FileContents,
    averaged_names,
    clean_names,
    is_average,
    is_master,
    main_model,
    role_of,
    tensors_in,
)
from ampdoctor.checkpoints.files import Listing, RegularFile
from ampdoctor.checkpoints.parameter_names import name_listed, name_parameters, role_of_state
from ampdoctor.checkpoints.scalers import not_numbers, number, scaler_state
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.checkpoint_stats import ScalerState, TensorRole
from ampdoctor.evidence.report import ErrorNote, Skipped

# -- files, and which of them belong together: shards form one unit, any other file its own --


@dataclass(slots=True)
class FilePart:
    """One file's content. `index` names the index that lists it as a shard, `beside` further files with its tensors."""

    file: RegularFile
    sections: FileContents
    name: str  # relative to what was opened
    index: str = ""
    beside: tuple[RegularFile, ...] = ()

    @property
    def files(self) -> tuple[RegularFile, ...]:
        """All of its files."""
        return (self.file, *self.beside)


class ShardGroup:
    """Files whose state dicts, by path in the file and `main` first, are parts of the same models."""

    def __init__(self, name: str, parts: Sequence[FilePart]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.inner = all("/" in part.name for part in parts)
        merged: dict[str, dict[str, StoredTensor]] = {}
        for part in parts:
            for path, model in part.sections.models.items():
                merged.setdefault(path, {}).update(model)
        self.main = main_model(list(merged))
        self.models = dict(sorted(merged.items(), key=lambda item: item[0] != self.main))
        self.ordered = all(part.sections.ordered for part in parts if part.sections.models)
        self.clean = {path: clean_names(list(model)) for path, model in merged.items()}  # to names of the bare model

    def same_model_as(self, other: ShardGroup) -> bool:
        """Whether it is only the safetensors copy of the same model, which keeps only one name of a tied weight."""
        alone = all(not p.sections.optimizers and not p.sections.scalers for u in (self, other) for p in u.parts)
        return alone and not self.ordered and other.ordered and self._outline().items() <= other._outline().items()

    def _outline(self) -> dict[str, tuple[int, ...]]:
        main = self.models[self.main] if self.main is not None else {}
        return {name: tensor.shape for name, tensor in main.items()}


def units_of(parts: Sequence[FilePart]) -> tuple[ShardGroup, ...]:
    """Returns the parts grouped into units, in the order of their first part."""
    groups: dict[str, list[FilePart]] = {}
    for part in parts:
        groups.setdefault(part.index or part.name, []).append(part)
    return tuple(ShardGroup(name, group) for name, group in groups.items())


def chosen_unit(units: Sequence[ShardGroup]) -> ShardGroup | None:
    """Returns the unit with a checkpoint's model: not an inner folder's, of twins the safetensors; None if unsure."""
    every = [unit for unit in units if unit.models]
    holders = sorted([unit for unit in every if not unit.inner] or every, key=lambda unit: unit.ordered)
    if len(holders) == 2 and holders[0].same_model_as(holders[1]):
        return holders[0]
    return holders[0] if len(holders) == 1 else None


_SKIPS_SHOWN = 20
"""Maximum number of places listed for one reason of skipping; the others are counted."""
_OFTEN = 16
"""Maximum number of names or views per byte, on average."""
_SMALL_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint: its path relative to what was opened (a single file's name), and its size."""

    path: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """One tensor of a checkpoint, which has not been read yet.

    `name` is as in `named_parameters()` or `named_buffers()` of the bare model; for optimizer state it is the
    parameter's name if that is certain, else "param N". `module` is its owner, "" for the root or if unknown.
    """

    name: str
    role: TensorRole
    entry: str  # last part of the address: "weight", "running_var", "exp_avg_sq"
    module: str
    group: str  # path of its state dict or optimizer if that is not the main one ("ema")
    file: str  # relative to what was opened
    stored: StoredTensor

    @property
    def dtype(self) -> torch.dtype:
        """Stored element type."""
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical sizes."""
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        """Number of bytes that are read for it."""
        return self.stored.nbytes


class Checkpoint:
    """A checkpoint whose structure has been read. Iterating over it yields its tensors.

    It is a context manager, because it holds files open.

    Attributes:
        path: The path that the user gave.
        format: "safetensors", "torch-zip", "torch-legacy", "sharded", a folder's layout if names show it ("hf-trainer",
            "accelerate", "deepspeed", "torch-dcp", ...), else "folder".
        skipped: Parts that are recognised and not read, with the reason.
        errors: Missing or unreadable parts; a scan is incomplete without them.
        remarks: Harmless oddities of the layout, in sentences.
        unsafe_globals: Names of its classes and functions that `torch.load(weights_only=True)` refuses, in order.
        global_step: Training step, from the Trainer's state, the file's own counter, or the optimizer's.
        steps: The step of each file, where a folder's files are no parts of one save; else empty.
        loss: The loss that was saved with the weights.
        folders: The folders that may hold its training log, each with the prefix of its files in reports.
        lost: Numbers outside of its tensors and scalers that are not finite.
        unread: Its tensors and files of weights whose values are not read, and may be anything.
    """

    def __init__(
        self,
        *,
        path: str,
        format: str,  # noqa: A002 - the name that reports use
        parts: list[FilePart],
        folders: tuple[tuple[Listing, str], ...] = (),
        global_step: int | None = None,
        skipped: tuple[Skipped, ...] = (),
        errors: tuple[ErrorNote, ...] = (),
        remarks: tuple[str, ...] = (),
        one_save: bool = False,
    ) -> None:
        self.path = path
        self.format = format
        self.folders = folders
        self.errors = errors
        self.remarks = remarks
        self.skipped = (*skipped, *(s for part in parts for s in part.sections.skipped))
        self.unsafe_globals = tuple(dict.fromkeys(name for part in parts for name in part.sections.unsafe_globals))
        self.parts = parts
        self._units = units_of(parts)
        self.scalers: tuple[ScalerState, ...] = tuple(self._find_scalers())
        self.lost = tuple(replace(one, file=part.name) for part in parts for one in part.sections.lost)
        self.unread = tuple(one for one in self.skipped if one.kind == "unread")
        self.skipped = tuple(_folded(self.skipped))
        one_save = one_save or format != "folder" or sum(bool(unit.models) for unit in self._units) < 2
        self.steps = {} if one_save else self._find_steps()
        self.global_step = global_step if global_step is not None else self._find_step()
        losses = [part.sections.loss for part in parts if part.sections.loss is not None]
        self.loss = next((loss for loss in losses if not math.isfinite(loss)), losses[-1] if losses else None)
        self._refs: tuple[TensorRef, ...] = tuple(self._find_tensors())
        bound = _OFTEN * sum(file.size for part in parts for file in part.files) + _SMALL_BYTES
        if self.total_bytes > bound:  # thousands of views of one storage
            raise LimitExceededError(f"{path}: bytes that its tensors cover", bound, self.total_bytes)

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """The files that are read, in order."""
        return tuple(CheckpointFile(file.name, file.size) for part in self.parts for file in part.files)

    @property
    def total_bytes(self) -> int:
        """Number of bytes that are read for all chunks together."""
        return sum(ref.nbytes for ref in self._refs)

    def __iter__(self) -> Iterator[TensorRef]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def models(self) -> dict[str, dict[str, StoredTensor]]:
        """Returns state dicts by path in the file, the main one first; names as stored.

        Raises CheckpointError if a folder holds several models and none of them is the main one.
        """
        unit = chosen_unit(self._units)
        if unit is not None:
            return unit.models
        holders = [unit.name for unit in self._units if unit.models]
        if holders:
            raise CheckpointError(
                f"{self.path} holds {len(holders)} models ({', '.join(holders[:5])}); name one of them."
            )
        return {}

    def optimizers(self) -> dict[str, Mapping[str, Any]]:
        """Returns optimizer state dicts by path in the file, with tensors as `StoredTensor`."""
        return _by_path([(part, part.sections.optimizers) for part in self.parts])

    def scaler_dicts(self) -> dict[str, Mapping[str, Any]]:
        """Returns loss scaler state dicts by path in the file, as they were saved."""
        return _by_path([(part, part.sections.scalers) for part in self.parts])

    def require_unchanged(self) -> None:
        """Raises CheckpointError if a file changed since it was opened."""
        for part in self.parts:
            for file in part.files:
                file.require_unchanged()

    def close(self) -> None:
        """Close its files."""
        for part in self.parts:
            for file in part.files:
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_tensors(self) -> Iterator[TensorRef]:
        chosen = chosen_unit(self._units)
        weightless = not any(unit.models for unit in self._units)
        for unit in self._units:
            owner = unit if unit.models else chosen
            models = list(owner.models.values()) if owner is not None else []
            for part in unit.parts:
                yield from self._model_tensors(unit, part)
                several = len(part.sections.optimizers) > 1
                for path, optimizer in part.sections.optimizers.items():
                    names = name_parameters(optimizer, models, ordered=owner is not None and owner.ordered)
                    yield from self._moments(optimizer, names, path if several else "")
                    yield from self._master_weights(optimizer, names, part.sections.master_weights.get(path, []))
                for path, stored in part.sections.others.items():
                    yield self._loose(path, stored, weightless=weightless)

    def _model_tensors(self, unit: ShardGroup, part: FilePart) -> Iterator[TensorRef]:
        for path, model in part.sections.models.items():
            listed = name_listed(model, unit.models[unit.main]) if unit.main is not None and path != unit.main else {}
            averaged = averaged_names(list(unit.models[path]))
            for raw, stored in model.items():
                name = listed.get(raw) or unit.clean[path][raw]
                told = part.sections.buffers.get(path)
                role = role_of(name) if told is None else "buffer" if raw in told else "weight"
                if raw in averaged or (path != unit.main and is_average(path)):
                    role = "ema"
                yield self._ref(name, role, "" if path == unit.main else path, stored)

    def _master_weights(
        self, optimizer: Mapping[str, Any], names: Mapping[Any, str], groups: list[list[StoredTensor]]
    ) -> Iterator[TensorRef]:
        """Yields an optimizer's fp32 copies, under the names of its parameters if there is a copy for each."""
        for index, copies in enumerate(groups):
            group = optimizer["param_groups"][index] if index < len(optimizer["param_groups"]) else None
            ids = group.get("params") if isinstance(group, Mapping) else None
            paired = ids if isinstance(ids, list | tuple) and len(ids) == len(copies) else [None] * len(copies)
            for place, (pid, stored) in enumerate(zip(paired, copies, strict=True)):
                known = names.get(pid) if isinstance(pid, int | str) else None
                yield self._ref(known or f"group {index} param {place}", "weight", MASTER_GROUP, stored)

    def _loose(self, path: str, stored: StoredTensor, *, weightless: bool) -> TensorRef:
        """Returns a tensor outside every state dict; without any state dict it counts as a weight."""
        if is_master(path) and stored.shape:
            return self._ref(path, "weight", MASTER_GROUP, stored)
        whole = path == "tensor"  # a file that is one number
        return self._ref(path, role_of(path) if weightless and (stored.shape or whole) else "other", "", stored)

    def _moments(self, optimizer: Mapping[str, Any], names: Mapping[Any, str], group: str) -> Iterator[TensorRef]:
        for pid, state in optimizer["state"].items():
            known = names.get(pid)
            name = known if known is not None else f"param {pid}"
            for entry, stored in tensors_in(state):
                if isinstance(stored, StoredTensor):
                    ref = self._ref(name, role_of_state(entry) if entry else "other", group, stored)
                    yield replace(ref, entry=entry or "state", module=ref.module if known is not None else "")

    def _ref(self, name: str, role: TensorRole, group: str, stored: StoredTensor) -> TensorRef:
        module, _, entry = name.rpartition(".")
        return TensorRef(
            name=name, role=role, entry=entry, module=module, group=group, file=stored.file_name, stored=stored
        )

    def _find_scalers(self) -> Iterator[ScalerState]:
        unread: list[Skipped] = []
        seen: set[object] = set()
        for part in self.parts:
            for path, saved in part.sections.scalers.items():
                state = scaler_state(saved, path or "scaler", part.name)
                if state is not None:
                    # ranks that save a file each (mp_rank_00/x.pt, mp_rank_01/x.pt) save the one scaler of the run
                    same = part.name.rpartition("/")[2], replace(state, file="")
                    if same not in seen:
                        seen.add(same)
                        yield state
                else:
                    reason = f"this loss scaler's state holds something else than a number as {not_numbers(saved)}"
                    unread.append(Skipped(what=path or "scaler", reason=reason))
        self.skipped = (*self.skipped, *unread)

    def _find_step(self) -> int | None:
        """Returns the step of the save; None where the files that hold a model do not agree on one."""
        if not self.steps:
            return _step_in(self.parts)
        chosen = chosen_unit(self._units)
        holders = [unit for unit in self._units if unit.models] if chosen is None else [chosen]
        told = {self.steps[part.name] for unit in holders for part in unit.parts}
        return told.pop() if len(told) == 1 else None

    def _find_steps(self) -> dict[str, int | None]:
        """Returns the step of each file; one without a model belongs to the only model that it can belong to."""
        chosen = chosen_unit(self._units)
        bare = [part for unit in self._units if not unit.models for part in unit.parts]
        saves = [list(unit.parts) for unit in self._units if unit.models and unit is not chosen]
        saves += [[part] for part in bare] if chosen is None else [[*chosen.parts, *bare]]
        return {part.name: step for save in saves for step in [_step_in(save)] for part in save}


def _step_in(parts: Sequence[FilePart]) -> int | None:
    """Returns the step that files of one save hold: their own counter, or else their optimizers'."""
    stored = [part.sections.global_step for part in parts if part.sections.global_step is not None]
    if stored:
        return max(stored)
    steps = [
        number(state.get("step"))
        for part in parts
        for optimizer in part.sections.optimizers.values()
        for state in optimizer["state"].values()
        if isinstance(state, Mapping)
    ]
    whole = [int(s) for s in steps if s is not None and 0 <= s < 2.0**53 and s == int(s)]
    return max(whole, default=None)


class LiveState(Checkpoint):
    """The state of a run in memory, as if it had been saved; `optimizers` are as `Checkpoint.optimizers` returns."""

    def __init__(
        self,
        refs: Sequence[TensorRef],
        optimizers: Mapping[str, Mapping[str, Any]],
        scalers: tuple[ScalerState, ...] = (),
        global_step: int | None = None,
    ) -> None:
        self._optimizers = dict(optimizers)
        super().__init__(path="the run", format="run", parts=[], global_step=global_step)
        self._refs = tuple(refs)
        self.scalers = scalers

    def optimizers(self) -> dict[str, Mapping[str, Any]]:
        """As in `Checkpoint`."""
        return self._optimizers


def _folded(skipped: Sequence[Skipped]) -> Iterator[Skipped]:
    """Yields at most `_SKIPS_SHOWN` places for each reason, and the number of the others."""
    seen: Counter[str] = Counter()
    for each in skipped:
        seen[each.reason] += 1
        if seen[each.reason] <= _SKIPS_SHOWN:
            yield each
    for reason, count in seen.items():
        if count > _SKIPS_SHOWN:
            yield Skipped(what=f"{count - _SKIPS_SHOWN} more", reason=reason)


def _by_path(found: Sequence[tuple[FilePart, Mapping[str, Mapping[str, Any]]]]) -> dict[str, Mapping[str, Any]]:
    """Returns the states of all files by path; if two files use one path, by file and path."""
    often = Counter(path for _, states in found for path in states)
    return {
        path if often[path] == 1 else f"{part.name}:{path}".rstrip(":"): state
        for part, states in found
        for path, state in states.items()
    }
