"""Loads a checkpoint's contents into memory, for a training run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ampdoctor.checkpoints.opening import open_checkpoint
from ampdoctor.checkpoints.standing import Standing, standing_of
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.evidence.checkpoint_stats import LogEntry
from ampdoctor.evidence.report import ErrorNote, Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """The contents of a checkpoint as plain dicts of tensors; names as stored.

    Attributes:
        model: The main model's state dict; None if there is none.
        models: All state dicts by their path in the file ("model", "ema"; "" for a flat file), the main one first.
        optimizers: Optimizer state dicts by path, in the form that `Optimizer.load_state_dict` takes.
        scaler: State dict of the first loss scaler; None if there is none.
        global_step: Training step, if stored.
        standing: Random numbers, schedules and places in the data, as far as they were saved.
        log: Training log stored beside the weights.
        format: The recognised layout.
        files: Files that were read, relative to `path`.
        skipped: What is recognised and not read.
        errors: What should be there and could not be read.
    """

    model: dict[str, torch.Tensor] | None
    models: Mapping[str, dict[str, torch.Tensor]]
    optimizers: Mapping[str, dict[str, Any]]
    scaler: dict[str, Any] | None
    global_step: int | None
    format: str
    log: tuple[LogEntry, ...] = ()
    files: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=())
    errors: tuple[ErrorNote, ...] = field(default=())
    standing: Standing = field(default_factory=Standing)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The only optimizer's state dict; None if there is none, or several."""
        return next(iter(self.optimizers.values())) if len(self.optimizers) == 1 else None


def load_state(path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Read a checkpoint into memory, as inertly as a scan does.

    Args:
        path: As for `open_checkpoint`.

    Raises:
        CheckpointError: It cannot be read, or is refused.
    """
    with open_checkpoint(path) as checkpoint:
        loaded: dict[object, torch.Tensor] = {}
        models = {
            key: {name: _load(t, loaded) for name, t in model.items()} for key, model in checkpoint.models().items()
        }
        optimizers = {key: _load(state, None) for key, state in checkpoint.optimizers().items()}
        scalers = [_load(state, None) for state in checkpoint.scaler_dicts().values()]
        standing = standing_of(checkpoint, Path(path))
        checkpoint.require_unchanged()
        return LoadedCheckpoint(
            model=next(iter(models.values()), None),
            models=models,
            optimizers=optimizers,
            scaler=next(iter(scalers), None),
            global_step=checkpoint.global_step,
            format=checkpoint.format,
            log=checkpoint.log,
            files=tuple(f.path for f in checkpoint.files),
            skipped=checkpoint.skipped,
            errors=checkpoint.errors,
            standing=standing,
        )


def _load(node: Any, loaded: dict[object, torch.Tensor] | None) -> Any:
    """Returns a tree with its stored tensors in memory.

    Args:
        node: The tree.
        loaded: Loaded tensors by identity: two names of one tensor (tied weights) stay one tensor. None for an
            optimizer's state, where a shared tensor would be stepped once for each parameter: ZeRO keeps one counter
            for a group, torch one for each parameter.
    """
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
