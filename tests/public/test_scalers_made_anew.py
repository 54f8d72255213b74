"""A GradScaler for each epoch takes no step (conservationtechlab/animl-py#304), and its healthy twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest

SCRIPT = Path(__file__).parents[2] / "fixtures" / "public" / "all_steps_skipped" / "script.py"
IN_A_CLASS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 4)
data = [(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range({batches})]


class Trainer:
    def __init__(self):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale={init_scale})

    def prepare(self):
        {anew}

    def epoch(self):
        self.prepare()
        for x, y in data:
            self.update(x, y)

    def update(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(100 * x), y, reduction="sum")
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


trainer = Trainer()
for epoch in range(16):
    trainer.epoch()
"""
ANEW = 'self.scaler = torch.amp.GradScaler("cpu")'


def replayed(script, steps=None):
    return bisect_nan(ReplayRequest(factory=str(script), steps=steps))


@pytest.fixture
def trained(tmp_path):
    def write(batches=9, anew=ANEW, init_scale=65536.0):
        script = tmp_path / "train.py"
        script.write_text(IN_A_CLASS.format(batches=batches, anew=anew, init_scale=init_scale), encoding="utf-8")
        return script

    return write


def test_an_epoch_that_is_one_step_names_the_scaler_that_is_made_anew():
    (finding,) = replayed(SCRIPT).findings
    assert (finding.code, finding.severity, finding.evidence["begun_again"]) == ("AMP405", "error", 7)
    assert "the GradScaler is made anew" in finding.message
    assert finding.prescription.detail.startswith("make the GradScaler once, before the epochs")
    assert "init_scale" in {one.kind for one in finding.prescription.alternatives if one.verified}


def test_the_loop_begins_anew_with_the_scaler_that_its_epoch_makes(trained):
    report = replayed(trained(), steps=20)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.evidence["begun_again"]) == ("AMP405", "error", 2)
    (skipped,) = (check for check in report.checks if check.name.startswith("steps skipped"))
    assert skipped.result == "20 of 20"


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"anew": "pass"}, {"anew": "pass", "batches": 20}, {"batches": 20}])
def test_a_scaler_that_lasts_or_settles_within_its_epoch_is_well(trained, change):
    assert replayed(trained(**change), steps=20).findings == ()


@pytest.mark.slow
def test_recommend_knows_the_scaler_of_an_epoch_and_what_fits():
    report = recommend(ReplayRequest(factory=str(SCRIPT)))
    (finding,) = report.findings
    assert (report.verdict, finding.code, finding.evidence["loss_scale"]) == ("sick", "AMP405", 65536.0)
    assert "a new scaler is made 15 times" in finding.message
    assert finding.help.startswith("Make the GradScaler once, before the epochs.")
    assert (finding.prescription.kind, finding.prescription.value, finding.prescription.status) == (
        "init_scale",
        16.0,
        "verified",
    )
