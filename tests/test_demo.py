"""The demo tells the truth: its runs, its exit codes, and what it does when one of them is not as it should be."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "fixtures" / "demo"


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
@pytest.mark.xdist_group("demo")  # it is played once for both
def test_the_demo_shows_each_command_its_report_and_its_code(played):
    played, _ = played
    scan = played.partition("$ ampdoctor scan ")[2]
    assert scan.index("ampdoctor rule AMP101") < scan.index("--> exit code 1: findings")
    bisect = played.partition("$ ampdoctor bisect-nan ")[2].partition("$ ampdoctor recommend ")[0]
    for part in (
        "ampdoctor rule AMP201",
        "block.3.ff.wo",
        "t5_ffn.py:38",
        "verified by replay",
        "--> exit code 1: findings",
    ):
        assert part in bisect
    recommend = played.partition("$ ampdoctor recommend ")[2]
    assert "loss scaling" in recommend
    assert "--> exit code 0: nothing at or above --fail-on" in recommend
    assert "Every command ended as it should." in recommend


@pytest.mark.slow
@pytest.mark.xdist_group("demo")  # it is played once for both
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
