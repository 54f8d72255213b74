"""Late faults under `ampdoctor run`: found at the step that is sick, found again in the bundle, and no word of a twin.

A script runs inside the machine of `tests/loops/bare.py`, and trains on after the look as it does bare. The bundle is
opened by a process of its own in an empty folder, without the machine and without the script's data.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arithmetic import ALIKE
from tests.loops.bare import ROOT, run_in_process
from tests.loops.late import LATE

pytestmark = pytest.mark.slow

PLAIN = [late for late in LATE if not late.frameworks]
RUN = ("--health", "health", "--report", "json=report.json")
AS_BARE = ("weights", "random", "optimizers", "scalers", "attempted", "skipped")


def place_of(report):
    """Where the one error of a report is: code, step of the optimizer, phase, module, op and the script's line."""
    (error,) = (finding for finding in report["findings"] if finding["severity"] == "error")
    where = error["where"]
    source = where["source"] or where["forward_source"]  # an op of a backward has the line that made it
    line = None if source is None else f"{Path(source['file']).name}:{source['line']}"
    kernel = error["evidence"].get("kernel") or None
    return error["code"], where["step"], where["phase"], where["module"] or "", kernel, line


def truth_of(late):
    """The same of the truth."""
    truth = late.truth
    return truth.code, truth.step, truth.phase, truth.module, truth.op, truth.line


@pytest.mark.parametrize("late", PLAIN, ids=[late.name for late in PLAIN])
def test_a_late_fault_is_found_in_place_and_in_its_bundle_and_a_twin_is_left_alone(late, tmp_path):
    bare, found = beside_a_bare_run(late, late.sick, tmp_path / "sick")
    assert (bare.returncode, found.returncode) == (0, 1)
    report = json.loads((tmp_path / "sick" / "report.json").read_text(encoding="utf-8"))
    assert place_of(report) == truth_of(late)

    bundle = tmp_path / "sick" / report["run"]["kept"]["bundle"]
    assert bundle == tmp_path / "sick" / "health" / f"bundle-{late.truth.step}"
    again = bisected(bundle, late.path, tmp_path / "laptop")
    assert place_of(again) == truth_of(late)
    assert again["run"]["policy"] == "cuda"

    bare, watched = beside_a_bare_run(late, late.healthy, tmp_path / "healthy")
    assert (bare.returncode, watched.returncode) == (0, 0)
    first, *others, last = [line for line in watched.stderr.splitlines() if line.startswith("ampdoctor: ")]
    assert (first.startswith("ampdoctor: watching "), others) == (True, [])
    assert "steps watched, healthy, " in last or "steps watched, no finding, " in last
    assert not list((tmp_path / "healthy" / "health").glob("bundle-*"))


def beside_a_bare_run(late, arguments, folder):
    """Run a script bare, and under `run` in `folder`: both trainings end as one, bit for bit."""
    bare = folder / "bare"
    bare.mkdir(parents=True)
    alone, done_alone = run_in_process(late.path, arguments, bare)
    beside, done = run_in_process(late.path, arguments, folder, run_options=RUN)
    assert {name: beside[name] for name in AS_BARE} == {name: alone[name] for name in AS_BARE}
    return done_alone, done


def bisected(bundle, script, folder):
    """What `ampdoctor bisect-nan` reports of a bundle, in a process that knows at most the model's code."""
    folder.mkdir()
    code = [] if script is None else ["--model", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "ampdoctor", "bisect-nan", str(bundle), *code, "--report", "json=report.json"],
        cwd=folder,
        env={**os.environ, **ALIKE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))
