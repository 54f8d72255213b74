"""Rules on tensors over time: each catches its sick run, names the tensor, and says nothing of the healthy one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampdoctor.diagnosis.health.judge import Judge
from ampdoctor.evidence.log_records import RunLine
from tests.diagnosis.health.lines import NAMES, changed, details, judged, steps
from tests.diagnosis.health.test_step_rules import scale

SICK = 20
"""The look at which a sick run falls sick."""


def found(change):
    return judged(details(change=change))


@pytest.mark.parametrize("seed", range(2))
def test_quiet_tensors_are_left_alone(seed):
    assert judged(details(60, seed=seed)) == []


def since(factor):
    """Grows by a factor at each look from the sick one on."""
    return lambda look, value: value * factor ** max(0, look - SICK + 1)


@pytest.mark.parametrize(("code", "factor"), [("AMP733", 1.1), ("AMP737", 0.9)])
def test_a_weight_that_begins_to_grow_or_to_shrink_and_one_that_has_always(code, factor):
    (finding,) = found(changed("norm", 2, "parameter", since(factor)))
    assert (finding.code, finding.severity, finding.where.tensor) == (code, "warning", NAMES[2])
    assert NAMES[2] in finding.message
    assert finding.where.module == "blocks.1.fc"
    assert SICK * 20 <= finding.where.step <= (SICK + 3) * 20
    assert found(changed("norm", 2, "parameter", lambda look, value: value * factor**look)) == []


def test_the_query_and_key_of_an_attention_make_logits():
    names = ("blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.attention.q_proj.weight", "head.weight")
    judge = Judge()
    judge.add(RunLine(name="made-up", tensors=names, optimizers=("AdamW",)))
    grows = details(change=changed("norm", 2, "parameter", since(1.1)))
    (finding,) = [found for line in grows for found in judge.add(line)]
    assert (finding.code, finding.evidence["first"]) == ("AMP733", "logits")


def breaks_of(change, **steps_changed):
    """Of a weight that breaks at the sick look: what is said to have moved it, beside the steps."""
    lines = sorted([*details(change=change), *steps(600, **steps_changed)], key=lambda line: line.step)
    return {f.evidence["first"] for f in judged(lines) if f.code in {"AMP733", "AMP737"}}


@pytest.mark.parametrize("factor", [1.1, 0.9])
def test_weights_are_moved_by_the_settings_only_where_these_have_changed(factor):
    change, sick = changed("norm", 2, "parameter", since(factor)), SICK * 20
    assert breaks_of(change) == {"weights"}
    assert breaks_of(change, learning_rates=lambda at, _: (1e-1 if at >= sick - 10 else 1e-3,)) == {"optimizer"}
    assert breaks_of(change, weight_decays=lambda at, _: (-0.1 if at >= sick - 10 else 0.01,)) == {"optimizer"}
    assert breaks_of(change, learning_rates=lambda at, _: (1e-3 * min(1, at / 500),)) == {"optimizer"}
    assert breaks_of(change, learning_rates=lambda at, _: (1e-3 * (1 - at / 700),)) == {"weights"}
    assert breaks_of(change, loss=lambda at, value: value * 3 if at >= sick - 10 else value) == {"loss"}


def rounded_away(look, one):
    """A model in bf16 whose updates are too small for most weights from a look on."""
    if one.role == "gradient":
        return replace(one, format="bf16", zero_share=0.1)
    share = None if one.role == "activation" else 0.8 if look >= SICK else 0.2
    return replace(one, format="bf16", unmoved_share=share)


def test_updates_that_are_rounded_away():
    (finding,) = found(rounded_away)
    assert (finding.code, finding.severity, finding.where.step) == ("AMP738", "warning", (SICK + 2) * 20)
    assert finding.evidence["lost_share"] == pytest.approx((0.8 - 0.1) / 0.9)
    assert finding.evidence["format"] == "bf16"


@pytest.mark.parametrize(("factor", "word"), [(0.02, "falls away"), (50.0, "grows")])
def test_a_gradient_that_departs(factor, word):
    (finding,) = found(changed("norm", 0, "gradient", since(factor)))
    assert (finding.code, finding.where.tensor) == ("AMP728", NAMES[0])
    assert word in finding.message


def test_a_gradient_that_becomes_zero():
    (finding,) = found(changed("norm", 0, "gradient", lambda look, norm: 0.0 if look >= 20 else norm))
    assert (finding.code, finding.where.tensor, finding.where.step) == ("AMP728", NAMES[0], 22 * 20)
    assert finding.evidence["norm"] == 0.0


def test_underflow_that_spreads_is_told_before_and_after_it_harms():
    findings = found(changed("flushed_share", 3, "gradient", lambda look, v: 0.001 * 1.35 ** max(0, look - 10)))
    assert [(f.code, f.severity) for f in findings] == [("AMP725", "note"), ("AMP725", "warning")]
    note, warning = findings
    assert note.where.tensor == warning.where.tensor == NAMES[3]
    assert warning.evidence["flushed_share"] >= 0.05 > note.evidence["flushed_share"]
    reached = note.where.step + note.evidence["steps_left"]
    assert reached == pytest.approx(warning.where.step, abs=40)


def test_zeros_that_spread_where_gradients_come_out_of_fp16():
    """What fp16 made zero inside the backward arrives as a zero: none of it is flushed any more."""
    shares = lambda start: lambda look, _: min(start * 1.6 ** max(0, look - 8), 1.0)  # noqa: E731
    (warning,) = [f for f in found(changed("zero_share", 0, "gradient", shares(0.002))) if f.severity == "warning"]
    assert (warning.code, warning.where.tensor) == ("AMP725", NAMES[0])
    assert warning.evidence["zero_share"] >= 0.05
    assert found(changed("zero_share", 0, "gradient", shares(0.5))) == []  # a ReLU's


@pytest.mark.parametrize(("computes", "told"), [("fp16", True), ("bf16", False)])
def test_zeros_that_spread_without_a_scaler_are_told_where_the_run_computes_in_fp16(computes, told):
    zeros = changed("zero_share", 0, "gradient", lambda look, _: min(0.002 * 1.6 ** max(0, look - 8), 1.0))

    def of_format(look, one):
        one = zeros(look, one)
        return replace(one, format=computes) if one.role == "activation" else one

    findings = judged(replace(line, loss_scale=None) for line in details(change=of_format))
    assert ("AMP725", "warning") in {(f.code, f.severity) for f in findings} if told else findings == []


def test_another_run_in_the_same_log_has_another_past():
    """Its first details come before its first step."""
    first, second = details(20), details(20, change=lambda look, one: replace(one, norm=one.norm and one.norm / 3))
    assert judged([*first, *second]) == []


def test_headroom_that_runs_out():
    findings = found(lambda look, one: replace(one, log2_headroom=8 - 0.3 * look) if one.role == "activation" else one)
    assert [(f.code, f.severity) for f in findings] == [("AMP726", "note"), ("AMP726", "warning")]
    note = findings[0]
    assert (note.where.tensor, note.evidence["first"]) == (NAMES[4], "logits")
    assert note.evidence["steps_left"] == pytest.approx(note.evidence["log2_headroom"] / 0.3 * 20, rel=0.1)


def test_headroom_far_from_the_limit_is_no_forecast():
    """A third of a power of two a look would end after 1,000 steps; over eight looks it is a training that learns."""
    drift = lambda look, one: replace(one, log2_headroom=16 - 0.3 * look) if one.role == "activation" else one  # noqa: E731
    assert judged(details(27, change=drift)) == []  # 8.2 powers of two are left
    (note,) = judged(details(29, change=drift))
    assert (note.code, note.severity) == ("AMP726", "note")
    assert 7 < note.evidence["log2_headroom"] <= 8


@pytest.mark.parametrize(("lost", "first"), [(0.35, "logits"), (0.0, "scale")])
def test_a_scale_that_falls_follows_the_drift_that_was_told(lost, first):
    drift = lambda look, one: replace(one, log2_headroom=8 - lost * look) if one.role == "activation" else one  # noqa: E731
    lines = [*details(23, change=drift), *steps(600, **scale(range(480, 500)))]
    findings = judged(sorted(lines, key=lambda line: line.step))
    assert {f.evidence["first"] for f in findings if f.code == "AMP723"} == {first}


@pytest.mark.parametrize(("nonfinite", "said"), [(3, "has overflowed"), (0, "it overflows in about")])
def test_an_output_that_has_overflowed_is_forecast_no_more(nonfinite, said):
    def drifts(look, one):
        ill = nonfinite if look == 7 else 0
        return replace(one, log2_headroom=8 - look, nonfinite=ill) if one.role == "activation" else one

    (finding,) = judged(details(8, change=drifts))
    assert (finding.code, finding.severity) == ("AMP726", "warning")
    assert said in finding.message


def test_a_parameter_that_stands_still_though_its_gradient_arrives():
    (finding,) = found(changed("update_ratio", 2, "parameter", lambda look, v: 0.0 if look >= SICK else v))
    assert (finding.code, finding.where.tensor) == ("AMP727", NAMES[2])


def of_rows(look, one):
    """A weight without a gradient of its own for most elements, as rows of an embedding."""
    one = rounded_away(look, one)
    return replace(one, zero_share=0.8) if one.role == "gradient" else one


def frozen(look, one):
    """One that stands still because its gradient is gone as well."""
    if one.tensor != 2 or look < SICK:
        return one
    return replace(one, update_ratio=0.0) if one.role == "parameter" else replace(one, norm=0.0)


LEFT_ALONE = {
    "a small bias that grows": changed("norm", 1, "parameter", since(1.2)),
    "a gradient that is zero now and then, an expert's": changed(
        "norm", 0, "gradient", lambda look, norm: 0.0 if look % 7 == 3 or look in {21, 22} else norm
    ),
    "underflow that has always been there": changed("flushed_share", 3, "gradient", lambda look, _: 0.2),
    "a norm that is not finite": changed("norm", 0, "gradient", lambda look, v: math.nan if look == SICK else v),
    "a norm that is missing": changed("norm", 0, "parameter", lambda look, v: None if look == SICK else v),
    "weights in fp32 that do not move": lambda look, one: replace(rounded_away(look, one), format="fp32"),
    "weights without a gradient that do not move": of_rows,
    "random rounding, which says nothing": lambda look, one: replace(rounded_away(look, one), unmoved_share=None),
    "all that stand still, at the end of a schedule": lambda look, one: (
        replace(one, update_ratio=0.0) if one.role == "parameter" and look >= SICK else one
    ),
    "one that never moved": changed("update_ratio", 2, "parameter", lambda look, _: 0.0),
    "a bias before a BatchNorm": changed("update_ratio", 2, "parameter", lambda look, _: 0.0 if look >= SICK else 3e-8),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_healthy_tensors_are_left_alone(case):
    assert found(LEFT_ALONE[case]) == []


def test_what_stands_still_with_its_gradient_is_not_amp727():
    assert "AMP727" not in [f.code for f in found(frozen)]


def eight(look, one):
    """An output in e4m3 whose scale drops at once."""
    if one.role != "activation":
        return one
    return replace(one, format="e4m3", log2_headroom=None, scale=64.0 * (2.0**-5 if look >= SICK else 1))


def test_a_factor_of_eight_bits_that_drops():
    (finding,) = found(eight)
    assert (finding.code, finding.where.step, finding.evidence["log2_change"]) == ("AMP734", SICK * 20, -5)


def test_looks_that_a_firing_adds_do_not_disturb_the_spacing():
    lines = details()
    more = [replace(line, step=line.step + 1, reason="gradient-jump") for line in lines[15:18]]
    assert judged(sorted(lines + more, key=lambda line: line.step)) == []
