"""Late faults of frameworks' users under `ampdoctor run`: found in the sick step and again in its bundle; a twin is left
alone.

A script runs inside the machine of `tests/loops/bare.py`, and trains on after the look as it does bare. The bundle is
opened by a process of its own in an empty folder, without the machine and without the script's data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for name in ("accelerate", "transformers", "datasets", "trl", "peft", "lightning"):
    pytest.importorskip(name)

from tests.loops.bare import ROOT, run_in_process  # noqa: E402
from tests.loops.late import LATE  # noqa: E402

pytestmark = pytest.mark.slow

SCRIPTS = [late for late in LATE if late.frameworks]
OWN_MODELS = ("lightning_module", "accelerate_loop")
"""Scripts whose model's class is their own: a bundle holds no code. The others' come from transformers and PEFT."""
RUN = ("--health", "health", "--report", "json=report.json")
PROGRESS = re.compile(r"(it/s|s/it|examples/s)\b")


def place_of(report):
    """Where the one error of a report is: code, step of the optimizer, phase, module, op, line.

    The line of an op in a backward is the one that made it.
    """
    (error,) = (finding for finding in report["findings"] if finding["severity"] == "error")
    where = error["where"]
    line = f"{Path(where['source']['file']).name}:{where['source']['line']}"
    return error["code"], where["global_step"], where["phase"], where["module"] or "", error["evidence"]["kernel"], line


def truth_of(late):
    """The same of the truth."""
    truth = late.truth
    return truth.code, truth.step, truth.phase, truth.module, truth.op, truth.line


def said(stderr):
    """The lines of a stderr but for progress bars, whose speed is another each time."""
    return {line.strip() for line in re.split(r"[\r\n]", stderr) if line.strip() and not PROGRESS.search(line)}


@pytest.mark.parametrize("late", SCRIPTS, ids=[late.name for late in SCRIPTS])
def test_a_late_fault_is_found_in_place_and_in_its_bundle_and_a_twin_is_left_alone(late, tmp_path):
    code, stderr = beside_a_bare_run(late, late.sick, tmp_path / "sick")
    assert (code, "ampdoctor" in stderr) == (1, True)
    report = read(tmp_path / "sick" / "report.json")
    assert place_of(report) == truth_of(late)

    bundle = Path(report["run"]["bundle"])
    assert bundle == tmp_path / "sick" / "health" / f"bundle-{late.truth.step}"
    again = bisected(bundle, late, tmp_path / "laptop")
    assert place_of(again) == truth_of(late)
    assert again["run"]["policy"] == "cuda"

    code, stderr = beside_a_bare_run(late, late.healthy, tmp_path / "healthy", silent=True)
    assert (code, "ampdoctor" in stderr) == (0, False)
    assert not list((tmp_path / "healthy" / "health").glob("bundle-*"))


def beside_a_bare_run(late, arguments, folder, *, silent=False):
    """Run a script bare, and under `run` in `folder`: both trainings end as one, bit for bit."""
    bare = folder / "bare"
    bare.mkdir(parents=True)
    alone, quiet = run_in_process(late.path, arguments, bare)
    beside, done = run_in_process(late.path, arguments, folder, run_options=RUN)
    assert {**beside, "exit_code": 0} == alone
    assert not silent or said(done.stderr) == said(quiet.stderr)
    return done.returncode, done.stderr


def bisected(bundle, late, folder):
    """What `ampdoctor bisect-nan` reports of a bundle, in a process that knows nothing else."""
    folder.mkdir()
    code = ["--model", str(late.path)] if late.name in OWN_MODELS else []
    done = subprocess.run(
        [sys.executable, "-m", "ampdoctor", "bisect-nan", str(bundle), *code, "--report", "json=report.json"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return read(folder / "report.json")


def read(report):
    return json.loads(report.read_text(encoding="utf-8"))
