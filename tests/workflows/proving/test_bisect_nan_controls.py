"""Masks are health, in every make, precision and policy; only what they leave of a row can be sick."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = Path(__file__).with_name("controls.py")
MASKS = ("inf_filled", "inf_added", "min_added", "fp32_min_added", "where", "buffer", "python_number", "sdpa")
FORMS = (("fp16", False, "cuda"), ("bf16", True, "native"))


@pytest.mark.parametrize(
    ("mask", "precision", "pure", "policy"),
    [*((mask, *FORMS[0]) for mask in MASKS), *((mask, *FORMS[1]) for mask in MASKS[::2])],
)
def test_a_mask_is_healthy(mask, precision, pure, policy):
    arguments = {"mask": mask, "precision": precision, "pure": pure}
    report = bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments=arguments, policy=policy))
    assert report.verdict == "healthy"
    assert report.findings == ()
    # two steps, each once more in fp32, and the first again: none was looked at closely, the cheap check did not fire
    assert report.run["replays"] == 5


def test_a_row_without_any_open_place_is_blamed_on_the_softmax():
    report = bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments={"mask": "full_row", "precision": "fp16"}))
    (finding,) = report.findings
    assert (finding.cause, finding.where.op, finding.where.nonfinite) == ("invalid_op", "aten.softmax", "nan")
    assert finding.where.module == "attention"
