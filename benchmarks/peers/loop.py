"""The plain training loop that every peer is attached to: what its user would have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ampdoctor import TrainingRun

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Loop:
    """A training run, one step at a time.

    Tools wrap what they wrap: `model`, `optimizer` and `scaler` may be replaced before the first step.

    Args:
        run: The run; its optimizer and scaler are functions, as in the corpus.
        checkpoint: State to resume from: `torch.save` of {"model", "optimizer"?, "scaler"?}.
        steps: How many steps to take at most; None: as many as there are batches.
    """

    def __init__(self, run: TrainingRun, checkpoint: Path | None = None, steps: int | None = None) -> None:
        self.run = run
        self.steps = steps
        self.model = run.model
        self.optimizer: Any = run.optimizer(run.model)
        self.scaler: Any = run.scaler() if run.scaler else torch.amp.GradScaler("cpu", enabled=False)
        if checkpoint is not None:
            saved = torch.load(checkpoint, weights_only=False)  # written by the case itself a moment ago
            for part in ("model", "optimizer", "scaler"):
                if part in saved:
                    getattr(self, part).load_state_dict(saved[part])

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Steps and their batches."""
        source = self.run.batches
        return enumerate(islice(source() if callable(source) else source, self.steps))

    def lives(self) -> int:
        """Train to the end, and return the number of steps before the run itself raises, or runs out of batches."""
        step = -1
        for step, batch in self.batches():
            try:
                self.step(batch)
            except RuntimeError:  # a loss that refuses NaN, some steps after the weights have become NaN
                return step
        return step + 1

    def autocast(self) -> AbstractContextManager[Any]:
        """Open the run's autocast region, under the CPU's own cast policy."""
        dtype = _DTYPES.get(self.run.precision)
        return torch.autocast("cpu", dtype=dtype, enabled=self.run.autocast and dtype is not None)

    def step(self, batch: Any) -> Any:
        """Take one optimizer step, the user's own where the run has one, and return the loss."""
        if self.run.step is not None:
            return self.run.step(
                model=self.model, batch=batch, optimizer=self.optimizer, scaler=self.scaler, autocast=self.autocast
            )
        if self.run.loss is None:
            raise ValueError("a run without a step of its own needs a loss")
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.run.loss(self.model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss
