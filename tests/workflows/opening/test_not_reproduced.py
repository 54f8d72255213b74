"""A run that is known to fail and stays clean here is not reproduced, never healthy; the report says what differs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.cli.run_command import judge
from ampdoctor.diagnosis.replay.outcome import known_failure
from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.reports.json_report import render_json
from ampdoctor.reports.next_step import next_step
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows.opening import long_runs

FACTORY = "tests.workflows.opening.long_runs:healthy"
INF, NAN = math.inf, math.nan


def folder(path, history, *, step=500):
    save_file(long_runs.run(1).model.state_dict(), path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}))
    return path


def replay(checkpoint=None, **options):
    given = {"steps": 2, **options}
    return bisect_nan(ReplayRequest(factory=FACTORY, checkpoint=checkpoint and str(checkpoint), **given))


@pytest.mark.parametrize(
    "history",
    [
        [{"step": 490, "loss": 2.0}, {"step": 500, "loss": NAN}],
        [{"step": 490, "loss": 2.0, "grad_norm": NAN}, {"step": 500, "loss": 0.0, "grad_norm": "nan"}],
    ],
)
def test_the_trainers_log_says_that_it_fails(history, tmp_path, check_report):
    report = replay(folder(tmp_path, history))
    (note,) = report.findings
    assert (report.verdict, note.code, note.severity) == ("not_reproduced", "AMP902", "note")
    assert note.where.global_step == 501
    assert (note.evidence["global_step"], note.evidence["steps"], note.evidence["device"]) == (500, 2, "cpu")
    assert note.evidence["failing_step"] in (490, 500)
    assert "not those that followed step 500" in note.help
    assert f"torch is {torch.__version__}" in note.help
    assert judge(report).code == 2
    assert check_report(render_json(report))["verdict"] == "not_reproduced"


@pytest.mark.parametrize(
    "history",
    [
        [{"step": 490, "loss": "nan"}, {"step": 500, "loss": 2.0}],  # a step that was skipped
        [{"step": 490, "loss": 2.0, "grad_norm": 1.0}, {"step": 500, "loss": 2.0, "grad_norm": INF}],
        [{"step": 500, "eval_loss": NAN}],
    ],
)
def test_a_log_of_a_run_that_is_well(history, tmp_path):
    report = replay(folder(tmp_path, history))
    assert (report.verdict, report.findings) == ("healthy", ())


@pytest.mark.parametrize(
    ("loss", "verdict", "tensor"),
    [(NAN, "not_reproduced", True), (NAN, "not_reproduced", False), (0.7, "healthy", True)],
)
def test_a_loss_that_was_saved_beside_the_weights(loss, verdict, tensor, tmp_path):
    path = tmp_path / "checkpoint.pt"
    value = torch.tensor(loss) if tensor else loss
    torch.save({"model": long_runs.run(1).model.state_dict(), "loss": value, "step": 7}, path)
    assert replay(path).verdict == verdict


def underflowing():
    """Stays finite, and learns nothing from step 1 on: its gradients are below what fp16 holds."""
    run = long_runs.run(4, scaler=None)
    loss, first = run.loss, run.batches[0]
    run.loss = lambda model, x: loss(model, x) * (1.0 if x.equal(first) else 1e-7)
    return run


@pytest.mark.parametrize(
    ("wanted", "option", "said"),
    [(0, "--no-compare", "no step was held beside fp32"), (1, "--compare-steps", "only 1 step was held beside fp32")],
)
def test_a_comparison_that_was_cut_comes_before_all_else(wanted, option, said, check_report):
    """What stays finite is only seen beside fp32: more steps would not reach it."""
    request = ReplayRequest(factory=underflowing, steps=4, compare_steps=wanted, expect_failure=True)
    report = bisect_nan(request)
    check_report(render_json(report))
    (note,) = report.findings
    assert (report.verdict, note.code, note.evidence["compared"]) == ("not_reproduced", "AMP902", wanted)
    assert note.help.startswith(f"What differs here: {said}")
    assert f"(leave out {option});" in note.help
    assert judge(report).reason.endswith(f"shows without {option}")
    step = next_step(report)
    assert step.said.startswith(f"leave out {option}")
    assert step.line.endswith("--steps 4 --expect-failure")
    (left_out,) = [one.what for one in report.skipped if "fp32" in one.what]
    assert left_out == ("comparison of further steps with fp32" if wanted else "comparison with fp32")
    assert bisect_nan(replace(request, compare_steps=None)).verdict == "sick"


@pytest.mark.parametrize(
    ("scale", "tracker", "known"), [(2.0**-8, 0, True), (2.0**-8, 5, False), (1.0, 0, False), (65536.0, 0, False)]
)
def test_a_scale_that_is_coming_down(scale, tracker, known):
    assert (known_failure([], None, ScalerState(scale=scale, growth_tracker=tracker), said=False) is not None) == known


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (490, "before this checkpoint was saved at step 500"),
        (502, "which was replayed, but not with that step's data"),
        (550, "steps 501 to 502 were replayed (--steps 50 reaches it)"),
    ],
)
def test_which_steps_differ(step, sentence, tmp_path):
    (note,) = replay(folder(tmp_path, [{"step": step, "loss": NAN}])).findings
    assert sentence in note.evidence["differences"][0]
    assert "the checkpoint holds no optimizer" in " ".join(note.evidence["differences"])


def test_a_precision_that_differs(tmp_path):
    path = tmp_path / "checkpoint.pt"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    torch.save({"model": long_runs.run(1).model.state_dict(), "scaler": scaler, "loss": NAN}, path)
    (note,) = replay(path, arguments={"precision": "fp32"}, fresh_scaler=True).findings
    assert any("replayed in fp32" in clause for clause in note.evidence["differences"])
