"""Copies of the weights that each epoch of a script makes before its loop are made anew in a replay."""

from __future__ import annotations

import pytest

from ampdoctor.replay.reachable_state import cell_contents
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest

HEAD = """
import copy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(9)]
seen = []
ema = None
"""
STEP = """
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        seen.append(sum(float((a - b).detach().abs().sum()) for a, b in zip(WEIGHTS, model.parameters())))
        optimizer.step()
        with torch.no_grad():
            UPDATE
"""
INPLACE = "[e.mul_(0.9).add_(p, alpha=0.1) for e, p in zip(WEIGHTS, model.parameters())]"
EPOCHS = "for epoch in range(8):\n"
FUNCTION = f"def train(epoch):\n    MAKE\n    for x, y in data:{STEP}{EPOCHS}    train(epoch)\n"
LOOP = f"{EPOCHS}    MAKE\n    for x, y in data:{STEP}"
OF_AVERAGE = STEP.replace("WEIGHTS", "average.parameters()")
GIVEN = f"def train(average):\n    for x, y in data:{OF_AVERAGE}{EPOCHS}    MAKE\n    train(ema)\n"
CLASS = f"""
class Trainer:
    def epoch(self):
        MAKE
        for x, y in data:
            self.step(x, y)
    def step(self, x, y):{STEP}
trainer = Trainer()
{EPOCHS}    trainer.epoch()
"""
MODULE = ("ema = copy.deepcopy(model)", "ema.parameters()", INPLACE)
AVERAGED = ("ema = AveragedModel(model); ema.eval()", "ema.module.parameters()", "ema.update_parameters(model)")
DICT = (
    "shadow = {k: p.detach().clone() for k, p in model.named_parameters()}",
    "shadow.values()",
    "shadow = {k: 0.9 * shadow[k] + 0.1 * p for k, p in model.named_parameters()}",
)
FILLED = (
    "shadow = {}\n    for k, p in model.named_parameters():\n        shadow[k] = p.detach().clone()",
    "shadow.values()",
    INPLACE,
)
SWITCHED = (
    """shadow = None
    if use_ema:
        with torch.no_grad():
            shadow = [p.clone() for p in model.parameters()]""",
    "shadow",
    INPLACE,
)
OBJECT = ("average = Average(model)", "average.shadow", "average.update(model)")
OF_A_CLASS = """
class Average:
    def __init__(self, model):
        self.model, self.shadow = model, [p.detach().clone() for p in model.parameters()]
    def update(self, model):
        self.shadow = [0.9 * s + 0.1 * p.detach() for s, p in zip(self.shadow, model.parameters())]
"""
ATTRIBUTE = ("self.ema = copy.deepcopy(model)", "self.ema.parameters()", INPLACE)
IF_NONE = ("global ema\n    if ema is None:\n        ema = copy.deepcopy(model)", "ema.parameters()", INPLACE)
IN_THE_FIRST = ("global ema\n    if epoch == 0:\n        ema = copy.deepcopy(model)", "ema.parameters()", INPLACE)
BEFORE = ("pass", "ema.parameters()", INPLACE)


def script(body, kept, before="use_ema = True\n"):
    make, weights, update = kept
    return HEAD + before + body.replace("MAKE", make).replace("UPDATE", update).replace("WEIGHTS", weights)


def distances(text, folder, steps=20):
    """How far the copy is from the model before each step, in the bare script and in a replay; and the notes."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    known = {"__name__": "__main__"}
    exec(compile(text, "bare", "exec"), known)
    bare = [round(one, 5) for one in known["seen"][:steps]]
    with open_replay(ReplayRequest(factory=str(folder / "train.py"))) as replay:
        session = replay.session()
        start = session.snapshot()
        replayed = [_taken(session, steps)]
        start.restore()
        replayed.append(_taken(session, steps))
        session.close()
    return bare, replayed, replay.notes


def _taken(session, steps):
    seen = None
    for step in range(steps):
        assert session.has_step(step)
        session.step(step)
    body = session.run.step.args[0]
    cells = dict(zip(body.__code__.co_freevars, body.__closure__ or (), strict=True))
    seen = cell_contents(cells["seen"])[0] if "seen" in cells else body.__globals__["seen"]
    return [round(one, 5) for one in seen[-steps:]]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (FUNCTION, MODULE),
        pytest.param(LOOP, AVERAGED, marks=pytest.mark.slow),
        pytest.param(GIVEN, MODULE, marks=pytest.mark.slow),
        (CLASS, ATTRIBUTE),
        pytest.param(FUNCTION, DICT, marks=pytest.mark.slow),
        (LOOP, DICT),
        pytest.param(FUNCTION, FILLED, marks=pytest.mark.slow),
        (FUNCTION, SWITCHED),
        pytest.param(FUNCTION, OBJECT, marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_each_epoch_begins_at_the_model_in_each(body, kept, tmp_path):
    bare, replayed, notes = distances(script(body, kept, OF_A_CLASS + "use_ema = True\n"), tmp_path)
    assert bare[0] == bare[9] == bare[18] == 0.0
    assert replayed == [bare, bare]
    assert any(note.endswith(": made anew in each round, as the script does") for note in notes)


@pytest.mark.parametrize(
    ("body", "kept", "before"),
    [
        pytest.param(FUNCTION, IF_NONE, "", marks=pytest.mark.slow),
        (FUNCTION, IN_THE_FIRST, ""),
        pytest.param(FUNCTION, BEFORE, "ema = copy.deepcopy(model)\n", marks=pytest.mark.slow),
    ],
)
def test_a_copy_that_is_made_once_goes_on(body, kept, before, tmp_path):
    bare, replayed, notes = distances(script(body, kept, before), tmp_path)
    assert bare[9] > 0.0
    assert replayed == [bare, bare]
    assert not any("made anew" in note for note in notes)
