from __future__ import annotations

import math
import random

import pytest

from ampdoctor.diagnosis.catalogue import thresholds_from
from ampdoctor.diagnosis.replay.scale_choice import shrinking_headroom
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.evidence.trace import Headroom

LIMITS = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}


def outputs(left, module="block.mlp", kind="fp16"):
    """The largest output of each step, as binades below the format's end."""
    limit = LIMITS[kind]
    return [
        Headroom(step=step, module=module, kind="output", format=kind, amax=limit * 2.0**-binades, limit=limit)
        for step, binades in enumerate(left)
    ]


def growing(steps=8, rate=0.023, left=0.3):
    """It grows by `rate` binades a step, and has `left` at the end."""
    return [left + rate * (steps - 1 - step) for step in range(steps)]


def judged(*series, thresholds=DEFAULT_THRESHOLDS):
    return shrinking_headroom([one for rows in series for one in rows], thresholds)


@pytest.mark.parametrize("kind", LIMITS)
def test_an_output_that_passes_its_format_in_thirteen_steps_is_named_before(kind):
    finding = judged(outputs(growing(), kind=kind), outputs([1.0] * 8, "head"))
    assert (finding.code, finding.severity, finding.where.module) == ("AMP307", "warning", "block.mlp")
    assert finding.evidence["passes_in_steps"] == 14
    assert finding.evidence["log2_per_step"] == pytest.approx(0.023)
    assert finding.message.endswith("in about 14 steps.")
    assert (finding.prescription.kind, finding.prescription.status) == ("fp32_modules", "not_run")


def test_the_first_to_pass_is_named_with_the_others():
    finding = judged(outputs(growing(left=1.0, rate=0.1), "a"), outputs(growing(left=1.0, rate=0.2), "b"))
    assert (finding.where.module, [place.module for place in finding.also]) == ("b", ["a"])
    assert "1 more do so later" in finding.message


@pytest.mark.parametrize(
    "left",
    [
        [0.1] * 8,
        growing(steps=5, rate=0.2),
        [8 - 2 * math.log2(step + 1) for step in range(8)],
        growing(left=5.0, rate=0.5),
        growing(left=3.0, rate=0.05),
        [],
    ],
    ids=["large and constant", "five steps", "a power", "far away", "not soon", "nothing near"],
)
def test_what_is_large_or_grows_for_a_while_is_left_alone(left):
    assert judged(outputs(left)) is None


@pytest.mark.parametrize("spread", [0.1])
def test_noise_near_the_limit_is_no_growth(spread):
    random.seed(1)
    found = sum(judged(outputs([2 + random.gauss(0, spread) for _ in range(8)])) is not None for _ in range(500))
    assert found <= 5


@pytest.mark.parametrize(
    ("moved", "left"),
    [
        ({"AMP307": {"near": 0.2}}, growing()),
        ({"AMP307": {"ahead": 1.0}}, growing()),
        ({"AMP307": {"near": 6.0}}, growing(left=5.0, rate=0.5)),
        ({"AMP307": {"ahead": 9.0}}, growing(left=3.0, rate=0.05)),
    ],
)
def test_the_thresholds_say_how_near_and_how_far_ahead(moved, left):
    usual, other = judged(outputs(left)), judged(outputs(left), thresholds=thresholds_from(moved))
    assert (usual is None) != (other is None)
