"""`apply` puts the change that a replay has proved into the user's own training, in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ampdoctor.errors import UsageError
from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.training.changes import plan
from ampdoctor.training.parts import Training
from ampdoctor.training.wanted import wanted_of


class Applied:
    """Changes that are in force until `remove()` is called or the `with` block around this object ends.

    The changes outlive this object: they stay when it is dropped.

    Attributes:
        changes: What was changed: one prescription of each kind.
        modules: Names of the modules that compute in fp32; () if the change is of another kind.
        left_out: What else the report asks for and could not be applied, a sentence each.
    """

    __slots__ = ("_removed", "_undo", "changes", "left_out", "modules")

    def __init__(
        self, changes: tuple[Prescription, ...], modules: tuple[str, ...], left_out: tuple[str, ...], undo: ExitStack
    ) -> None:
        self.changes = changes
        self.modules = modules
        self.left_out = left_out
        self._undo = undo
        self._removed = False

    @property
    def active(self) -> bool:
        """False after `remove()`. A later load of the scaler's state goes unnoticed."""
        return not self._removed

    def remove(self) -> None:
        """Take back, between steps, what this call of `apply` has changed; a second call does nothing.

        In a half model, the parameters are rounded back to their dtype. So are the moments of the optimizer that was
        given to `apply`.
        """
        if not self._removed:
            self._removed = True
            self._undo.close()
            _compile_anew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        what = "; ".join(change.detail or f"{change.kind} = {change.value}" for change in self.changes)
        return f"<Applied: {what}{'' if self.active else ' (removed)'}>"


def apply(
    model: nn.Module,
    prescription: Prescription | Finding | Report | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    unverified: bool = False,
) -> Applied:
    """Put a prescription into your training.

    Call it once, after model, optimizer and scaler are built and have loaded their checkpoint. If you call it before
    `torch.compile` traces the model, no second compilation is needed. After an error, nothing is applied.

    - `fp32_modules`: hooks switch autocast off inside these modules and cast their inputs up. In a half model, their
      parameters become fp32 (the same objects, so that an optimizer keeps them) and their outputs are cast back.
      The hooks hold in training and evaluation and survive `state_dict`, `deepcopy`, `torch.save` of the model,
      DataParallel, DDP and activation checkpointing. `torch.compile` breaks its graph around each such module
      (`fullgraph=True` fails with torch's own error). A parent that uses a module's weight without calling the module
      is not reached.
    - `dtype`: every `torch.autocast` region of this process that names a half dtype computes in this one (float32: is
      off), whatever model runs inside; so did the replay that proved it. A half model's parameters and inputs are cast.
      Half tensors that only the loss takes (targets, weights) are yours to cast. A given `scaler` is switched off; a
      scaler that is not given does no harm.
    - `init_scale`, `scaler`: need `scaler` and overwrite its settings once. A state that is loaded into the scaler
      later overwrites them again, so load the checkpoint first. The scaler must be the one with which the loop scales
      its loss and steps. A loop without a scaler is yours to change.
    - `optimizer`: needs `optimizer` and overwrites its settings, and again after each `load_state_dict`. A learning
      rate that a scheduler moves is left alone.
    - `skip_batch` and `code` do not change a model: they are refused with a sentence that says what to do.

    Changes do not stack: one that is applied twice holds until its last handle is removed. Handles may be removed in
    any order, also those of different changes of one thing: the latest that is left is in force. After the last one,
    everything is as it was. An fp32 island stays fp32 whatever becomes of the model around it.

    Args:
        model: The model, wrapped (DDP, compiled) or not; names are those of the user's own model.
        prescription: A prescription, a finding, a report, the JSON object of one of these, or the path of a JSON
            report. From a report, the verified changes of all findings are applied together, modules united.
            An object without a `status` counts as verified: `{"kind": "fp32_modules", "value": ["block.3"]}`.
        optimizer: The optimizer, several, or a mapping of names to them.
        scaler: The loss scaler.
        unverified: Also apply a change that no replay has proved.

    Returns:
        A handle on the changes: its `remove()`, or a `with` block around it, takes them back.

    Raises:
        UsageError: Nothing can be applied. One sentence says why: an unknown module, a missing optimizer or scaler, a
            change that is not verified, a report that asks for two different things.
    """
    training = _training(model, optimizer, scaler)
    wanted = wanted_of(prescription, unverified=unverified)
    plans = [plan(change, training) for change in wanted.changes]
    with ExitStack() as undone:
        for make in plans:
            make(undone)
        undo = undone.pop_all()  # nothing failed: from here on the handle undoes
    _compile_anew()
    names = [name for change in wanted.changes if change.kind == "fp32_modules" for name in change.value]
    return Applied(wanted.changes, tuple(names), wanted.left_out, undo)


def _compile_anew() -> None:
    """Make `torch.compile` trace anew: a finished trace does not see hooks and regions that change afterwards."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _training(model: Any, optimizer: Any, scaler: Any) -> Training:
    if not isinstance(model, nn.Module):
        raise UsageError(f"apply(model, ...) takes a torch.nn.Module, not {type(model).__name__}")
    if optimizer is None:
        optimizers: tuple[Any, ...] = ()
    elif isinstance(optimizer, Mapping):
        optimizers = tuple(optimizer.values())
    else:
        several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups")
        optimizers = tuple(optimizer) if several else (optimizer,)
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise UsageError(f"apply(optimizer=...) takes optimizers, not {type(one).__name__}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise UsageError(f"apply(scaler=...) takes a torch.amp.GradScaler, not {type(scaler).__name__}")
    return Training(model, optimizers, scaler)
