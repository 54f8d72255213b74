"""Late faults of frameworks' users under `ampdoctor run`: as `tests/loops/test_late.py` has them of plain scripts."""

from __future__ import annotations

import json
import re

import pytest

for name in ("transformers", "datasets", "trl", "peft", "lightning"):
    pytest.importorskip(name)

from tests.loops.late import LATE  # noqa: E402
from tests.loops.test_late import beside_a_bare_run, bisected, place_of, truth_of  # noqa: E402

pytestmark = pytest.mark.slow

SCRIPTS = [late for late in LATE if late.frameworks]
OWN_MODELS = ("lightning_module",)
"""Scripts whose model's class is their own: a bundle holds no code. The others' come from transformers and PEFT."""
PROGRESS = re.compile(r"(it/s|s/it|examples/s)\b")


def said(stderr):
    """The lines of a stderr but for progress bars, whose speed is another each time."""
    return {line.strip() for line in re.split(r"[\r\n]", stderr) if line.strip() and not PROGRESS.search(line)}


@pytest.mark.parametrize("late", SCRIPTS, ids=[late.name for late in SCRIPTS])
def test_a_late_fault_is_found_in_place_and_in_its_bundle_and_a_twin_is_left_alone(late, tmp_path):
    bare, found = beside_a_bare_run(late, late.sick, tmp_path / "sick")
    assert (bare.returncode, found.returncode) == (0, 1)
    report = json.loads((tmp_path / "sick" / "report.json").read_text(encoding="utf-8"))
    assert place_of(report) == truth_of(late)

    bundle = tmp_path / "sick" / report["run"]["kept"]["bundle"]
    assert bundle == tmp_path / "sick" / "health" / f"bundle-{late.truth.step}"
    again = bisected(bundle, late.path if late.name in OWN_MODELS else None, tmp_path / "laptop")
    assert place_of(again) == truth_of(late)
    assert again["run"]["policy"] == "cuda"

    bare, watched = beside_a_bare_run(late, late.healthy, tmp_path / "healthy")
    assert (bare.returncode, watched.returncode) == (0, 0)
    ours = {line for line in said(watched.stderr) if "ampdoctor: watching " in line or " steps watched, " in line}
    assert said(watched.stderr) == said(bare.stderr) | ours
    assert not list((tmp_path / "healthy" / "health").glob("bundle-*"))
