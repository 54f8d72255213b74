"""Every shape of model: the module, call, op and line of a birth are found, and a healthy twin is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.request import ReplayRequest

FILE = Path(__file__).with_name("shapes.py")
SHAPES = (
    "plain",
    "reentrant",
    "nonreentrant",
    "in_place",
    "residual",
    "called_twice",
    "tied",
    "returns_input",
    "dict_output",
    "dataclass_output",
    "model_output",
    "frozen_backbone",
    "weight_norm",
    "spectral_norm",
    "custom_function",
    "compiled_function",
    "lstm",
    "gru",
    "gradient_penalty",
    "loss_edits_batch",
    "two_optimizers",
    "accumulation",
    "batch_encoding",
    "loader_generator",
    "loader_workers",
    "prints_argv",
)
MODULES = {"residual": "", **dict.fromkeys(("dict_output", "dataclass_output", "model_output"), "body.culprit")}


def line_of(mark):
    lines = FILE.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def replay(shape, birth):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:make_run", arguments={"shape": shape, "birth": birth}))


def only_finding(shape, birth):
    report = replay(shape, birth)
    assert report.verdict == "sick"
    assert not report.errors
    assert report.run["deterministic"]
    (finding,) = report.findings
    return finding


def mark(shape, birth):
    return line_of(f"{'CUSTOM' if shape == 'custom_function' else 'BIRTH'} {birth}")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_birth(shape):
    finding = only_finding(shape, "forward")
    where = finding.where
    assert (finding.cause, where.phase, where.op, where.nonfinite) == (
        "forward_overflow",
        "forward",
        "aten.mul",
        "inf",
    )
    assert where.step == (0 if shape in ("lstm", "gru") else 1)
    assert where.module == MODULES.get(shape, "culprit")
    assert where.call == (shape == "called_twice")
    assert where.micro_batch == 0
    assert not where.recompute
    assert where.source.line == mark(shape, "forward")
    assert Path(where.source.file).name == FILE.name
    assert finding.prescription.status == "verified"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_backward_birth(shape):
    finding = only_finding(shape, "backward")
    where = finding.where
    custom = shape == "custom_function"
    assert (finding.cause, where.step, where.phase) == ("invalid_op", 0, "backward")
    assert where.op == ("aten.div" if custom else "aten.sqrt")
    assert where.nonfinite == "inf"
    assert where.module == MODULES.get(shape, "culprit")
    assert where.call == (shape == "called_twice")
    if custom:
        assert where.source.line == mark(shape, "backward")
    else:
        assert where.source is None
        assert where.forward_source.line == mark(shape, "backward")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_healthy_twin(shape):
    report = replay(shape, "")
    assert report.verdict == "healthy"
    assert report.findings == ()
    assert report.run["deterministic"]


def test_loss_code_after_an_inner_backward_is_loss():
    where = only_finding("penalty_born_in_it", "").where
    assert (where.phase, where.module, where.op) == ("loss", "", "aten.log")
    assert where.source.line == line_of("PENALTY")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_scripted_child_is_named_though_it_takes_no_hooks():
    finding = only_finding("scripted_child", "forward")
    assert (finding.where.module, finding.where.op, finding.where.step) == ("culprit", "aten.log", 0)
    assert replay("scripted_child", "").verdict == "healthy"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_old_weight_norm():
    assert only_finding("old_weight_norm", "forward").where.module == "culprit"
    assert replay("old_weight_norm", "").verdict == "healthy"
