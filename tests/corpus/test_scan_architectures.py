"""No alarm on checkpoints of 21 architectures: fresh and briefly trained, in fp32, bf16 and fp16, with AdamW."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from ampdoctor.workflows.scan import scan
from fixtures.runs.architectures import ARCHITECTURES, make_run

STEPS = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def states(name, *, precision="fp16", pure=False):
    """Training states after 0, 5 and `STEPS` steps."""
    run = make_run(name, precision=precision, pure=pure)
    model, optimizer = run.model, run.optimizer(run.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=not pure)
    for step, batch in zip(range(STEPS + 1), itertools.cycle(list(run.batches())), strict=False):
        if step in {0, 5, STEPS}:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if not pure:
                state["scaler"] = scaler.state_dict()
            yield copy.deepcopy(state)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not pure):
            loss = run.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def alarms(state, path):
    torch.save(state, path)
    return [finding.message for finding in scan(path).findings if finding.severity != "note"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_healthy_checkpoints_raise_no_alarm(name, tmp_path):
    for state in states(name):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            weights = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state["model"].items()}
            assert alarms(state | {"model": weights}, tmp_path / "c.pt") == []


@pytest.mark.each_value_once
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpoints_of_pure_half_training_raise_no_alarm(name, precision, tmp_path):
    for state in states(name, precision=precision, pure=True):
        assert alarms(state, tmp_path / "c.pt") == []
