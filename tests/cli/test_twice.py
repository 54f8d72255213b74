"""Two runs on one input write the same bytes, in every format, whatever seeds Python's hashes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from ampdoctor.reports.forms.formats import ReportFormat

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_two_runs_are_byte_identical_in_every_format(name, tmp_path, run_cli):
    (tmp_path / "run.py").write_text(RUN)
    run_cli(str(tmp_path / "sick.pt"), command=(sys.executable, str(ROOT / "fixtures" / "demo" / "sick_checkpoint.py")))
    written = []
    for seed in ("1", "2"):
        places = [f"--report={form}={seed}.{form}" for form in get_args(ReportFormat)]
        result = run_cli(*COMMANDS[name], *places, cwd=tmp_path, env={"PYTHONHASHSEED": seed}, timeout=600)
        assert result.returncode in (0, 1), result.stderr
        reports = {form: (tmp_path / f"{seed}.{form}").read_bytes() for form in get_args(ReportFormat)}
        assert [form for form, text in reports.items() if not text and form != "github"] == []
        written.append({**reports, "stdout": result.stdout})
    assert [form for form in written[0] if written[0][form] != written[1][form]] == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["rule"], ["rule", "AMP201"], ["env"]])
def test_lists_are_byte_identical_too(arguments, run_cli):
    def shown(seed):
        return run_cli(*arguments, "--format", "json", env={"PYTHONHASHSEED": seed}).stdout

    assert shown("1") == shown("2") != ""
