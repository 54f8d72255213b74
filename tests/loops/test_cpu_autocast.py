"""A script whose own autocast is the CPU's, replayed with CUDA's list of ops and with its own."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.reports.fix_code import code_of, setting_of
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the script would find the GPU that is emulated")
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))
torch.nn.init.constant_(model[1].weight, 3e4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(8):
    optimizer.zero_grad()
    with torch.autocast({arguments}):
        loss = model(torch.ones(4, 8)).float().mean()
    loss.backward()
    optimizer.step()
"""
NOTE = "replayed with CUDA's autocast, as on a GPU; --policy native replays the CPU's own"


@pytest.mark.parametrize(
    ("arguments", "policy", "device"),
    [
        ('"cpu", torch.float16', "cuda", "cpu"),
        ('device_type="cpu", dtype=torch.float16', "cuda", "cpu"),
        ('"cpu", torch.float16', "native", "cpu"),
        ('"cuda", torch.float16', "cuda", "cuda"),
    ],
)
def test_the_fix_is_for_the_script_s_own_autocast_and_the_other_list_is_said(
    arguments, policy, device, tmp_path, check_report
):
    (tmp_path / "train.py").write_text(SCRIPT.format(arguments=arguments))
    report = bisect_nan(ReplayRequest(factory=str(tmp_path / "train.py"), steps=2, policy=policy))
    check_report(render_json(report))
    (finding,) = report.findings
    assert finding.prescription.kind == "fp32_modules"
    code = code_of(finding.prescription, setting_of(report, finding), finding.cause)
    assert f'with torch.autocast("{device}", enabled=False):' in "\n".join(code.torch)
    assert (NOTE in report.run["notes"]) is (device == "cpu" and policy == "cuda")
