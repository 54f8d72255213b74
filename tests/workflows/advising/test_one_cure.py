"""Where no loss scale of 1 or more fits, every command names the same cure, and none advises a scaler setting."""

from __future__ import annotations

import json

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.recommend import recommend, recommend_from_file
from ampdoctor.workflows.requests import ReplayRequest
from ampdoctor.workflows.scan import scan
from tests.public.test_scaler_protocol import run

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
data = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(120)]
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = ((model(x).float() - y) * 30000).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, "last.pt")
"""


def test_every_command_names_the_same_cure(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    _, lines = run(script, tmp_path)
    (look,) = [line for line in lines if line["kind"] == "look"]
    monkeypatch.chdir(tmp_path)
    reports = [
        bisect_nan(ReplayRequest(factory=str(script), steps=8)),
        recommend(ReplayRequest(factory=str(script), steps=50)),
        recommend_from_file(str(tmp_path / "kept"), ReplayRequest(factory="")),
    ]
    cures = [finding.prescription for report in reports for finding in report.findings if finding.prescription]
    scanned = scan(str(tmp_path / "last.pt"))
    cures += [finding.prescription for finding in scanned.findings if finding.prescription]
    told = [finding["prescription"] for finding in look["findings"]]
    assert {(cure.kind, json.dumps(cure.value)) for cure in cures} == {("dtype", '"bfloat16"')}
    assert {(cure["kind"], cure["value"]) for cure in told} == {("dtype", "bfloat16")}
    assert [report.verdict for report in reports] == ["sick"] * 3
    for report in (*reports, scanned):
        assert report.scaler is None or report.scaler.recommended is None
