"""Rules on batches: what comes again, and what is unlike all before."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tests.diagnosis.health.lines import judged, steps

BAD = 400


def codes(findings):
    return [(f.code, f.severity, f.where.step) for f in findings]


def again(cycle, steps=10_000):
    """The last batches of so many steps come again, for some steps."""
    return lambda at, value: BAD - cycle + (at - BAD) % cycle if BAD <= at < BAD + steps else value


@pytest.mark.parametrize("cycle", [1, 3, 16])
def test_the_same_few_batches_again_and_again(cycle):
    findings = judged(steps(batch_fingerprint=again(cycle)))
    assert codes(findings) == [("AMP735", "warning", BAD + 3)]
    assert findings[0].evidence["first"] == "data"
    assert (findings[0].evidence["cycle"], findings[0].evidence["new_before"]) == (cycle, BAD)


def another_unit(at, value, factor=5):
    return value * factor if at >= BAD else value


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_inputs_in_another_unit(factor):
    (finding,) = judged(steps(batch_rms=partial(another_unit, factor=factor)))
    assert codes([finding]) == [("AMP736", "warning", BAD)]
    assert finding.evidence["rms"] / finding.evidence["usual_rms"] == pytest.approx(factor, rel=0.2)


def dark(at, value):
    """One input more in each step is all zeros."""
    return min(1.0, value + 0.8 * max(0, at - BAD) / 100)


def test_inputs_that_become_zeros_one_after_the_other():
    findings = judged(steps(batch_zero_share=dark))
    assert findings[0].code == "AMP736"
    assert BAD < findings[0].where.step < BAD + 40
    assert findings[0].evidence["zero_share"] > findings[0].evidence["usual_zero_share"] + 0.08


LEFT_ALONE = {
    **{
        f"batches that come again: {name}": (1200, {"batch_fingerprint": fingerprint})
        for name, fingerprint in {
            "epochs": lambda at, _: at % 150,
            "shuffled epochs": lambda at, _: (at // 150 * 37 + at * 7) % 150,
            "one batch": lambda at, _: 7,
            "few": lambda at, _: at % 5,
            "each twice": lambda at, _: at // 2,
            "rounds": lambda at, _: at // 40 * 10 + at % 10,
            "a retry": lambda at, value: value - 1 if at % 50 == 49 else value,
            "of nobody": lambda at, _: None,
        }.items()
    },
    "noise of a factor of two": (2000, {"batch_rms": lambda at, value: value**20}),
    "a drift over the whole run": (2000, {"batch_rms": lambda at, value: value * math.exp(at / 500)}),
    "the last batch of an epoch, which is small": (
        2000,
        {
            "batch_elements": lambda at, value: value // 100 if at % 100 == 99 else value,
            "batch_rms": lambda at, value: value * 4 if at % 100 == 99 else value,
            "loss": lambda at, value: value * 6 if at % 100 == 99 else value,
        },
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_batches_in_health_are_left_alone(case):
    count, changes = LEFT_ALONE[case]
    assert judged(steps(count, **changes)) == []


def test_batches_of_another_size_begin_anew():
    """A loss of longer sequences is another one; a jump that comes later is seen."""

    def longer(at, value):
        return value * 4 if at >= BAD else value

    grown = {"loss": longer, "batch_elements": longer}
    assert judged(steps(900, gradient_norm=longer, **grown)) == []
    jumps = lambda at, value: longer(at, value) * (30 if at == 700 else 1)  # noqa: E731
    (finding,) = judged(steps(900, gradient_norm=jumps, **grown))
    assert (finding.code, finding.where.step) == ("AMP720", 700)


def test_sizes_that_vary_all_the_time_change_nothing():
    (finding,) = judged(
        steps(
            batch_elements=lambda at, value: value + at % 7,
            gradient_norm=lambda at, value: value * 20 if at == BAD else value,
        )
    )
    assert (finding.code, finding.where.step) == ("AMP720", BAD)
