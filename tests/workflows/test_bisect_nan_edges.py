"""bisect-nan at the edges: nothing to replay, user code that raises, Ctrl-C, hidden state, meant infinities."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ampdoctor import TrainingRun
from ampdoctor.errors import FactoryError, UserCodeError
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.workflows import edges

FILE = Path(__file__).with_name("edges.py")


def replay(function, **changes):
    return bisect_nan(ReplayRequest(factory=f"{FILE}:{function}", **{"steps": 4, **changes}))


def line_of(mark):
    lines = FILE.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def test_no_batch_is_inconclusive():
    report = replay("no_batches")
    assert (report.verdict, report.complete, report.findings) == ("inconclusive", False, ())
    assert report.errors[0].what == "batches"


ACCUMULATES = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    if n == 3:
        y[1] = float("nan")
    torch.nn.functional.mse_loss(model(x), y).backward()
    if n % 2:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_literal_between_two_backwards_is_not_said_to_be_in_the_optimizers_step(tmp_path):
    script = tmp_path / "accumulates.py"
    script.write_text(ACCUMULATES)
    (finding,) = bisect_nan(ReplayRequest(factory=str(script))).findings
    assert (finding.where.step, finding.where.source.line) == (1, 8)
    assert "in the code after a backward" in finding.message
    assert "optimizer" not in finding.message


def test_fewer_batches_than_steps():
    report = replay("incomplete_accumulation")
    assert (report.verdict, report.run["steps"]) == ("healthy", 2)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("loss_none", "the loss function returned NoneType, not a tensor"),
        ("loss_vector", r"the loss has shape \(4, 2\): a replay needs a scalar"),
    ],
)
def test_a_loss_of_the_wrong_kind(function, sentence):
    with pytest.raises(FactoryError, match=sentence):
        replay(function)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("loss_raises", "step 0 raised ValueError: the user's own mistake"),
        ("after_step_raises", "step 1 raised KeyError: 'after_step'"),
    ],
)
def test_the_users_exception_keeps_its_traceback(function, sentence):
    with pytest.raises(UserCodeError, match=sentence) as caught:
        replay(function)
    assert "edges.py" in caught.value.traceback_text
    assert f"{Path('ampdoctor', 'replay')}" not in caught.value.traceback_text


@pytest.mark.parametrize("function", ["no_parameters", "no_optimizer", "ctc"])
def test_unusual_and_healthy(function):
    report = replay(function)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_nondeterministic_run_says_so_and_proves_nothing():
    report = replay("nondeterministic")
    sick, odd = report.findings
    assert (odd.code, odd.severity, report.run["deterministic"]) == ("AMP901", "warning", False)
    assert (sick.cause, sick.where.op) == ("invalid_op", "aten.log")
    tried = [sick.prescription, *sick.prescription.alternatives]
    assert {one.status for one in tried} == {"not_run"}
    assert all("does not come back" in one.reason for one in tried)


def test_each_report_is_of_the_run_that_one_call_of_the_factory_made():
    calls = itertools.count()

    def another():
        """Each call makes a run that fails one step later."""
        sick = next(calls)
        made = [torch.full((2, 3), torch.nan if step == sick else 1.0) for step in range(9)]
        return TrainingRun(
            model=torch.nn.Linear(3, 1), batches=made, loss=lambda model, x: model(x).mean(), precision="fp32"
        )

    first, second = (bisect_nan(ReplayRequest(factory=another, steps=9)) for _ in range(2))
    assert first.run["deterministic"]
    assert second.run["deterministic"]
    assert first.findings[0].where.step == 0
    assert second.findings[0].where.step > 0


def test_state_in_a_closure_is_found_by_a_fresh_run_which_also_proves():
    report = replay("closure_counter")
    (finding,) = report.findings
    assert report.run["deterministic"]
    assert (finding.where.step, finding.where.op) == (2, "aten.log")
    assert finding.where.source.line == line_of("HIDDEN")
    assert finding.prescription.status == "intervention", "in a fresh run the failure comes back without the change"
    assert not any(one.verified for one in finding.prescription.alternatives)


def test_a_counter_of_a_module_is_rewound():
    made = []

    def factory():
        made.append(edges.module_counter())
        return made[-1]

    (finding,) = bisect_nan(ReplayRequest(factory=factory, steps=4)).findings
    assert (finding.where.step, finding.where.module, finding.where.op) == (2, "0", "aten.log")
    assert finding.prescription.status == "intervention", "the failure came back without the change"
    assert len(made) == 1, "from a snapshot: no fresh run was needed"


def test_the_micro_batch_is_named():
    (finding,) = replay("preprocessing_micro_batch").findings
    assert (finding.where.step, finding.where.micro_batch, finding.where.phase) == (1, 1, "loss")


def test_another_precision_overrides_the_runs():
    sick = replay("overflow")
    assert sick.findings[0].cause == "forward_overflow"
    assert sick.run["precision"] == "fp16"
    well = replay("overflow", precision="bf16")
    assert (well.verdict, well.run["precision"], well.scaler) == ("healthy", "bf16", None)


@pytest.mark.parametrize("function", ["meant_buffers", "frozen_mask_parameter"])
def test_infinities_that_are_meant(function):
    report = replay(function)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_mask_on_the_path_is_not_blamed_for_an_overflow():
    (finding,) = replay("masked_overflow").findings
    assert (finding.cause, finding.where.op, finding.where.source.line) == (
        "forward_overflow",
        "aten.mul",
        line_of("OVERFLOW"),
    )


@pytest.mark.parametrize("function", ["closure_counter", "no_batches"])
def test_the_report_follows_the_schema_and_comes_back_byte_by_byte(function, check_report):
    first, second = (render_json(replay(function)) for _ in range(2))
    assert first == second
    assert check_report(first)["command"] == "bisect-nan"


def test_each_replay_of_a_close_look_is_told():
    told = []
    request = ReplayRequest(factory=f"{FILE}:overflow", steps=4)
    report = bisect_nan(request, progress=lambda what, done, total: told.append((what, done, total)))
    step = report.findings[0].where.step
    close = [done for what, done, total in told if (what, total) == (f"looking closely at step {step}", None)]
    assert close == list(range(len(close)))
    assert len(close) == report.run["replays"] - (step + 1) > 3


def test_a_lazy_module_is_refused_in_a_sentence():
    with pytest.raises(FactoryError, match=r"weight has no shape yet \(a lazy module\)"):
        replay("lazy_module")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_the_users_anomaly_mode_does_not_stop_the_diagnosis():
    (finding,) = replay("anomaly_mode").findings
    assert (finding.where.phase, finding.where.op) == ("backward", "aten.sqrt")
    assert finding.where.forward_source.line == line_of("ANOMALY")
    assert not torch.is_anomaly_enabled()


def test_a_deep_copy_of_the_model_is_not_the_model():
    report = replay("average_by_deepcopy")
    assert (report.verdict, report.findings, report.run["deterministic"]) == ("healthy", (), True)


def test_complex_values():
    assert replay("spectrum").verdict == "healthy"
    (finding,) = replay("spectrum", arguments={"sick": True}).findings
    assert (finding.cause, finding.where.op) == ("invalid_op", "aten.div")
