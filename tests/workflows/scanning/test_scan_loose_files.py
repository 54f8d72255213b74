"""Files side by side in a folder, whose names show no layout and no step: what is said of one is of that one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ampdoctor.reports.github import render_github
from ampdoctor.reports.human import plain_text
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.scan import scan, scan_several

Weights = dict[str, torch.Tensor]


def weights(*sick: str, width: int = 4) -> Weights:
    named = {"fc.weight": torch.ones(width, width), "fc.bias": torch.ones(width)}
    for name in sick:
        named[name].view(-1)[0] = math.nan
    return named


def adam(step: int, *sick: str, width: int = 4) -> dict[str, object]:
    """The state of an optimizer of `weights`, with NaN in these entries of both parameters."""
    shapes = [one.shape for one in weights(width=width).values()]
    state = {
        at: {
            "step": torch.tensor(float(step)),
            **{name: torch.full(shape, math.nan if name in sick else 0.5) for name in ("exp_avg", "exp_avg_sq")},
        }
        for at, shape in enumerate(shapes)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def save(path: Path, **contents: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(contents, path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A sick model without a step, and one with step 10 whose optimizer is sick."""
    save(tmp_path / "sick.pt", model=weights("fc.weight", "fc.bias"))
    save(tmp_path / "sickopt.pt", model=weights(), optimizer=adam(10, "exp_avg"), step=10)
    return tmp_path


def steps_of(report) -> dict[str, int | None]:
    return {finding.where.file: finding.where.global_step for finding in report.findings}


def test_a_files_step_is_its_own_and_never_that_of_the_file_beside_it(two):
    report = scan(two)
    assert steps_of(report) == {"sick.pt": None, "sickopt.pt": 10}
    assert report.target["global_step"] is None
    written = json.loads(render_json(report))
    assert {one["where"]["file"]: one["where"]["global_step"] for one in written["findings"]} == steps_of(report)
    assert "\nERROR  sick.pt  fc." in plain_text(report)
    assert "\nERROR  global step 10  sickopt.pt  fc." in plain_text(report)


def test_models_of_one_step_give_it_to_the_folder(tmp_path):
    save(tmp_path / "generator.pt", model=weights("fc.weight"), step=7)
    save(tmp_path / "critic.pt", model=weights(width=3), step=7)
    report = scan(tmp_path)
    assert report.target["global_step"] == 7
    assert steps_of(report) == {"generator.pt": 7}


def test_a_file_without_a_model_belongs_to_the_only_model_beside_it(tmp_path):
    save(tmp_path / "model.pt", model=weights("fc.weight"))
    save(tmp_path / "optimizer.pt", optimizer=adam(10))
    assert steps_of(scan(tmp_path)) == {"model.pt": 10}


def test_files_whose_names_have_one_moment_are_of_one_save(tmp_path):
    for epoch in (1, 2):
        save(tmp_path / f"model_epoch{epoch}.pt", model=weights(), step=100 * epoch)
        save(tmp_path / f"teacher_epoch{epoch}.pt", model=weights(*(["fc.bias"] if epoch == 2 else [])))
    assert steps_of(scan(tmp_path)) == {"teacher_epoch2.pt": 200}


def test_only_what_is_of_one_file_is_folded_and_each_file_has_its_own_fix(two):
    text = plain_text(scan(two))
    first, second = text.split("\nERROR  ")[1:]
    assert "of the same cause, 1 more: fc.weight (1 not finite)" in first
    assert "FIX    Resume from an earlier checkpoint." in first
    assert "of the same cause, 1 more: exp_avg of fc.weight (16 not finite)" in second
    assert "FIX    Drop the optimizer state of " in second


def test_findings_of_several_paths_are_not_folded_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt"):
        save(tmp_path / name, model=weights("fc.weight"))
    assert plain_text(scan_several(["a.pt", "b.pt"])).count("\nERROR  ") == 2


def test_moments_are_named_with_their_entry_and_rule_below_a_weight(tmp_path):
    save(tmp_path / "last.pt", model=weights("fc.weight"), optimizer=adam(10, "exp_avg", "exp_avg_sq"))
    text = " ".join(plain_text(scan(tmp_path / "last.pt")).split())
    assert "of the same cause, 4 more: AMP103 exp_avg of fc.weight (16 not finite)" in text
    assert "AMP103 exp_avg_sq of fc.weight (16 not finite)" in text


@pytest.mark.parametrize("contents", [{}, {"seen": torch.arange(3)}], ids=["empty", "integers"])
def test_a_file_in_which_nothing_could_be_examined_is_named(tmp_path, contents):
    save(tmp_path / "healthy.pt", model=weights())
    save(tmp_path / "other.pt", **contents)
    report = scan(tmp_path)
    assert report.verdict == "healthy"
    said = "holds no floating-point tensor and no loss scaler: nothing to examine"
    assert [(one.what, one.reason) for one in report.skipped] == [("other.pt", said)]
    assert "left out\n  other.pt  holds no floating-point tensor" in plain_text(report)


def test_an_annotation_of_a_part_that_was_not_examined_is_of_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        save(tmp_path / "many" / f"step-{step}.pt", model=weights())
    whole = (tmp_path / "many" / "step-200.pt").read_bytes()
    for step in range(300, 900, 100):
        (tmp_path / "many" / f"step-{step}.pt").write_bytes(whole[: len(whole) // 2])
    lines = render_github(scan("many", every_member=True)).splitlines()
    files = [line.partition("file=")[2].partition(",")[0] for line in lines if line.startswith("::error")]
    assert files[:5] == [*(f"many/step-{step}.pt" for step in range(300, 700, 100)), "many"]
    assert "step-700.pt (unreadable)" in lines[4]
    assert "step-800.pt (unreadable)" in lines[4]


def saved_at(folder: Path, steps: dict[str, int], sick: str = "") -> None:
    for name, step in steps.items():
        save(folder / name, model=weights(*(["fc.weight"] if name == sick else [])), step=step)


def test_files_with_steps_of_their_own_are_a_series_and_each_is_read(tmp_path):
    steps = dict(zip("hbdfacegi", range(10, 100, 10), strict=True))
    saved_at(tmp_path, {f"{name}.pt": step for name, step in steps.items()}, sick="d.pt")
    report = scan(tmp_path)
    assert (report.trend.last_healthy, report.trend.first_sick) == ("b.pt", "d.pt")
    assert [member["name"] for member in report.target["members"]] == [f"{name}.pt" for name in steps]
    assert steps_of(report) == {"d.pt": 30}


@pytest.mark.parametrize(
    "steps", [{"a.pt": 10, "b.pt": 10}, {"exp1.pt": 10, "exp2.pt": 20}], ids=["one step", "runs by name"]
)
def test_files_that_may_be_of_several_runs_are_no_series(tmp_path, steps):
    saved_at(tmp_path, steps, sick=max(steps))
    report = scan(tmp_path)
    assert report.trend is None
    assert steps_of(report) == {max(steps): max(steps.values())}


def test_other_models_and_files_without_a_step_are_no_series(tmp_path):
    saved_at(tmp_path, {"a.pt": 10, "b.pt": 20})
    save(tmp_path / "c.pt", model=weights(width=3), step=30)
    assert scan(tmp_path).trend is None
    save(tmp_path / "c.pt", model=weights())
    assert scan(tmp_path).trend is None
