"""Modules that a loop makes for one call and holds no longer: slices of its model, and wrappers of its own."""

from __future__ import annotations

import json

import pytest

import ampdoctor

STEPS = 12
LOOP = """\
import torch
from torch import nn

class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        return self.inner(x) * 1.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range({steps}):
    x, y = torch.randn(4, 6), torch.randn(4, 1)
    if step == {sick_at}:
        x[1, 2] = float("nan")
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss({call}.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
CALLS = [
    "model[2:](model[1](model[0](x)))",
    "model[2:](model[:2](x))",
    "model[4](nn.Sequential(*list(model.children())[:-1])(x))",
    "Wrap(model[2:])(model[1](model[0](x)))",
]


def watched(tmp_path, **filled):
    """The number of steps in the log of a watch over the loop, and its report."""
    script, kept = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(LOOP.format(steps=STEPS, **filled), encoding="utf-8")
    code = compile(script.read_text(encoding="utf-8"), str(script), "exec")
    with ampdoctor.watch(folder=kept, tell=lambda _: None) as watch:
        exec(code, {"__name__": "trained"})
    lines = [json.loads(line) for line in (kept / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return sum(line["kind"] == "step" for line in lines), watch.report


@pytest.mark.parametrize("call", CALLS)
def test_a_sick_batch_is_named(tmp_path, call):
    steps, report = watched(tmp_path, call=call, sick_at=5)
    (finding,) = report.findings
    assert (finding.code, finding.where.step) == ("AMP204", 5)
    assert steps == STEPS


@pytest.mark.parametrize("call", CALLS)
def test_a_healthy_loop_is_watched_to_its_end(tmp_path, call):
    assert watched(tmp_path, call=call, sick_at=-1) == (STEPS, None)
