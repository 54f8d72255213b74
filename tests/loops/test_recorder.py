"""The recorder of bare runs sees what a script really does."""

from __future__ import annotations

import re

import pytest
import torch

from tests.loops.recorder import LOOPS, checksum, recording, run_bare


@pytest.mark.each_value_once
@pytest.mark.parametrize("policy", ["cuda", pytest.param("native", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "script",
    [
        "nanogpt.py",
        "gan.py",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("vision_ema.py", "ppo.py", "diffusion.py")),
    ],
)
def test_two_bare_runs_are_one(script, policy, tmp_path):
    first, second = (run_bare(LOOPS / script, (), policy, tmp_path, most=10) for _ in range(2))
    assert len(first) == 10
    assert first == second
    assert all(backward.entered for backward in first), "no model ran before a backward"
    assert len({backward.entered for backward in first}) == 10, "a batch came twice"


def test_the_losses_are_those_that_the_script_prints(tmp_path, capsys):
    record = run_bare(LOOPS / "nanogpt.py", (), "cuda", tmp_path, most=9)
    printed = [float(loss) for loss in re.findall(r"iter \d+: loss ([\d.]+)", capsys.readouterr().out)]
    last_of_each_step = [backward.loss * 2 for backward in record[1::2]]  # it accumulates two micro-steps
    assert printed == [pytest.approx(loss, abs=6e-5) for loss in last_of_each_step]


def test_another_seed_is_another_record(tmp_path):
    first, second = (
        run_bare(LOOPS / "gan.py", ("--manualSeed", seed), "cuda", tmp_path, most=1) for seed in ("1", "2")
    )
    assert first != second


def test_only_the_outermost_module_with_parameters_is_entered():
    model, criterion = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.nn.MSELoss()
    x, scaler = torch.ones(3, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    with recording(most=2) as record:
        loss = criterion(model(x), x)
        scaler.scale(loss).backward()
        loss = criterion(model(x * 2), x)
        loss.backward()
        pytest.fail("the second backward was the last one asked for")
    assert [backward.entered for backward in record.backwards] == [(checksum(x),), (checksum(x * 2),)]
    assert record.backwards[1].loss == loss.item()
    assert torch.Tensor.backward.__module__ == "torch._tensor"
