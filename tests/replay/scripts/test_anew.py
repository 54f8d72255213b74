"""What each epoch of a script makes before its loop is made anew in a replay; what it makes once is not."""

from __future__ import annotations

import pytest

from ampdoctor.replay.scripts.loops import SCALER_EACH_ROUND
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
data = [(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range(9)]
scaler = None
"""
STEP = """
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(100 * x), y, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
NEW = 'scaler = torch.amp.GradScaler("cpu")'
LOOP = f"    for x, y in data:{STEP}"
EPOCHS = "for epoch in range(8):\n"
IN_A_FUNCTION = f"def train():\n    {NEW}\n{LOOP}{EPOCHS}    train()\n"
BY_A_SWITCH = f"amp = True\n{EPOCHS}    if amp:\n        {NEW}\n{LOOP}"
IN_THE_FIRST = f"{EPOCHS}    if epoch == 0:\n        {NEW}\n{LOOP}"
LAZY = f"""
class Trainer:
    def epoch(self):
        if not hasattr(self, "scaler"):
            self.scaler = torch.amp.GradScaler("cpu")
        scaler = self.scaler
        for x, y in data:{STEP.replace(chr(10), chr(10) + "    ")}
trainer = Trainer()
{EPOCHS}    trainer.epoch()
"""


def replayed(body, tmp_path, steps, *, epoch_is_step=False):
    """Which steps are skipped, the scale of each, and what is noted."""
    (tmp_path / "train.py").write_text(HEAD + body)
    with open_replay(ReplayRequest(factory=str(tmp_path / "train.py"))) as replay:
        session = replay.session()
        taken = [session.step(step) for step in range(steps) if session.has_step(step)]
        session.close()
    scales = [next(event.scale for event in one.events if event.kind == "step") for one in taken]
    assert epoch_is_step or [one.scale_before for one in taken] == scales
    return [one.skipped for one in taken], scales, replay.notes


@pytest.mark.parametrize("body", [IN_A_FUNCTION, BY_A_SWITCH])
def test_a_scaler_of_each_epoch_begins_at_its_first_scale_in_each(body, tmp_path):
    skipped, scales, notes = replayed(body, tmp_path, steps=10)
    assert all(skipped)
    assert (scales[0], scales[8], scales[9]) == (65536.0, 256.0, 65536.0)
    assert SCALER_EACH_ROUND in notes


@pytest.mark.parametrize("body", [IN_THE_FIRST, LAZY])
def test_a_scaler_that_is_made_once_finds_its_scale(body, tmp_path):
    skipped, scales, notes = replayed(body, tmp_path, steps=14)
    assert not skipped[13]
    assert scales[9] == 128.0
    assert SCALER_EACH_ROUND not in notes


def test_a_step_that_is_a_whole_epoch_says_that_it_makes_its_scaler(tmp_path):
    skipped, _, notes = replayed(IN_A_FUNCTION.replace("in data", "in data[:5]"), tmp_path, steps=3, epoch_is_step=True)
    assert all(skipped)
    assert SCALER_EACH_ROUND in notes


def test_an_optimizer_and_a_scheduler_of_each_epoch_begin_anew(tmp_path):
    body = f"""
lrs = []
def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x, y in data:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        print("lr", optimizer.param_groups[0]["lr"], len(optimizer.state))
        optimizer.step()
        scheduler.step()
{EPOCHS}    train()
"""
    (tmp_path / "train.py").write_text(HEAD + body)
    with open_replay(ReplayRequest(factory=str(tmp_path / "train.py"))) as replay:
        session = replay.session()
        seen = []
        for step in range(10):
            assert session.has_step(step)
            (optimizer,) = session.optimizers.values()
            session.step(step)
            seen.append(optimizer.param_groups[0]["lr"])
        session.close()
    assert seen == [0.5 ** (2 + step % 9) for step in range(10)]
