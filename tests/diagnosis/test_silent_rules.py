"""Rules for sickness that stays finite: at their thresholds, on either side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.replay.forward import unexplained
from ampdoctor.diagnosis.replay.gradients import deserves_a_look, shown_in, starved, starved_finding, underflow
from ampdoctor.diagnosis.replay.scaler import misuse, suspected_misuse
from ampdoctor.diagnosis.replay.updates import stagnation
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.evidence.trace import Comparison, ModuleUpdate, ParameterVsFp32, StepEvent


def compared(**changes):
    given = {
        "step": 1,
        "loss": 1.0,
        "reference_loss": 1.0,
        "gradient_error": 1e-3,
        "gradient_ratio": 1.0,
        "zeroed": 0.0,
        "zeroed_share": 0.0,
        **changes,
    }
    return Comparison(**given)


SCALED_STEP = StepEvent(kind="optimizer_step", scale=1024.0, unscaled=False)
CLIPPED = StepEvent(kind="unscale", scale=1024.0, edited=5)
CLEAN = (StepEvent(kind="unscale", scale=1024.0), StepEvent(kind="optimizer_step", scale=1024.0, edited=5))


@pytest.mark.parametrize(
    ("events", "ratio", "op"),
    [
        ((SCALED_STEP,), 1024.0, "optimizer.step"),
        ((CLIPPED,), 1e-3, "gradient clipping"),
        ((replace(CLIPPED, clipped=(900.0, 1.0)),), 1e-3, "clip_grad_norm_"),
        ((CLIPPED, SCALED_STEP), 1e-3, "optimizer.step"),
        ((CLIPPED,), 1.9, None),
        (CLEAN, 100.0, None),
        ((StepEvent(kind="optimizer_step", scale=1.0, unscaled=False),), 100.0, None),
    ],
)
def test_misuse_needs_the_call_and_the_harm(events, ratio, op):
    finding = misuse(compared(events=events, gradient_ratio=ratio))
    assert (finding and finding.where.op) == op
    if finding:
        assert (finding.code, finding.cause, finding.where.phase) == ("AMP407", "scaler_misuse", "optimizer")
        assert "still scaled by 1,024" in finding.message


UNSCALE = StepEvent(kind="unscale", scale=1024.0)
PLAIN = StepEvent(kind="unscale", scale=1024.0, misscaled=3)
LATE = StepEvent(kind="optimizer_step", scale=1024.0, misscaled=3)
KEPT = StepEvent(kind="grad", scale=1024.0)
OTHER = StepEvent(kind="unscale", scale=1.0, misscaled=3, scales=(1024.0,))


@pytest.mark.parametrize(
    ("events", "error", "ops"),
    [
        ((UNSCALE, LATE), 0.11, ["scaler.unscale_"]),
        ((UNSCALE, LATE), 0.1, []),
        ((PLAIN,), 0.5, ["backward"]),
        ((OTHER,), 0.5, ["scaler.step"]),
        ((KEPT, KEPT, PLAIN, LATE), 0.5, ["autograd.grad", "backward", "scaler.unscale_"]),
        ((StepEvent(kind="grad", scale=1.0),), 0.5, []),
        (CLEAN, 0.5, []),
    ],
)
def test_what_to_suspect_where_gradients_depart(events, error, ops):
    found = suspected_misuse(compared(events=events, gradient_error=error))
    assert [finding.where.op for finding in found] == ops
    assert {finding.code for finding in found} <= {"AMP407"}
    assert all("1,024" in finding.message for finding in found)


@pytest.mark.parametrize(
    ("error", "share", "zeroed", "severity"),
    [
        (2.1e-2, 0.5, 0.0, "warning"),
        (2.1e-2, 0.49, 0.09, None),
        (2.1e-2, 0.01, 0.1, "warning"),
        (3.2e-2, 1.6e-7, 0.35, None),  # a half ResNet with branches that are almost switched off
        (0.1, 1.0, 0.0, "warning"),
        (0.11, 1.0, 0.0, "error"),
    ],
)
def test_underflow_matters_from_a_measured_error(error, share, zeroed, severity):
    assert underflow(compared(gradient_error=error, zeroed_share=share, zeroed=zeroed)) == severity


@pytest.mark.parametrize(("error", "look"), [(2e-2, False), (2.1e-2, True), (float("inf"), True), (float("nan"), True)])
def test_what_deserves_a_look(error, look):
    assert deserves_a_look(compared(gradient_error=error)) is look


def update(module="a", *, moved=100, stalled=100, lost=1.0, size=1.0, trained=True):
    return ModuleUpdate(
        module=module, tensors=(f"{module}.w",), moved=moved, stalled=stalled, size=size, lost=lost, trained=trained
    )


@pytest.mark.parametrize(
    ("updates", "found"),
    [
        ((update(),), "a"),
        ((update(stalled=75),), None),
        ((update(stalled=76),), "a"),
        ((update(lost=0.75),), None),
        ((update(), update("big", moved=1000, stalled=0, lost=0.0)), None),
        ((update(), update("ema", trained=False)), "a"),
        ((update("net.1"), update("net.2")), "net"),
        ((update("x.1", stalled=99), update("y.1", stalled=100)), "y.1"),
    ],
)
def test_stagnation_of_all_that_is_trained_together(updates, found):
    still = stagnation(compared(updates=updates))
    assert (still.module if still else None) == found


FED = ParameterVsFp32(
    name="body.weight",
    gradient=1.0,
    expected=1.0,
    error=1e-3,
    flushed_error=1e-6,
    nonzero=100,
    flushed=1,
    looked_at=100,
    moved=100,
    meant_to_move=100,
    stalled=0,
    below_half_ulp=0,
    update=0.1,
    expected_update=0.1,
)
HUNGRY = replace(
    FED,
    name="gate.weight",
    gradient=0.0,
    expected=1e-8,
    error=1e-8,
    flushed_error=1e-8,
    flushed=100,
    moved=0,
    update=0.0,
)


def held(number, *parameters):
    return compared(step=number, parameters=parameters)


def names(*steps, thresholds=DEFAULT_THRESHOLDS):
    return [parameter.name for parameter in starved(steps, thresholds)]


def test_a_parameter_is_starved_where_each_step_loses_all_of_its_gradient():
    assert names(held(0, FED, HUNGRY), held(1, FED, HUNGRY)) == ["gate.weight"]
    assert names(held(0, FED, HUNGRY), held(1, FED, replace(FED, name="gate.weight"))) == []
    assert names(held(0, FED), held(1, FED)) == []
    assert names() == []


def test_nothing_arrives_behind_a_layer_that_begins_at_zero_before_it_has_moved():
    idle = replace(HUNGRY, expected=0.0, flushed_error=0.0, flushed=0, nonzero=0)
    first, *later = held(0, FED, idle), held(1, FED, HUNGRY), held(2, FED, HUNGRY)
    assert names(first, *later) == ["gate.weight"]
    assert shown_in([first, *later], starved([first, *later], DEFAULT_THRESHOLDS)) == tuple(later)
    assert names(*later, held(3, FED, idle)) == [], "what gets nothing in fp32 now and then is fed now and then"
    assert names(first, held(1, FED, replace(FED, name="gate.weight")), held(2, FED, HUNGRY)) == []


@pytest.mark.parametrize(
    "healthy",
    [
        replace(
            HUNGRY, expected=0.0, flushed_error=0.0, flushed=0, nonzero=0
        ),  # zero in fp32 too: dead, idle, a gate of 0
        replace(HUNGRY, meant_to_move=0),  # learning rate 0, or far below the weight's last place in fp32 as well
        replace(HUNGRY, flushed_error=0.5e-8),  # what is lost is not most of it
    ],
)
def test_what_gets_nothing_in_fp32_either_or_would_not_move_is_healthy(healthy):
    assert names(held(0, FED, healthy)) == []


def test_a_whole_module_is_an_error_and_a_part_of_one_a_warning():
    part = replace(HUNGRY, name="body.bias")
    assert starved_finding([held(0, FED, HUNGRY)], [HUNGRY], None).severity == "error"
    assert starved_finding([held(0, FED, part)], [part], None).severity == "warning"


@pytest.mark.parametrize(("error", "severity"), [(0.1, None), (0.3, "warning"), (0.6, "error")])
def test_gradients_that_nothing_explains(error, severity):
    finding = unexplained(compared(gradient_error=error))
    assert (finding.severity if finding else None) == severity
