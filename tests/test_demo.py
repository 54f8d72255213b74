"""The demo tells the truth: its runs, its exit codes, and what it does when one of them is not as it should be."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "fixtures" / "demo"


@pytest.fixture
def demo(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("run_demo", DEMO / "run_demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_demo", module)  # a dataclass looks its module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What the whole demo prints, once for all tests that read it."""
    import os
    import subprocess

    env = {**os.environ, "PYTHONPATH": "", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, str(DEMO / "run_demo.py")],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_shows_each_command_its_report_and_its_code(played):
    assert played.index("$ ampdoctor scan ") < played.index("ERROR AMP101") < played.index("--> exit code 1: findings")
    bisect = played.partition("$ ampdoctor bisect-nan ")[2].partition("$ ampdoctor recommend ")[0]
    for part in ("ERROR AMP201", "block.3.ff.wo", "t5_ffn.py:38", "verified by replay", "--> exit code 1: findings"):
        assert part in bisect
    recommend = played.partition("$ ampdoctor recommend ")[2]
    assert "loss scaling" in recommend
    assert "--> exit code 0: nothing at or above --fail-on" in recommend
    assert "Every command ended as it should." in recommend


@pytest.mark.slow
def test_the_demo_leaves_nothing_behind(played):
    checkpoint = played.partition("$ ampdoctor scan ")[2].partition("\n")[0]
    assert checkpoint.endswith("run.pt")
    assert not Path(checkpoint).parent.exists()


def test_the_checkpoint_is_sick_in_weights_moments_and_scaler(tmp_path, python, run_cli, check_report):
    path = tmp_path / "run.pt"
    assert run_cli(str(path), command=(python, str(DEMO / "sick_checkpoint.py"))).returncode == 0
    report = check_report(run_cli("scan", str(path), "--format", "json").stdout)
    assert {finding["code"] for finding in report["findings"]} == {"AMP101", "AMP103", "AMP402"}


def test_an_unexpected_exit_code_fails_the_demo(demo, monkeypatch, capfd):
    wrong = demo.Act(title="a version", arguments=("--version",), expected=1)
    monkeypatch.setattr(demo, "acts", lambda checkpoint: (wrong,))
    monkeypatch.setattr(demo.subprocess, "run", _instead_of_training(demo.subprocess.run))
    assert demo.main() == 1
    said = capfd.readouterr().out
    assert "--> exit code 0: nothing at or above" in said
    assert "UNEXPECTED: it should have been 1" in said
    assert "Not every command ended as it should." in said


def _instead_of_training(run):
    def fake(command, **options):
        return run([sys.executable, "-c", ""] if "sick_checkpoint" in command[1] else command, **options)

    return fake


def test_the_text_is_real_and_the_model_learns_from_it():
    import torch

    from ampdoctor.replay.factory import load_factory
    from ampdoctor.replay.session import Session

    run = load_factory(f"{DEMO / 'text_gpt.py'}:make_run").make()
    session = Session(run, device=torch.device("cpu"))
    losses = [session.step(step).loss for step in range(100) if session.has_step(step)]
    session.close()
    assert len(losses) > 10
    assert losses[-1] < losses[0] - 0.5
