"""The simulated paths of the loss scale in a recommendation agree with the figures beside them."""

from __future__ import annotations

import pytest

from ampdoctor.reports.json_report import render_json
from ampdoctor.scaling.scalers import OVERFLOW_AT
from tests.corpus.reports import of_case, recommended

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def scaler_of(case, check_report):
    return check_report(render_json(recommended(case)))["scaler"]


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        of_case("grad_underflow_no_scaler", {"current": False, "recommended": True}),  # the run has no scaler
        of_case("healthy_initial_scale_skips", {"current": True, "recommended": False}),  # what it has is kept
        of_case("scale_collapsed_then_underflow", {"current": True, "recommended": True}),
    ],
)
def test_each_path_is_that_of_its_simulated_figures(case, shown, check_report):
    scaler = scaler_of(case, check_report)
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


@pytest.mark.xdist_group("grad_underflow_no_scaler")
def test_the_recommended_scale_fits_the_recorded_steps(check_report):
    scaler = scaler_of("grad_underflow_no_scaler", check_report)
    limits = [limit for _, limit in scaler["trajectory"]["limit"]]
    assert limits
    assert scaler["recommended"]["init_scale"] <= min(limits) < OVERFLOW_AT * 2.0**40


@pytest.mark.slow
@pytest.mark.xdist_group("healthy_bf16_beyond_fp16")
def test_a_run_that_needs_no_scaling_has_no_path(check_report):
    scaler = scaler_of("healthy_bf16_beyond_fp16", check_report)
    assert scaler["trajectory"] is None
