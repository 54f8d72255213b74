"""Two runs on one input write the same bytes, in every format, whatever seeds Python's hashes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ampdoctor.reports.formats import FORMATS

pytestmark = pytest.mark.xdist_group("twice")  # the runs are made once

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
RUN = """
import torch
from torch import nn
from ampdoctor import TrainingRun

def make_run():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 11))
    batches = [torch.randint(11, (4, 8)) for _ in range(3)]
    return TrainingRun(
        model=model,
        batches=batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()),
        optimizer=torch.optim.AdamW(model.parameters()),
        precision="fp16",
        scaler={"init_scale": 8.0},
    )
"""
COMMANDS = {
    "a sick checkpoint": ["scan", "sick.pt"],
    "a folder of many": ["scan", str(CHECKPOINTS / "hf_trainer_fp16")],
    "several paths": ["scan", str(CHECKPOINTS / "torch_zip" / "step4.pt"), str(CHECKPOINTS / "hf_safetensors")],
    "a listing": ["scan", str(CHECKPOINTS / "deepspeed_zero2"), "--list"],
    "what moved": ["scan", "sick.pt", "--against", "sick.pt"],
    "a sick run": ["bisect-nan", str(ROOT / "fixtures" / "demo" / "t5_ffn.py") + ":make_run"],
    "a profile": ["profile", "run.py:make_run"],
    "a recommendation": ["recommend", "run.py:make_run"],
}


MADE_AT = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC")
"""The minute in which a page was made: it is in its title, and no other form has it."""
LISTS = {"the rules": ["rule"], "a rule": ["rule", "AMP201"], "the environment": ["env"]}
WALK = """
import contextlib, io, json, sys
from ampdoctor.cli.main import main

told = {}
for name, arguments in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = main(arguments)
    told[name] = code, shown.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def walked(run_cli, tmp_path_factory):
    """By seed and command, the exit code and what was written: each seed has one process, which runs all commands."""
    folder = tmp_path_factory.mktemp("twice")
    (folder / "run.py").write_text(RUN)
    made = run_cli(str(folder / "sick.pt"), command=(sys.executable, str(ROOT / "fixtures/demo/sick_checkpoint.py")))
    assert made.returncode == 0, made.stderr
    seeds = {}
    for seed in ("1", "2"):
        places = {name: {form: f"{seed}.{name}.{form}" for form in FORMATS} for name in COMMANDS}
        asked = {name: [*COMMANDS[name], *(f"--report={f}={p}" for f, p in places[name].items())] for name in COMMANDS}
        asked |= {name: [*arguments, "--format", "json"] for name, arguments in LISTS.items()}
        command, env = (sys.executable, "-c", WALK), {"PYTHONHASHSEED": seed}
        done = run_cli(command=command, cwd=folder, env=env, stdin=None, input=json.dumps(asked), timeout=600)
        assert done.returncode == 0, done.stderr
        seeds[seed] = {name: (code, {"stdout": shown}) for name, (code, shown) in json.loads(done.stdout).items()}
        for name, files in places.items():
            written = {form: (folder / file).read_bytes() for form, file in files.items()}
            written["html"] = MADE_AT.sub(b"", written["html"])
            seeds[seed][name][1].update(written)
    return seeds


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, *LISTS])
def test_two_runs_are_byte_identical_in_every_format(name, walked):
    (code, first), (_, second) = (walked[seed][name] for seed in walked)
    assert code in (0, 1)
    assert [form for form, text in first.items() if not text and form != "github"] == []
    assert [form for form in first if first[form] != second[form]] == []
