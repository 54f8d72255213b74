"""Trainings under `ampdoctor run` beside plain Python: workers, several processes, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.live.script import scripts

pytestmark = pytest.mark.slow
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AMPDOCTOR", "COV", "OMP"))
}


def call(folder, *command):
    return subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("method", "name"), [("fork", "__main__"), ("spawn", "__mp_main__")])
def test_workers_load_and_the_weights_are_the_same(tmp_path, method, name):
    (tmp_path / "train.py").write_text(scripts.WORKERS)
    plain = call(tmp_path, sys.executable, "train.py", method, name)
    watched = call(tmp_path, sys.executable, "-m", "ampdoctor", "run", "train.py", method, name)
    assert plain.returncode == 0, plain.stderr
    assert (watched.stdout, watched.returncode) == (plain.stdout, 0), watched.stderr
    assert "\nTrue 1\n" in plain.stdout  # what a script sets before it imports torch
