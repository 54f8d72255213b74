"""AMP304 judges each parameter by itself, over all steps, and says once what shares a cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampdoctor.diagnosis.catalogue.moving import thresholds_from
from ampdoctor.diagnosis.ranges.starved_parameters import common_module, starved, starved_finding
from ampdoctor.evidence.of_runs.trace import Comparison, ParameterBeside
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS

FED = ParameterBeside(
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
    beneath=0,
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


def step(number, *parameters):
    return Comparison(
        step=number,
        loss=1.0,
        reference_loss=1.0,
        gradient_error=1e-3,
        gradient_ratio=1.0,
        zeroed=0.0,
        zeroed_share=0.0,
        parameters=parameters,
    )


def names(*steps, thresholds=DEFAULT_THRESHOLDS):
    return [parameter.name for parameter in starved(steps, thresholds)]


def test_a_parameter_is_starved_where_each_step_loses_all_of_its_gradient():
    assert names(step(0, FED, HUNGRY), step(1, FED, HUNGRY)) == ["gate.weight"]
    assert names(step(0, FED, HUNGRY), step(1, FED, replace(FED, name="gate.weight"))) == []
    assert names(step(0, FED), step(1, FED)) == []
    assert names() == []


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
    assert names(step(0, FED, healthy)) == []


def test_steps_whose_moves_were_not_looked_at_say_nothing():
    assert names(step(0), step(1, FED, HUNGRY)) == ["gate.weight"]


def test_how_much_has_to_be_lost_can_be_moved():
    near = replace(HUNGRY, flushed_error=0.9e-8)
    assert names(step(0, near)) == []
    assert names(step(0, near), thresholds=thresholds_from({"AMP304": {"lost": 0.8}})) == ["gate.weight"]


def test_a_whole_module_is_an_error_and_a_part_of_one_a_warning():
    part = replace(HUNGRY, name="body.bias")
    assert starved_finding([step(0, FED, HUNGRY)], [HUNGRY], None).severity == "error"
    assert starved_finding([step(0, FED, part)], [part], None).severity == "warning"


def test_one_finding_names_the_module_that_all_share():
    inner = [replace(HUNGRY, name=f"encoder.{at}.weight") for at in range(20)]
    finding = starved_finding([step(0, FED, *inner), step(1, FED, *inner)], inner, None)
    assert finding.where.module == "encoder"
    assert finding.evidence["parameters_count"] == 20
    assert len(finding.evidence["parameters"]) == 16
    assert finding.evidence["steps"] == [0, 1]
    assert common_module(["a.b.weight", "a.c.bias"]) == "a"
    assert common_module(["weight", "a.c.bias"]) == ""
