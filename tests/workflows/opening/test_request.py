"""What a report says of what was asked."""

from __future__ import annotations

import torch

from ampdoctor.workflows.opening.request import ReplayRequest


def test_what_is_as_usual_is_not_said():
    assert ReplayRequest(factory="run.py:make").described("run.py:make") == {
        "factory": "run.py:make",
        "checkpoint": None,
    }
    assert ReplayRequest(factory="run.py:make").described_advice() == {}


def test_what_makes_it_another_run_is_said_as_it_is_typed():
    arguments = {"lr": 0.123456789, "case": "a"}
    request = ReplayRequest(factory="r:m", arguments=arguments, precision="bf16", allow_partial=True, ranks=8)
    assert request.described("r:m")["options"] == {
        "--arg": ["lr=0.123456789", 'case="a"'],
        "--allow-partial": [],
        "--precision": ["bf16"],
    }
    assert request.described_advice() == {"advice_options": {"--ranks": ["8"]}}


def test_an_argument_that_cannot_be_typed_is_not_said():
    request = ReplayRequest(factory=print, arguments={"dtype": torch.float16, "steps": 3})
    assert "options" not in request.described("print")
