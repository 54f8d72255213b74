"""A replay cures where it is well and something fails without it; two replays that are alike cure nothing."""

from __future__ import annotations

import pytest

from ampdoctor.workflows.replay_under_change import Observed


def seen(error=1e-3, *, flushed=0.0, skipped=(), harmed=None):
    return Observed(
        steps=4,
        skipped=skipped,
        harmed=harmed,
        harmed_at=None if harmed is None else 2,
        errors=(error, error),
        activation_flushed=flushed,
        weight_flushed=flushed,
    )


def test_alike_with_and_without_a_change_is_no_cure():
    status, reason = seen().cures(seen())
    assert status == "not_run"
    assert "nothing fails without the change either" in reason
    assert seen(5e-3).cures(seen(1e-3))[0] == "not_run", "worse than without"


@pytest.mark.parametrize(
    "without",
    [seen(0.3), seen(harmed="loss"), seen(skipped=(0, 1, 2, 3)), seen(skipped=(0,)), seen(4e-3), seen(flushed=0.2)],
    ids=["far from fp32", "not finite", "never settles", "skips", "clearly better", "less is lost"],
)
def test_well_where_something_failed_is_a_cure(without):
    assert seen().cures(without) == ("verified", None)


def test_without_a_replay_to_compare_with_and_where_the_change_fails_it_is_as_before():
    assert seen().cures(None) == ("verified", None)
    assert seen(0.5).cures(seen())[0] == "failed"
    assert seen(harmed="loss").cures(seen())[0] == "failed"
