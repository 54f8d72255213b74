"""What a report says of what was asked."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


def test_what_makes_it_another_run_is_said_as_it_is_typed():
    arguments = {"lr": 0.123456789, "case": "a"}
    request = ReplayRequest(factory="r:m", arguments=arguments, precision="bf16", allow_partial=True, target="h100")
    assert request.described("r:m")["options"] == {
        "--arg": ["lr=0.123456789", 'case="a"'],
        "--allow-partial": [],
        "--precision": ["bf16"],
    }
    assert request.described_advice() == {"advice_options": {"--target": ["h100"]}}


def test_an_argument_that_cannot_be_typed_is_not_said():
    request = ReplayRequest(factory=print, arguments={"dtype": torch.float16, "steps": 3})
    assert "options" not in request.described("print")


@pytest.mark.parametrize(("asked", "notes"), [("fp32", 0), ("plain", 1)])
def test_which_kernels_multiply_is_said_where_they_were_asked_for(asked, notes):
    request = ReplayRequest(factory="tests.workflows.opening.long_runs:healthy", steps=1, half_products=asked)
    said = [note for note in bisect_nan(request).run["notes"] if "half-products" in note]
    assert said == ["fp16 products run through the CPU's own kernels (--threshold half-products=plain)"] * notes
