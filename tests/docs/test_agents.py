"""docs/agents.md: each command on the page gives the JSON that the page promises."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.docs.pages import DOCS, blocks

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for x in 1000 * torch.randn(8, 8, 16):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save(model.state_dict(), "last.pt")
"""
FACTORY = """
import torch
from ampdoctor import TrainingRun

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 16))

def make_run():
    batches = 1000 * torch.randn(8, 8, 16)
    return TrainingRun(model=make_model(), batches=batches, loss=lambda model, batch: model(batch).square().mean())
"""
MEANT = {
    "ARGS": "--any 1",
    "PATH": "last.pt",
    "LOG": "RUN",
    "FILE.py:function": "factory.py:make_run",
    "BUNDLE --model train.py": "RUN/bundle-0 --model factory.py:make_model",
}


@pytest.mark.slow
def test_the_commands_run_and_give_json(tmp_path, run_cli, check_report):
    page = (DOCS / "agents.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "factory.py").write_text(FACTORY)
    verdicts = {}
    assert blocks(page) == []
    commands = re.findall(r"`ampdoctor ([^`]* [^`]*)`", page.partition("## What to read")[0])
    named = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, MEANT))})(?!\w)")
    for shown in sorted(commands, key=lambda one: not one.startswith("run ")):  # it makes the others' files
        command = named.sub(lambda found: MEANT[found[0]], shown)
        done = run_cli(*shlex.split(command), cwd=tmp_path)
        if command.startswith("rule"):
            assert [rule["code"] for rule in json.loads(done.stdout)] == ["AMP201"]
            continue
        text = (tmp_path / "report.json").read_text() if command.startswith("run") else done.stdout
        verdicts[command.partition(" --")[0]] = check_report(text)["verdict"]
    assert verdicts == {
        "run": "sick",
        "bisect-nan train.py": "sick",
        "health RUN": "sick",
        "scan last.pt": "healthy",
        "bisect-nan factory.py:make_run": "sick",
        "bisect-nan RUN/bundle-0": "sick",
    }
