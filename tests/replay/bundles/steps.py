"""Loops that are recorded, and their steps run again."""

from __future__ import annotations

import torch

from ampdoctor.hooks.callbacks import on_scaler_call
from ampdoctor.live.recording.models import Constructions
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.replay.bundles.classes import NamedCode
from ampdoctor.replay.bundles.read import Bundle


def load_bundle(path, *, model=None):
    """Returns a fresh run of a bundle's step."""
    return Bundle(path).run(None if model is None else NamedCode(model))


class Loop:
    """Records a loop: `step()` takes one, and the last one is kept before its update."""

    def __init__(self):
        self.recorder, self.made = StepRecorder(), Constructions()

    def scaler_called(self, scaler, method, argument, run):
        if method == "scale":
            return self.recorder.scaled(argument, run)
        with self.recorder.pausing():
            done = run()
        if method == "unscale_":
            self.recorder.unscaled(argument)
        return done

    def record(self, train, optimizer, *, steps=3, scaler=None):
        """Run `train(step)` for some steps; returns the program of the last, whose update is not taken."""
        with on_scaler_call(self.scaler_called), self.recorder.watching():
            for step in range(steps):
                train(step)
                if step == steps - 1:
                    return self.recorder.program(optimizer, name="optimizer", scaler=scaler, step=31000)
                with self.recorder.pausing():
                    optimizer.step()
                self.recorder.updated(optimizer)
                self.recorder.models.settle()
        raise AssertionError


def gradients(model):
    """Returns copies of a model's gradients, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def replayed(run):
    """Runs a run's step; returns its loss and its model's gradients as they were before the update."""
    found = {}

    def keep(*_):
        found.update(gradients(run.model))

    (optimizer,) = run.optimizer.values()
    optimizer.register_step_pre_hook(keep)
    scaler = run.scaler() if callable(run.scaler) else torch.amp.GradScaler("cpu", enabled=False)
    loss = run.step(run.model, run.batches[0], scaler)
    return loss, found


def same(mine, theirs):
    """Holds two tables of tensors against each other, bit by bit."""
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)
