"""Growth that leads to a limit, and growth that does not."""

from __future__ import annotations

import math

import pytest

from ampdoctor.diagnosis.catalogue import judge
from ampdoctor.diagnosis.scan.between import course
from ampdoctor.evidence.checkpoint_stats import Largest, Trend, TrendPoint


def points(values, *, steps=None, cast=True, scales=None):
    steps = steps or [100 * (at + 1) for at in range(len(values))]
    return [
        TrendPoint(
            name=f"ckpt_{step}",
            step=step,
            scale=None if scales is None else scales[at],
            largest={
                "fc.weight": Largest(
                    amax=value, cast_by_autocast=cast, module="fc", entry="weight", file=f"ckpt_{step}.pt"
                )
            }
            if value
            else {},
        )
        for at, (step, value) in enumerate(zip(steps, values, strict=True))
    ]


def trending(seen, **more):
    return judge(Trend(points=seen), **more)


def test_growth_by_a_factor_is_told_with_the_step_at_which_it_meets_fp16():
    (finding,) = trending(points([2.0**7, 2.0**9, 2.0**11, 2.0**13]))
    assert (finding.code, finding.severity, finding.where.tensor) == ("AMP710", "warning", "fc.weight")
    assert finding.evidence["meets_at"] == pytest.approx(400 + 100 * (math.log2(65504) - 13) / 2)
    assert "at about step 550" in finding.message


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 300.0, 2000.0, 2150.0],  # a running variance that finds its level
        [1e-8, 1e-3, 0.05, 0.1],  # out of a start at zero
        [100.0 * k for k in range(1, 9)],  # linear
        [float(k**4) for k in range(2, 9)],  # any power
        [40000.0, 40000.0, 40000.0],  # large, and stays
        [2.0**7, 2.0**7.2, 2.0**7.4],  # far away
        [2.0**9, 2.0**13],  # two points cannot show whether it slows down
    ],
    ids=str,
)
def test_growth_that_does_not_lead_there_is_left_alone(values):
    assert trending(points(values)) == ()


def test_uneven_steps_are_weighed_by_their_distance():
    values = {100: 2.0**6, 200: 2.0**7, 600: 2.0**11, 650: 2.0**11.5, 700: 2.0**12}
    (finding,) = trending(points(list(values.values()), steps=list(values)))
    assert finding.evidence["log2_per_1000"] == pytest.approx(10.0)
    assert finding.evidence["meets_at"] == pytest.approx(700 + 100 * (math.log2(65504) - 12))


@pytest.mark.parametrize(
    ("scales", "found"),
    [
        ([2.0**16, 2.0**11, 2.0**6, 2.0**1], True),
        ([2.0**16, 2.0**10, 2.0**10, 2.0**10], False),  # it started too high
        ([2.0**16, 2.0**11, 2.0**9, 2.0**8], False),  # it settles
        ([2.0**12, 2.0**11, 2.0**10, 2.0**9], False),  # slow, and far from 1
        ([2.0**3, 2.0**2, 2.0**1], False),  # a fluctuation
        ([math.inf, 2.0**11, 0.0], False),  # dead: AMP401's affair
    ],
)
def test_a_scale_that_keeps_falling(scales, found):
    findings = trending(points([1.0] * len(scales), scales=scales))
    assert [f.code for f in findings] == (["AMP711"] if found else [])


def test_no_course_without_time_or_growth():
    assert course([(5, 1.0)], 10.0) is None
    assert course([(5, 1.0), (5, 2.0)], 10.0) is None
    assert course([(5, 2.0), (9, 2.0)], 10.0) is None
    assert course([(5, 2.0), (9, 12.0)], 10.0) is None
