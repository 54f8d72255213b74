from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.errors import FactoryError
from ampdoctor.replay.training_run import TrainingRun


def run(**changes):
    parts = {"model": nn.Linear(2, 2), "batches": [torch.ones(1, 2)], "loss": lambda model, batch: model(batch).sum()}
    return TrainingRun(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": nn.Linear}, r"model=.* must be a torch\.nn\.Module, not the class Linear"),
        ({"model": {"w": 1}}, "not dict"),
        ({"batches": iter([1])}, "one-shot iterator"),
        ({"batches": {"x": 1}}, r"one dict: .* batches=\[batch\]"),
        ({"batches": 3}, "re-iterable"),
        ({"loss": None}, r"needs loss=.* or step="),
        ({"loss": "mse"}, "loss=.* must be callable, not str"),
        ({"loss": lambda output: output}, r"is called as loss\(model, batch\), but it takes \(output\)"),
        ({"batches": lambda epoch: []}, r"is called as batches\(\), but it takes \(epoch\)"),
        ({"scaler": torch.amp.GradScaler}, r"scaler=.*is the class GradScaler: .*scaler=\{\}"),
        ({"step": lambda model, data: data}, r"asks for 'data', which is none of model, batch"),
        ({"optimizer": torch.optim.SGD}, "is the class SGD: pass an instance"),
        ({"optimizer": 3}, "must be an optimizer"),
        ({"optimizer": {"g": lambda model: model}}, "must be an optimizer"),
        ({"precision": "fp8"}, "cannot be replayed yet"),
        ({"precision": torch.float16}, r"'torch.float16' is not one of fp32, tf32, bf16, fp16$"),
        ({"accumulation_steps": 0}, "at least 1"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"scaler": 65536.0}, "GradScaler arguments"),
        ({"autocast": torch.autocast("cpu")}, r"TrainingRun\(autocast=...\) is True or False, not torch\..*autocast"),
        ({"divide_loss": None}, "is True or False, not None"),
    ],
)
def test_each_wrong_part_has_its_sentence(changes, sentence):
    with pytest.raises(FactoryError, match=sentence):
        run(**changes)


def test_every_documented_kind_of_part_is_taken():
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (sgd, {"g": sgd, "d": sgd}, lambda model: sgd, None):
        run(model=model, optimizer=optimizer)
    for scaler in ({"init_scale": 2.0}, torch.amp.GradScaler("cpu"), lambda: torch.amp.GradScaler("cpu"), None):
        run(scaler=scaler)
    for batches in ([1], (1, 2), lambda: iter([1]), torch.utils.data.DataLoader([1, 2])):
        run(batches=batches)
    for step in (lambda model, batch, **rest: None, lambda *args, **rest: None, lambda run, step, extra=3: None):
        run(loss=None, step=step)
