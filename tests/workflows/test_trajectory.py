"""The simulated paths of the loss scale in a recommendation agree with the figures beside them."""

from __future__ import annotations

import pytest

from ampdoctor.reports.forms.to_json import render_json
from ampdoctor.scaling.simulate import OVERFLOW_AT
from ampdoctor.workflows.opening.request import ReplayRequest
from ampdoctor.workflows.recommend import recommend

FACTORY = "fixtures/corpus/runs.py:make_run"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def scaler_of(case, check_report):
    text = render_json(recommend(ReplayRequest(factory=FACTORY, arguments={"case": case}, device="cpu")))
    return check_report(text)["scaler"], text


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("grad_underflow_no_scaler", {"current": False, "recommended": True}),  # the run has no scaler
        ("healthy_initial_scale_skips", {"current": True, "recommended": False}),  # what it has is kept
        ("scale_collapsed_then_underflow", {"current": True, "recommended": True}),
    ],
)
def test_each_path_is_that_of_its_simulated_figures(case, shown, check_report):
    scaler, _ = scaler_of(case, check_report)
    paths = scaler["trajectory"]
    assert {key: paths[key] is not None for key in ("current", "recommended")} == shown
    for key in ("current", "recommended"):
        path, figures = paths[key], scaler["simulated"][key]
        if path is None:
            continue
        low, median, high = figures["skips"]
        assert low <= path["skipped"] <= high
        assert abs(path["skipped"] - median) <= 1
        assert all(0 <= step < scaler["horizon"] for step in (*path["skips"], *(at for at, _ in path["points"])))
    if paths["recommended"] is not None:
        assert paths["recommended"]["points"][0] == [0, scaler["recommended"]["init_scale"]]
    if paths["current"] is not None:
        assert paths["current"]["points"][0] == [0, scaler["current"]["scale"]]


def test_the_recommended_scale_fits_the_recorded_steps_and_two_runs_agree(check_report):
    scaler, text = scaler_of("grad_underflow_no_scaler", check_report)
    limits = [limit for _, limit in scaler["trajectory"]["limit"]]
    assert limits
    assert scaler["recommended"]["init_scale"] <= min(limits) < OVERFLOW_AT * 2.0**40
    assert scaler_of("grad_underflow_no_scaler", check_report)[1] == text


def test_a_run_that_needs_no_scaling_has_no_path(check_report):
    scaler, _ = scaler_of("healthy_bf16_beyond_fp16", check_report)
    assert scaler["trajectory"] is None
