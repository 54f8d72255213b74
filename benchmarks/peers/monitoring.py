"""A training loop as users write it, and what people hang into such a loop to see its numbers.

The monitors of Lightning and Composer are done again from their source, so that they need not be installed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from benchmarks.peers.watching import like, trainer_mon


class Monitor:
    """What a loop calls; each method may be overridden."""

    def began(self, step: int) -> None:
        """A step begins."""

    def lost(self, loss: Tensor) -> None:
        """The loss is there."""

    def ready(self) -> None:
        """The gradients are there, clipped where the loop clips."""

    def stepped(self) -> None:
        """The optimizer has stepped."""


@dataclass(eq=False)
class Loop:
    """A training loop as users write it.

    Attributes:
        model: The model.
        batch: Of every step.
        loss: From model and batch.
        optimizer: The optimizer.
        max_norm: What gradients are clipped to; None for no clipping.
        monitors: Called in each step.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    max_norm: float | None = None
    monitors: list[Monitor] = field(default_factory=list)
    steps: int = 0

    def step(self) -> None:
        """Take a step, and read the loss once."""
        for monitor in self.monitors:
            monitor.began(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, self.batch)
        for monitor in self.monitors:
            monitor.lost(loss)
        loss.backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        for monitor in self.monitors:
            monitor.ready()
        self.optimizer.step()
        for monitor in self.monitors:
            monitor.stepped()
        self.steps += 1
        loss.item()

    @contextmanager
    def calling(self, monitor: Monitor) -> Iterator[None]:
        """It calls the monitor inside."""
        self.monitors.append(monitor)
        try:
            yield
        finally:
            self.monitors.remove(monitor)


class LightningNorms(Monitor):
    """`lightning.pytorch.utilities.grad_norm` in `on_before_optimizer_step`, and what `log_dict` reads."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def ready(self) -> None:
        """One norm a parameter, and one read each."""
        norms = {n: p.grad.data.norm(2.0) for n, p in self._model.named_parameters() if p.grad is not None}
        norms["total"] = torch.tensor(list(norms.values())).norm(2.0)
        self.logged = {name: norm.item() for name, norm in norms.items()}


class ComposerMonitor(Monitor):
    """Composer's `OptimizerMonitor` with AdamW's metrics, and its `NaNMonitor`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def lost(self, loss: Tensor) -> None:
        """`NaNMonitor`."""
        if torch.isnan(loss).any():
            raise RuntimeError("Train loss contains a NaN.")

    def ready(self) -> None:
        """Four norms a parameter, and one read each."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._loop.model.named_parameters():
            found[f"l2_norm/grad/{name}"] = torch.linalg.vector_norm(parameter.grad)
            found[f"l2_norm/param/{name}"] = torch.linalg.vector_norm(parameter.data)
            state = self._loop.optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                found[f"l2_norm/moment/{name}"] = torch.linalg.vector_norm(state["exp_avg"])
                found[f"l2_norm/update/{name}"] = torch.linalg.vector_norm(update)
        self.logged = {name: value.item() for name, value in found.items()}


@contextmanager
def detect_anomaly(_: Loop) -> Iterator[None]:
    """Torch's own."""
    with torch.autograd.set_detect_anomaly(True):
        yield


@dataclass(eq=False)
class TrainerMonitor:
    """msprobe's `TrainerMon` over weight gradients; it cannot be taken off again, and has a copy of each loop."""

    _kept: WeakKeyDictionary[Loop, Loop] = field(default_factory=WeakKeyDictionary)
    _folder: str = ""

    @contextmanager
    def __call__(self, loop: Loop) -> Iterator[Loop]:
        """Give the copy of this loop."""
        self._folder = self._folder or mkdtemp()
        if loop not in self._kept:
            model = copy.deepcopy(loop.model)
            self._kept[loop] = Loop(model, loop.batch, loop.loss, like(loop.optimizer, model))
            with chdir(self._folder):
                trainer_mon(model, self._kept[loop].optimizer)
        with chdir(self._folder):  # it writes where the loop stands
            yield self._kept[loop]


@contextmanager
def wandb_watch(loop: Loop) -> Iterator[None]:
    """Weights & Biases' histograms of every parameter and gradient, in each step."""
    wandb = importlib.import_module("wandb")
    with TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
        wandb.watch(loop.model, log="all", log_freq=1)
        try:
            yield
        finally:
            wandb.unwatch(loop.model)
            run.finish()
