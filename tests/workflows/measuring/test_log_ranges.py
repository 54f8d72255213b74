"""`profile` and `recommend` on the log of a run, through the writer, the files and the command line."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from ampdoctor.cli.main import main
from ampdoctor.errors import UsageError
from ampdoctor.evidence.log_records import DetailLine, RunLine, StepLine, TensorDetail
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.numerics.counting import count
from ampdoctor.reports.text import verdict
from ampdoctor.workflows.profile import NOTE_ON_LOGS, ranges_of_log
from ampdoctor.workflows.recommend import recommend_from_file
from ampdoctor.workflows.requests import ReplayRequest, is_profile

SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The log of a small training whose gradients are too small for its loss scale."""
    return logged(tmp_path_factory.mktemp("health") / "run", 1e-6)


def logged(place, factor, steps=30, look=lambda gradient: gradient):
    """Log a training whose loss is multiplied by a factor; `look` is what its gradients become before they count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = {
        "scale": SCALE,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    log = RunLog(place, RunLine(name="small", precision="fp16", autocast=True, scaler=scaler))
    for step in range(steps):
        loss = factor * nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(4, (32,)))
        optimizer.zero_grad()
        (SCALE * loss).backward()
        log.write(StepLine(step=step, loss=loss.item(), loss_scale=SCALE, skipped=False))
        log.write(
            DetailLine(
                step=step,
                tensors=tuple(
                    TensorDetail(
                        tensor=log.index_of(name),
                        role="gradient",
                        scale=SCALE,
                        elements=p.numel(),
                        histogram=count(look(p.grad)).to_dict(),
                    )
                    for name, p in model.named_parameters()
                ),
            )
        )
        optimizer.step()
        assert log.flush()
    assert log.close()
    return place


def test_the_histograms_come_through(folder):
    ranges = ranges_of_log(str(folder))
    assert (ranges.steps, ranges.run.loss_scale, ranges.run.scaler["growth_interval"]) == (30, SCALE, 2000)
    assert {site.place.name for site in ranges.sites} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert ranges.histograms[0].amax < 1e-6


def test_recommend_and_profile_take_it(folder, run_cli, check_report):
    done = run_cli("recommend", str(folder), "--format", "json")
    report = check_report(done.stdout)
    assert report["scaler"]["recommended"]["init_scale"] >= 2**14
    assert report["run"]["notes"] == [NOTE_ON_LOGS]
    done = run_cli("profile", str(folder / "log.jsonl"), "--format", "json")
    assert check_report(done.stdout)["run"]["steps"] == 30


def recommended(path):
    return recommend_from_file(str(path), ReplayRequest(factory=""))


def half(gradient):
    return gradient.half().float()


@pytest.mark.parametrize(("factor", "look"), [(1e-6, half), (1e-4, lambda gradient: gradient)])
def test_gradients_that_lose_bits_are_not_healthy(tmp_path, factor, look):
    report = recommended(logged(tmp_path / "kept", factor, look=look))
    assert report.scaler.change
    (found,) = [finding for finding in report.findings if finding.code == "AMP301"]
    assert "keep fewer bits" in found.message
    assert found.prescription.value == report.scaler.recommended.init_scale
    assert report.verdict != "healthy"


def test_a_scale_that_could_be_higher_loses_nothing(tmp_path):
    report = recommended(logged(tmp_path / "kept", 0.1, look=half))
    assert (report.verdict, report.findings, report.scaler.change) == ("healthy", (), False)
    assert "healthy in 30 recorded steps" in verdict(report)


def test_a_log_whose_gradients_are_all_zero_is_not_healthy(tmp_path):
    report = recommended(logged(tmp_path / "kept", 1e-6, look=lambda gradient: gradient * 0.0))
    assert report.verdict == "inconclusive"


def test_a_factory_with_a_dot_is_told_so_and_a_profile_that_is_missing_is_not(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def make_run(): ...\n", encoding="utf-8")
    done = run_cli("recommend", "train.make_run")
    assert done.returncode == 2
    assert "did you mean 'train.py:make_run', with a colon?" in done.stderr
    done = run_cli("recommend", "gpt.safetensors")
    assert done.returncode == 2
    assert "gpt.safetensors does not exist" in done.stderr
    assert "colon" not in done.stderr


def test_a_log_without_details_says_so(tmp_path):
    log = RunLog(tmp_path, RunLine(name="small"))
    log.write(StepLine(step=0))
    assert log.close()
    with pytest.raises(UsageError, match="no histogram of a finite gradient"):
        ranges_of_log(str(tmp_path))


def test_a_folder_with_another_log_is_none(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}))
    with pytest.raises(UsageError, match="holds no log of a run"):
        ranges_of_log(str(tmp_path))


def test_a_plan_takes_a_log_as_profile_and_recommend_do(folder, capsys):
    job = ["plan", "--global-batch", "64", "--gpus", "8", "--to-gpus", "2", "--max-micro-batch", "8", "--isolated"]
    assert main([*job, "--format", "json", "--profile", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["flushed"]["scale"] == SCALE


def test_a_function_with_a_dot_is_no_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    for file in (tmp_path / "train.py", tmp_path / "pkg" / "train.py"):
        file.write_text("def make_run():\n    return None\n")
    assert not is_profile(str(tmp_path))  # without a log
    named = {name: is_profile(name) for name in ("train.make_run", "pkg.train.make_run", "train.safetensors", "a.b")}
    assert named == {"train.make_run": False, "pkg.train.make_run": False, "train.safetensors": True, "a.b": True}
