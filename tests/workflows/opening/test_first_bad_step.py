"""The first bad step of a long run: found cheaply, gone back to by a short way, and told apart from a mistake."""

from __future__ import annotations

import math

import pytest

from ampdoctor.errors import UserCodeError
from ampdoctor.replay import batches
from ampdoctor.workflows import close_look
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = "tests.workflows.opening.long_runs"


def replay(function, steps=None, *, compare_steps=None, **arguments):
    request = ReplayRequest(factory=f"{FILE}:{function}", arguments=arguments, steps=steps, compare_steps=compare_steps)
    return bisect_nan(request)


@pytest.mark.parametrize("bad", [4, 104])
def test_the_way_back_is_short_and_exact(bad):
    steps = 120
    report = replay("large_at", steps, bad=bad, compare_steps=0)
    finding = report.findings[0]
    assert (finding.where.step, finding.cause) == (bad, "forward_overflow")
    assert report.run["deterministic"]
    # pass 1, the way back, the trace and at most 3 trials of 4 steps and a reference: never from the start
    assert report.run["replays"] - (bad + 1) <= close_look.stretch(steps) - 1 + 1 + 1 + 3 * 4


def test_skips_in_a_row_are_gone_back_to_without_a_replay():
    report = replay("skips", 60)
    skipped = int(next(c.result for c in report.checks if c.name.startswith("steps skipped")).split()[0])
    assert report.verdict == "healthy"
    assert skipped > 5
    # each skipped step is traced; then every step once more beside fp32, which takes two unless it is skipped
    assert report.run["replays"] <= 60 + skipped + (close_look.stretch(60) - 1) + 2 * 60 - skipped


def test_batches_that_are_too_large_to_keep_are_drawn_again(monkeypatch):
    request = ReplayRequest(factory=f"{FILE}:shuffled", arguments={"steps": 24}, steps=24)
    kept = bisect_nan(request)
    monkeypatch.setattr(batches, "ROOM", 1)
    sizes = []
    original = batches.BatchBuffer.keep

    def watched(self, needed):
        original(self, needed)
        sizes.append(sum(batch is not batches._GONE for batch in self._batches))

    monkeypatch.setattr(batches.BatchBuffer, "keep", watched)
    dropped = bisect_nan(request)
    assert dropped.verdict == kept.verdict == "healthy"
    assert dropped.checks == kept.checks
    assert max(sizes) <= close_look.stretch(24) + close_look.TRIED + 2


@pytest.mark.parametrize(
    ("how", "raised", "phase"),
    [
        ("assert", "AssertionError: the loss is -inf", "loss"),
        ("clip", "RuntimeError: The total norm", None),
        ("weights", "RuntimeError: weights are gone", None),
    ],
)
def test_what_the_users_own_check_stops_is_traced(how, raised, phase):
    finding, *others = replay("guarded", how=how).findings
    assert not others or phase is None, "only a backward has more than one origin here"
    assert (finding.where.step, finding.severity) == (2, "error")
    assert finding.evidence["raised"].startswith(raised)
    assert "raised" in finding.evidence["harmed"] or how == "weights", (
        "a target of another origin, of the same backward"
    )
    if phase is not None:
        assert (finding.where.phase, finding.where.op) == (phase, "aten.log")
        assert finding.where.source.file.endswith("long_runs.py")
    tried = [finding.prescription, *finding.prescription.alternatives]
    assert all(one.status == "failed" for one in tried if one.kind == "dtype")
    assert any(one.kind == "skip_batch" and one.verified for one in tried) or how in ("clip", "weights")


@pytest.mark.parametrize("where", ["loss", "after_step"])
def test_a_mistake_stays_a_mistake(where):
    """Also where the step reads a mask's infinities, and where a scaler skips it."""
    with pytest.raises(UserCodeError, match="step 0 raised LookupError: a mistake") as caught:
        replay("mistaken", where=where)
    assert "long_runs.py" in caught.value.traceback_text


def tightest(report):
    return next(check for check in report.checks if check.name == "tightest headroom")


def test_a_healthy_run_names_its_tightest_layer():
    report = replay("healthy")
    check = tightest(report)
    assert report.checks[0].headroom == {"steps": 8}
    assert check.headroom["format"] == "fp16"
    assert check.headroom["log2"] == pytest.approx(math.log2(65504 / check.headroom["amax"]))
    assert check.headroom["module"] in ("first", "last", "drop", "")
    assert 5 < check.headroom["log2"] < 15
    assert f"a factor of {2 ** check.headroom['log2']:.3g}" in check.result


def test_a_mask_is_no_headroom():
    check = tightest(replay("healthy", masked=True, mask=-math.inf))
    assert check.headroom["log2"] > 5


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("healthy", {"precision": "fp32"}, "no tensor in a half-precision format was looked at"),
        ("skips", {"steps": 1}, "in a step without harm"),
    ],
)
def test_where_nothing_was_looked_at_the_headroom_is_not_measured(function, arguments, said):
    request = ReplayRequest(factory=f"{FILE}:{function}", arguments=arguments)
    check = tightest(bisect_nan(request))
    assert (check.headroom, check.result.startswith("not measured: "), said in check.result) == ({}, True, True)
