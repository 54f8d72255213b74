"""The place in a training run at which something happened: the address in every finding and trace record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.evidence.json_records import UNWRITTEN, Count, Positive

Phase = Literal["data", "checkpoint", "forward", "loss", "backward", "optimizer", "scaler", "configuration"]
"""The part of a training step. `loss` is loop and loss code that runs outside the model's own forward. `configuration`
is not part of a step: the finding is about ampdoctor's own settings."""

NonFinite = Literal["nan", "inf", "none"]
"""What first appears at a place: NaN, an infinity of either sign, or nothing non-finite (silent sickness)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's code.

    Attributes:
        file: Path as Python knows it, relative to the working directory if it lies below it.
        line: 1-based line number.
        installed: The file is an installed package's: not the user's to change.
    """

    file: str
    line: Positive
    installed: bool = field(default=False, compare=False, metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """An address inside a replayed run or a checkpoint.

    Attributes:
        step: Optimizer step of the replay, counted from 0; None for a checkpoint that was not replayed.
        micro_batch: Index inside an accumulated step, from 0.
        global_step: The step counter stored in the checkpoint, if it has one.
        rank: Process rank.
        phase: Part of the step.
        module: A name of `named_modules()`; "" is the root's own forward, or loss and loop code.
        call: Number of the module's call in the step, from 0.
        op: User-level aten op ("aten.linear"); in a backward the *forward* op whose derivative fails; or one of
            `data`, `state:KEY`, `optimizer_state:KEY`, `scaler_state`, `unscale`, `optimizer.step`, `clip_grad_norm_`;
            `gradient clipping`, where it was not that function that cut them.
        nonfinite: What first appears there.
        recompute: True if the op ran again inside a backward (activation checkpointing).
        tensor: Name of the tensor ("blocks.0.fc.weight"), if there is one.
        file: The checkpoint file, if there is one.
        source: The user's line that ran the op.
        forward_source: For a backward op, the user's line that made it.
    """

    step: Count | None = None
    micro_batch: Count = 0
    global_step: int | None = None
    rank: Count = 0
    phase: Phase
    module: str = ""
    call: Count = 0
    op: str | None = None
    nonfinite: NonFinite = "none"
    recompute: bool = False
    tensor: str | None = None
    file: str | None = None
    source: Source | None = None
    forward_source: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The parts of a location that identify one place within a finding.

    Attributes:
        module, op, tensor, file: As in where.
    """

    module: str
    op: str | None
    tensor: str | None
    file: str | None
