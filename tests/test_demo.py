"""The demo tells the truth: its runs, its exit codes, and what it does when one of them is not as it should be."""

from __future__ import annotations

import importlib.util
import json
import re
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
        [sys.executable, str(DEMO / "run_demo.py"), "pages/watched.html"],
        cwd=(here := tmp_path_factory.mktemp("elsewhere")),
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, here / "pages" / "watched.html"


@pytest.mark.slow
def test_the_demo_shows_each_command_its_report_and_its_code(played):
    played, _ = played
    scan = played.partition("$ ampdoctor scan ")[2]
    assert scan.index("ERROR AMP101") < scan.index("--> exit code 1: findings")
    bisect = played.partition("$ ampdoctor bisect-nan ")[2].partition("$ ampdoctor recommend ")[0]
    for part in ("ERROR AMP201", "block.3.ff.wo", "t5_ffn.py:38", "verified by replay", "--> exit code 1: findings"):
        assert part in bisect
    recommend = played.partition("$ ampdoctor recommend ")[2]
    assert "loss scaling" in recommend
    assert "--> exit code 0: nothing at or above --fail-on" in recommend
    assert "Every command ended as it should." in recommend


@pytest.mark.slow
def test_the_demo_s_watched_training_is_alerted_before_it_fails_and_has_a_page(played):
    played, page = played
    found = re.search(r"the alert came at step (\d+), (\d+) steps before the failure at step (\d+)", played)
    alert, lead, failure = map(int, found.groups())
    assert (alert + lead, lead > 20) == (failure, True)
    assert "AMP726" in page.read_text(encoding="utf-8")
    assert str(page) in played


def test_the_checkpoint_is_sick_in_weights_moments_and_scaler(tmp_path, python, run_cli, check_report):
    path = tmp_path / "run.pt"
    assert run_cli(str(path), command=(python, str(DEMO / "sick_checkpoint.py"))).returncode == 0
    report = check_report(run_cli("scan", str(path), "--format", "json").stdout)
    assert {finding["code"] for finding in report["findings"]} == {"AMP101", "AMP103", "AMP402"}


@pytest.mark.parametrize(
    ("seen", "good"), [(([5], [9]), True), (([9], [9]), False), (([], [9]), False), (([5], []), False)]
)
def test_an_alert_that_does_not_come_before_fails_the_demo(demo, seen, good, tmp_path, capsys):
    alerts, looks = seen
    lines = [{"kind": "alert", "step": step, "finding": {"severity": "warning"}} for step in alerts]
    lines += [{"kind": "look", "step": step} for step in looks]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert demo.came_before(tmp_path) == good
    assert ("UNEXPECTED" in capsys.readouterr().out) == (not good)
