"""What a report says of what was asked."""

from __future__ import annotations

import pytest
import torch

from ampdoctor.cli.main import main
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


def test_what_is_as_usual_is_not_said():
    assert ReplayRequest(factory="run.py:make").described("run.py:make") == {
        "factory": "run.py:make",
        "checkpoint": None,
    }
    assert ReplayRequest(factory="run.py:make").described_advice() == {}


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
    assert said == ["fp16 products run through the CPU's own kernels (--half-products plain)"] * notes


@pytest.mark.parametrize("options", [(), ("--steps", "8")])
def test_a_script_without_its_function_is_told_what_it_has_by_every_command(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def make_run():\n    pass\n")
    said = []
    for command in ("bisect-nan", "profile", "recommend"):
        assert main([command, "train.py", *options]) == 2
        said.append(capsys.readouterr().err.replace(command, "COMMAND"))
    assert said == [said[0]] * 3
    assert "train.py ended without a training step" in said[0]
    assert "(is train.py:make_run what makes the run?)" in said[0]
