"""Scripts of public reports, run as their README has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PUBLIC = Path(__file__).parents[3] / "fixtures" / "public"


def run(name, folder, *options):
    command = [
        sys.executable,
        "-m",
        "ampdoctor",
        "run",
        "--health",
        "health",
        *options,
        str(PUBLIC / name / "script.py"),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--look", "off", "--no-bundle"]])
def test_a_file_that_the_script_leaves_open_is_whole(options, tmp_path):
    done = run("open_file", tmp_path, *options)
    assert (done.returncode, done.stderr.count("\n")) == (0, 2)
    assert "steps watched, " in done.stderr
    assert len((tmp_path / "open_file.csv").read_text().splitlines()) == 50


@pytest.mark.slow
def test_a_forward_that_overflows_before_there_is_a_loss_is_named(tmp_path):
    done = run("raise_before_backward", tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("7 ")
    assert "AssertionError: boxes with x2 < x1" in done.stderr
    for said in ("ERROR  step 8", "script.py:12", "ampdoctor rule AMP201", "aten.mul", "verified"):
        assert said in done.stderr
    assert (tmp_path / "health" / "bundle-8").is_dir()
