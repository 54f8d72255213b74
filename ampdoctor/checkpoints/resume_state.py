"""The state from which a replay resumes: tensors loaded as they are, and the position and random numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from ampdoctor.checkpoints.checkpoint import Checkpoint
from ampdoctor.checkpoints.file_contents import is_optimizer
from ampdoctor.checkpoints.files import Listing, RegularFile
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.gathering import read_saved
from ampdoctor.checkpoints.pickled_objects import numpy_array
from ampdoctor.checkpoints.stored_tensor import StoredTensor
from ampdoctor.checkpoints.torch_files import sniff
from ampdoctor.checkpoints.unpickler import PickledObject
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import ErrorNote, Skipped

# -- random numbers, schedules and data loaders --
#
# Frameworks and people keep these under names of their own, in the checkpoint or in files beside it. They are
# recognised by their form, and by name only where the form is ambiguous. Nothing in them is executed.

_BESIDE = (
    *("rng_state.pth", "rng_state_0.pth", "random_states_0.pkl"),
    *("scheduler.pt", "scheduler.bin", "dl_state_dict.bin"),
)
"""Files of the Trainer and Accelerate, of the first rank, that hold nothing that a scan examines."""
_LOADER = re.compile(r"(^|_)(data_?loader|dl|combined_loader)s?(_\d+)?(_states?)?(_dict)?s?$", re.IGNORECASE)
_RANDOM = re.compile(r"(^|_)(rngs?|random|seed)(_|$)", re.IGNORECASE)
_OF_A_DEVICE = re.compile(r"cuda|gpu|xpu|npu|mps|hpu|generator", re.IGNORECASE)
"""Parts of a path whose random state is not that of torch's generator for the CPU."""
_DEPTH = 8
_TOP = 2
"""Length of the path of an entry at the top of a file; the path begins with the file's name."""
_ITEMS = 64
"""A longer list is not searched: a loop's history is long and holds nothing of these."""
_PYTHON_VERSION = 3
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


@dataclass(slots=True, kw_only=True)
class RandomNumbers:
    """The generators' saved states; None for those that were not saved."""

    torch: torch.Tensor | None = None  # the CPU generator's
    python: tuple[Any, ...] | None = None  # for `random.setstate`
    numpy: tuple[Any, ...] | None = None  # for `numpy.random.set_state`
    of_devices: bool = False  # a GPU's generators were saved as well


@dataclass(slots=True, kw_only=True)
class ResumeState:
    """Random numbers, schedules and data loaders of a training when it was saved.

    `schedulers` and `loaders` are state dicts in stored order; `numbers` are plain numbers at the top of a file by
    name: counters, a best loss.
    """

    random: RandomNumbers = field(default_factory=RandomNumbers)
    schedulers: list[Mapping[str, Any]] = field(default_factory=list)
    loaders: list[Mapping[str, Any]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def visit(self, node: Any, path: tuple[str, ...]) -> None:
        """Take what lies in a part of a file; of each kind of random state the first counts."""
        if isinstance(node, Mapping):
            self._visit_mapping(node, path)
        elif isinstance(node, list | tuple):
            self._visit_sequence(node, path)
        elif isinstance(node, StoredTensor):
            self._visit_tensor(node, path)
        elif type(node) in (int, float) and len(path) == _TOP:
            self.numbers.setdefault(path[-1], node)

    def _visit_mapping(self, node: Mapping[Any, Any], path: tuple[str, ...]) -> None:
        loader = _LOADER.search(path[-1]) and node and all(isinstance(key, str | int) for key in node)
        if loader or _is_scheduler(node):
            into = self.loaders if loader else self.schedulers
            into += [_load(node, None)] if _is_plain(node) else []
        elif not is_optimizer(node) and len(path) <= _DEPTH:
            for key, value in node.items():
                self.visit(value, (*path, str(key)))

    def _visit_sequence(self, node: list[Any] | tuple[Any, ...], path: tuple[str, ...]) -> None:
        python, numpy = _python_state(node), _numpy_state(node)
        if python is not None:
            self.random.python = self.random.python or python
        elif numpy is not None:
            self.random.numpy = self.random.numpy or numpy
        elif len(node) <= _ITEMS and len(path) <= _DEPTH:
            for value in node:
                self.visit(value, (*path, path[-1]))

    def _visit_tensor(self, node: StoredTensor, path: tuple[str, ...]) -> None:
        if node.dtype is not torch.uint8 or len(node.shape) != 1 or not any(map(_RANDOM.search, path)):
            return
        if any(map(_OF_A_DEVICE.search, path)):
            self.random.of_devices = True
        elif node.shape == torch.get_rng_state().shape and self.random.torch is None:
            self.random.torch = node.load()


def read_resume_state(checkpoint: Checkpoint, path: Path) -> ResumeState:
    """Returns what the open checkpoint and the files beside it (at `path`) hold."""
    found = ResumeState()
    for part in checkpoint.parts:
        found.visit(part.sections.tree, (_stem(part.name),))
    for file in _beside(path):
        with file:
            try:
                found.visit(read_saved(file, sniff(file)).tree, (_stem(file.name),))
            except CheckpointError:  # not needed to read the checkpoint; missing state is reported
                continue
    return found


def _stem(name: str) -> str:
    return PurePath(name).name.partition(".")[0]


def _beside(folder: Path) -> Iterator[RegularFile]:
    for name in _BESIDE if folder.is_dir() else ():
        if (folder / name).is_file():
            try:
                yield RegularFile(folder / name, name)
            except CheckpointError:
                continue


def _is_scheduler(node: Mapping[Any, Any]) -> bool:
    return type(node.get("last_epoch")) is int and "_last_lr" in node and "param_groups" not in node


def _is_plain(node: Any) -> bool:
    """Whether it holds no object that only its class could make."""
    if isinstance(node, Mapping):
        return all(map(_is_plain, node.values()))
    if isinstance(node, list | tuple):
        return all(map(_is_plain, node))
    return not isinstance(node, PickledObject | Skipped)


def _python_state(node: list[Any] | tuple[Any, ...]) -> tuple[Any, ...] | None:
    if len(node) != 3 or node[0] != _PYTHON_VERSION or not isinstance(node[1], list | tuple):
        return None
    words = tuple(node[1])
    whole = len(words) == _PYTHON_WORDS and all(type(word) is int and 0 <= word < 2**32 for word in words)
    fits = whole and words[-1] < _PYTHON_WORDS and (node[2] is None or isinstance(node[2], float))
    return (_PYTHON_VERSION, words, node[2]) if fits else None


def _numpy_state(node: list[Any] | tuple[Any, ...]) -> tuple[Any, ...] | None:
    if len(node) != 5 or node[0] != "MT19937":
        return None
    words = numpy_array(node[1]) if isinstance(node[1], PickledObject) else None
    if words is None or words.dtype != np.uint32 or len(words) != _NUMPY_WORDS:
        return None
    fits = all(isinstance(part, int | float) for part in node[2:])
    return ("MT19937", words.copy(), int(node[2]), int(node[3]), float(node[4])) if fits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The contents of a checkpoint as plain dicts of tensors; names as stored.

    `models` are all state dicts by their path in the file ("model", "ema"; "" for a flat file), the main one, `model`,
    first. `optimizers` are by path, in the form that `Optimizer.load_state_dict` takes. `scaler` is the state dict of
    the first loss scaler. `loss` and `folders` are as in `Checkpoint`. `files` are relative to the loaded path.
    """

    model: dict[str, torch.Tensor] | None
    models: Mapping[str, dict[str, torch.Tensor]]
    optimizers: Mapping[str, dict[str, Any]]
    scaler: dict[str, Any] | None
    global_step: int | None
    format: str
    loss: float | None = None
    folders: tuple[tuple[Listing, str], ...] = ()
    files: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=())
    errors: tuple[ErrorNote, ...] = field(default=())
    standing: ResumeState = field(default_factory=ResumeState)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The only optimizer's state dict; None if there is none, or several."""
        return next(iter(self.optimizers.values())) if len(self.optimizers) == 1 else None


def load_state(path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Read a checkpoint into memory without executing anything; `path` is as for `open_checkpoint`."""
    with open_checkpoint(path) as checkpoint:
        loaded: dict[object, torch.Tensor] = {}
        models = {
            key: {name: _load(t, loaded) for name, t in model.items()} for key, model in checkpoint.models().items()
        }
        optimizers = {key: _load(state, None) for key, state in checkpoint.optimizers().items()}
        scalers = [_load(state, None) for state in checkpoint.scaler_dicts().values()]
        standing = read_resume_state(checkpoint, Path(path))
        checkpoint.require_unchanged()
        return LoadedCheckpoint(
            model=next(iter(models.values()), None),
            models=models,
            optimizers=optimizers,
            scaler=next(iter(scalers), None),
            global_step=checkpoint.global_step,
            format=checkpoint.format,
            loss=checkpoint.loss,
            folders=checkpoint.folders,
            files=tuple(f.path for f in checkpoint.files),
            skipped=checkpoint.skipped,
            errors=checkpoint.errors,
            standing=standing,
        )


def _load(node: Any, loaded: dict[object, torch.Tensor] | None) -> Any:
    """Returns a tree with its tensors in memory; `loaded` keeps tied weights one (None: an optimizer's stay apart)."""
    if isinstance(node, StoredTensor):
        if loaded is None or node.numel == 0:
            return node.load()
        if node.identity not in loaded:
            loaded[node.identity] = node.load()
        return loaded[node.identity]
    if isinstance(node, Mapping):
        return {key: _load(value, loaded) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_load(value, loaded) for value in node)
    return node
