"""What a run's own code keeps beside the model, and a step makes non-finite: a finding of replay and watch."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.public.test_scaler_protocol import run

LOOP = """\
import copy, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    model[0].bias[3] = -70000.0
{setup}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(12)]
for step, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        {each}
"""
MODULE = (
    "ema = copy.deepcopy(model)",
    "[e.mul_(0.9).add_(p, alpha=0.1) for e, p in zip(ema.parameters(), model.parameters())]",
)
SWA = ("from torch.optim.swa_utils import AveragedModel\nema = AveragedModel(model)", "ema.update_parameters(model)")
DICT = (
    "shadow = {k: p.detach().clone() for k, p in model.named_parameters()}",
    "[shadow.__setitem__(k, shadow[k] * 0.9 + p * 0.1) for k, p in model.named_parameters()]",
)
OBJECT = (
    """class Average:
    def __init__(self):
        self.module = copy.deepcopy(model)
holder = {'average': [Average()]}""",
    "[e.mul_(0.9).add_(p, alpha=0.1) for e, p in zip(holder['average'][0].module.parameters(), model.parameters())]",
)
VALIDATED = "\n        if step == 4:\n            "


def written(folder, setup, each):
    script = folder / "train.py"
    script.write_text(LOOP.format(setup=setup, each=each), encoding="utf-8")
    return script


def through_half(kept, after=""):
    return kept[0], f"{kept[1]}{VALIDATED}{after}"


LOST = through_half(MODULE, "ema.half(); ema.float()")
HELD = through_half(OBJECT, "holder['average'][0].module.half().float()")


@pytest.mark.parametrize(
    ("kept", "name"),
    [
        (LOST, "ema.0.bias"),
        (through_half(DICT, "shadow = {k: s.half().float() for k, s in shadow.items()}"), "shadow.0.bias"),
        (HELD, "module.0.bias"),
    ],
)
def test_a_replay_names_the_cast_that_loses_an_average(kept, name, tmp_path):
    report = bisect_nan(ReplayRequest(factory=str(written(tmp_path, *kept)), steps=8))
    (finding,) = report.findings
    assert (finding.code, finding.where.step, finding.where.tensor) == ("AMP114", 4, name)
    assert finding.where.source.line > 17
    assert finding.prescription.status == "not_run"


def test_a_replay_names_the_op_that_blows_an_average_up(tmp_path):
    setup, each = MODULE
    report = bisect_nan(ReplayRequest(factory=str(written(tmp_path, setup, each.replace("0.9", "1e12"))), steps=8))
    (finding,) = report.findings
    assert (finding.code, finding.where.tensor, finding.where.source.line) == ("AMP101", "ema.0.bias", 17)


HEALTHY = [
    SWA,
    DICT,
    (MODULE[0], f"{MODULE[1]}{VALIDATED}copy.deepcopy(ema).half()"),
    ("best = torch.full((8,), float('inf'))", "best = torch.minimum(best, model[0].bias)"),
    ("mask = torch.zeros(8)", "mask = torch.where(torch.arange(8) > 3, float('-inf'), 0.0)"),
    ("losses = []", "losses.append(loss.detach() * float('inf'))"),
    ("ema = copy.deepcopy(model); ema[0].weight.data.fill_(float('nan'))", MODULE[1]),
]


@pytest.mark.parametrize(("setup", "each"), HEALTHY)
def test_what_harms_nothing_beside_a_model_is_no_finding_of_a_replay(setup, each, tmp_path):
    report = bisect_nan(ReplayRequest(factory=str(written(tmp_path, setup, each)), steps=8))
    assert (report.verdict, report.findings) == ("healthy", ())


def test_run_names_an_average_that_is_lost_and_between_which_steps(tmp_path):
    done, lines = run(written(tmp_path, *HELD), tmp_path)
    assert done.returncode == 1
    assert "ampdoctor rule AMP114" in done.stderr
    assert "After step 4 all were finite" in done.stderr or "After step 2 all were finite" in done.stderr
    (look,) = [line for line in lines if line["kind"] == "look"]
    assert look["findings"][0]["where"]["tensor"].endswith("0.bias")


def test_run_says_nothing_of_what_harms_nothing(tmp_path):
    done, _ = run(written(tmp_path, *HEALTHY[-1]), tmp_path)
    assert (done.returncode, "AMP1" in done.stderr) == (0, False)
