"""Skips that no log says, a scaler that skips all, and a run that is worse than it was at first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.log_records import EndLine, StepLine
from tests.diagnosis.health.lines import judged, steps

NAN, INF = math.nan, math.inf


def heard(lines, end=None):
    """What is found in a log to its end, as (code, severity, step), notes left out."""
    judge = Judge()
    found = [one for line in lines for one in judge.add(line)]
    found += judge.ends() if end is None else judge.add(end)
    assert judge.ends() == ()
    return [(f.code, f.severity, f.where.step) for f in found if f.severity != "note"]


def foreign(count=100, *, norm=(), loss=(), every=1, **fields):
    """A log that does not say what was skipped, with these norms and losses at these rows."""
    norms, losses = dict(norm), dict(loss)
    return [
        replace(
            line,
            step=line.step * every,
            skipped=None,
            gradient_norm=norms.get(at, line.gradient_norm),
            loss=losses.get(at, line.loss),
            **{"loss_scale": None, **{name: of(at) for name, of in fields.items()}},
        )
        for at, line in enumerate(steps(count))
    ]


def lost(first):
    return dict.fromkeys(range(first, 100), NAN)


@pytest.mark.parametrize(
    ("norm", "loss", "found"),
    [
        (dict.fromkeys((0, 1, 40), NAN), {}, []),  # before a finite loss: skipped
        (dict.fromkeys(range(16), INF), {}, []),
        ({40: NAN}, {40: NAN}, []),
        (lost(50), lost(51), [("AMP722", "error", 50)]),  # as with clipping and no scaler
        ({50: NAN, **lost(60)}, lost(60), [("AMP722", "error", 60)]),  # a row that no batch uses for a while
        ({99: NAN}, {99: NAN}, [("AMP722", "error", 99)]),
    ],
)
def test_weights_that_took_a_nan_never_give_a_finite_loss_again(norm, loss, found):
    assert heard(foreign(norm=norm, loss=loss)) == found


def test_while_nothing_follows_both_are_said():
    judge = Judge()
    assert [one for line in foreign(50, norm={49: INF}) for one in judge.add(line)] == []
    (found,) = judge.ends()
    assert (found.code, found.severity, found.where.step) == ("AMP722", "warning", 49)
    assert "a scaler has skipped it, as it should, or the weights are lost" in found.message


def alone(lines):
    """The same log with norms and no losses."""
    return [replace(line, loss=None) for line in lines]


def parted(lines):
    """The same log with a loss and a norm in different rows."""
    return [replace(line, **{"loss" if line.step % 2 else "gradient_norm": None}) for line in lines]


def scaled(count, falls):
    """A scale that falls right behind these steps, whose norms are NaN."""
    scale = lambda at: 65536.0 * 0.5 ** sum(at > fall for fall in falls)  # noqa: E731
    return foreign(count, norm=dict.fromkeys(falls, NAN), loss_scale=scale)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (foreign(50, norm={49: NAN}, loss={49: NAN}, loss_scale=lambda _: 1024.0), [("AMP722", "warning", 49)]),
        (alone(scaled(50, (20, 21, 48))), []),  # two in a row, and one at the end
        (parted(foreign(norm={40: NAN})), []),
        (parted(foreign(norm=lost(40), loss=lost(41))), [("AMP722", "error", 41)]),
        (alone(foreign(norm=dict.fromkeys(range(60, 100), INF))), [("AMP722", "error", 60)]),
        (alone(foreign(norm=dict.fromkeys(range(20), INF))), []),  # a first scale may take so many to come down
        (foreign(300, norm=dict.fromkeys(range(300), NAN)), []),  # a norm that is never measured
        (
            foreign(norm=dict.fromkeys(range(50, 100), INF), loss={at: 2.0 + 0.1 * (at % 3) for at in range(100)}),
            [("AMP740", "error", 58)],
        ),
    ],
)
def test_what_a_log_without_a_word_on_skips_shows(lines, found):
    assert heard(lines) == found


def test_a_scale_that_has_fallen_between_two_rows_proves_nothing_of_the_first():
    lines = foreign(64, norm=dict.fromkeys(range(60, 64), INF), every=10, loss_scale=lambda at: 2.0 ** min(16, 76 - at))
    assert ("AMP722", "error", 600) in heard(alone(lines))


def scaler_anew(batches, epochs, taken_from=math.inf):
    """A scaler made anew for each epoch: it halves its scale at each step until a scale fits."""
    return [
        StepLine(
            step=epoch * batches + batch,
            loss=3.0,
            gradient_norm=INF if batch < taken_from else 1.0,
            loss_scale=65536.0 * 0.5 ** min(batch, taken_from),
            skipped=batch < taken_from,
        )
        for epoch in range(epochs)
        for batch in range(batches)
    ]


@pytest.mark.parametrize("batches", [2, 9])
@pytest.mark.parametrize("told", [True, False])
def test_a_scaler_that_is_new_in_each_epoch_is_told_when_it_starts_over_again(batches, told):
    lines = [line if told else replace(line, skipped=None) for line in scaler_anew(batches, 16)]
    judge = Judge()
    first = next(one for line in lines for one in judge.add(line))
    assert (first.code, first.severity, first.where.step) == ("AMP740", "error", 2 * batches)
    assert "Make it once, before the epochs" in first.message


@pytest.mark.parametrize(
    ("batches", "epochs", "found"),
    [(30, 6, [("AMP740", "warning", 60)]), (60, 2, [])],  # one that starts over once was not loaded
)
def test_and_where_each_epoch_loses_its_first_steps_that_is_a_warning(batches, epochs, found):
    assert heard(scaler_anew(batches, epochs, taken_from=7)) == found


def none_taken(count, *, told=True):
    """A forward that gives Inf at any scale, and a scaler with a floor."""
    return [
        StepLine(step=at, loss=3.0 + at % 3, gradient_norm=NAN, loss_scale=max(2.0 ** (16 - at), 1.0),
                 skipped=True if told else None)
        for at in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("told", [True, False])
def test_forty_steps_of_which_none_is_taken(told):
    assert ("AMP740", "error", 39 + (not told)) in heard(none_taken(60, told=told))
    assert ("AMP740", "error", 32) in heard(none_taken(33, told=told))  # at its end the scale is at 1
    settles = [replace(line, loss_scale=2.0 ** (40 - line.step)) for line in none_taken(33, told=told)]
    assert heard(settles) == []


def test_a_scaler_that_settles_from_the_highest_scale_is_left_alone():
    lines = [
        StepLine(step=at, loss=3.0, gradient_norm=INF if at < 32 else 1.0, loss_scale=2.0 ** (32 - min(at, 32)),
                 skipped=at < 32)
        for at in range(120)
    ]  # fmt: skip
    assert heard(lines) == []


def deepspeed(skips, *, taken=14, scale=1024.0, known=False):
    """What DeepSpeed prints: a step now and then, without its scale, and each overflow with it."""
    lines = [StepLine(step=10 * at, skipped=False, learning_rates=(1e-4,)) for at in range(1, taken + 1)]
    lines += [
        StepLine(step=10 * taken + 1 + at, loss_scale=max(scale * 0.5**at, 1.0), skipped=True) for at in range(skips)
    ]
    return lines


def test_a_scale_that_falls_to_its_floor_needs_no_usual():
    assert heard(deepspeed(11)) == [("AMP723", "warning", 144), ("AMP723", "error", 151)]
    assert heard(deepspeed(3)) == []


def test_a_run_that_ends_while_its_steps_are_skipped_has_ended_there():
    end = EndLine(exit_code=1, reason="Current loss scale already at minimum")
    assert heard(deepspeed(6), end) == [("AMP723", "warning", 144), ("AMP723", "error", 146)]
    judge = Judge()
    for line in deepspeed(11):
        judge.add(line)
    (last,) = judge.add(end)
    assert "the run has ended there" in last.message
    assert heard(deepspeed(6), EndLine(exit_code=0)) == [("AMP723", "warning", 144)]


def climbing(at, value):
    return value * 1.05 ** max(0, at - 20)


def quiet(count, loss=None, norm=None):
    """A run whose loss does not fall, as in its first steps."""
    level = lambda at, v: 4.0 + 0.2 * (v - math.floor(v))  # noqa: E731 - the digits of a random number
    return steps(
        count, loss=lambda at, v: (loss or (lambda _, v: v))(at, level(at, v)), gradient_norm=norm or (lambda _, v: v)
    )


def test_a_loss_that_doubles_and_stays_there_needs_no_usual():
    (found,) = [f for f in judged(quiet(60, loss=lambda at, v: v * (2.3 if at >= 25 else 1))) if f.code == "AMP741"]
    assert (found.severity, found.where.phase) == ("warning", "loss")
    assert found.where.step < 45


def test_a_norm_that_grows_thirtyfold_needs_no_usual():
    (found,) = [f for f in judged(quiet(120, norm=climbing)) if f.code == "AMP741"]
    assert found.where.phase == "backward"
    assert found.evidence["norm_times"] >= 30


def test_where_both_have_grown_so_it_is_an_error():
    loss = lambda at, v: v * 1.03 ** max(0, at - 20)  # noqa: E731
    assert ("AMP741", "error") in [(f.code, f.severity) for f in judged(quiet(120, loss=loss, norm=climbing))]


def test_what_rises_at_first_in_health():
    falls = steps(120, gradient_norm=climbing)  # a saddle that it leaves
    from_zero = quiet(120, loss=lambda at, _: 1e-5 * (1 + at))  # a policy's, which begins without an advantage
    comes_back = quiet(120, loss=lambda at, v: v * (2.3 if 25 <= at < 31 else 1))
    for lines in (falls, from_zero, comes_back, quiet(120)):
        assert "AMP741" not in [f.code for f in judged(lines)]


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300, 4e307])
def test_norms_and_losses_at_the_ends_of_what_a_float_holds(unit):
    level = lambda at, v: min(unit * (2 + v % 1), 1.7e308)  # noqa: E731
    assert judged(steps(300, loss=level, gradient_norm=level)) == []


def test_of_two_optimizers_one_may_lose():
    both = [replace(line, optimizer=at) for line in quiet(120, loss=climbing, norm=climbing) for at in range(2)]
    assert "AMP741" not in [f.code for f in judged(both)]


@pytest.mark.parametrize("scale", [NAN, 0.0, -5.0])
def test_a_scale_that_no_scaler_has_is_told_once_and_a_nan_at_the_end(scale):
    lines = [StepLine(step=at, loss=3.0 + at % 3, loss_scale=8.0 if at < 20 else scale) for at in range(60)]
    assert [one for one in heard(lines) if one[0] == "AMP742"] == [("AMP742", "error", 20)]
    now_and_then = [replace(line, loss_scale=NAN if at % 10 else 8.0) for at, line in enumerate(lines)]
    assert heard(now_and_then) == []
