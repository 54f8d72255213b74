"""Each threshold that a user may move decides something: moved, it turns a finding of its own rule and no other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ampdoctor.diagnosis.catalogue import all_thresholds, judge, rules, thresholds_from
from ampdoctor.diagnosis.replay.forward import (
    OldCopies,
    departing_in_forward,
    far_alone,
    stale_casts_finding,
    unexplained,
)
from ampdoctor.diagnosis.replay.gradients import starved as starved_parameters
from ampdoctor.diagnosis.replay.gradients import underflow, underflow_expected, underflow_seen
from ampdoctor.diagnosis.replay.nonfinite import departing
from ampdoctor.diagnosis.replay.precision import advise_precision
from ampdoctor.diagnosis.replay.scale_choice import no_common_scale
from ampdoctor.diagnosis.replay.scaler import misuse, suspected_misuse
from ampdoctor.diagnosis.replay.updates import far_from, severity_of_frozen, stagnation
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, ScalerState, Trend
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.run_facts import RangeFigures
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.evidence.trace import Amplified, Trace
from ampdoctor.scaling.scalers import ScalerSettings
from tests.diagnosis import test_change_rules, test_silent_rules, test_trend_rules
from tests.diagnosis.births import origin
from tests.diagnosis.health import test_batch_rules, test_skips, test_step_rules, test_tensor_rules
from tests.diagnosis.health.lines import changed, details, judged, steps
from tests.diagnosis.replay import test_shrinking_headroom, test_single_updates
from tests.diagnosis.replay.test_shrinking_headroom import growing, outputs
from tests.diagnosis.scan import test_log_ends
from tests.diagnosis.summaries import moment, tensor
from tests.diagnosis.test_checkpoint_rules import cast
from tests.diagnosis.test_precision_advice import facts
from tests.diagnosis.test_state_rules import BLANK, HALF, MOVING, index, optimizer, starved
from tests.scaling.test_search import noise, searched

ROOT = Path(__file__).parent
INF = math.inf


def summarised(findings):
    return sorted((finding.code, finding.severity, finding.cause or "") for finding in findings)


def scanned(*tensors, **parts):
    """What a scan says of these tensors."""
    summary = CheckpointSummary(format="torch-zip", tensors=tensors, **parts)
    return lambda thresholds: summarised(judge(summary, thresholds))


def against(*tensors):
    """What a scan says of two checkpoints."""
    return lambda thresholds: summarised(judge(test_change_rules.change(*tensors), thresholds))


def trending(values, **parts):
    """What a scan says of several checkpoints."""
    points = test_trend_rules.points(values, **parts)
    return lambda thresholds: summarised(judge(Trend(points=points), thresholds))


def of_step(rule, **figures):
    """What one of bisect-nan's rules says of a step beside fp32."""
    comparison = test_silent_rules.compared(**figures)
    return lambda thresholds: rule(comparison, thresholds)


def figures(flushed=0.0, error=1e-3):
    return RangeFigures(flushed=flushed, subnormal=0.0, overflowed=0.0, relative_error=error, zeros=0.0)


def expected(activation, weight, **more):
    """What profile says of these shares."""
    return lambda thresholds: severity(underflow_expected(activation, weight, 1024.0, figures(), thresholds, **more))


def seen(now, then=None):
    """What recommend says of two replays."""
    return lambda thresholds: severity(underflow_seen(now, then, 1024.0, None, thresholds))


def severity(finding):
    return None if finding is None else finding.severity


def replayed(error, flushed=0.5):
    return {"relative_error": error, "activation_grad": flushed, "weight_grad": flushed}


def watched(lines):
    """What is said of a run with these lines."""
    return lambda thresholds: summarised(judged(lines, thresholds))


def ended(lines):
    """What is said of a run whose log ends with these lines."""
    return lambda thresholds: summarised(test_log_ends.judged(lines, thresholds))


SCALED_DOWN = [replace(one, gradient_norm=one.gradient_norm * 0.02) for one in test_log_ends.VANISHED]


def recommended(log2_amax, **more):
    """The growth interval in closed form, and whether a change is advised."""

    def outcome(thresholds):
        found = searched(np.asarray(log2_amax), ScalerSettings(), thresholds=thresholds, **more)
        return found.change, found.bounds["growth_interval"].value

    return outcome


OLD = OldCopies(where=Where(phase="loss"), writer="weights are written", weight="w", weights=1, used_at="")
STILL = test_change_rules.STILL
IDLE = replace(
    STILL,
    dtype="float32",
    old_dtype="float32",
    pure_half=False,
    unchanged=100,
    reach=replace(test_change_rules.LANDS, changed_by_one=0.6),
)
MOVED = test_change_rules.MOVED
FLUSHING = replace(test_silent_rules.update(stalled=80), lost=0.8)


OFF = replace(test_silent_rules.HUNGRY, expected=1e-2, error=5e-3)
"""A parameter whose gradient is half another."""
WRONG = Amplified(
    order=3,
    where=Where(phase="forward", op="aten.cos"),
    error=0.3,
    before=2e-3,
    source=Where(phase="forward", op="aten.arange"),
    dtype="bfloat16",
    rounding=2e-3,
)
STILL_GAINS = test_single_updates.STILL
NEARLY = replace(test_silent_rules.HUNGRY, flushed_error=0.9e-8)
"""A parameter that gets a little."""


def brief(at, value):
    return value * (3 if 400 <= at < 408 else 1)


def slight_rise(at, value):
    return value * (1.05 if at >= 700 else 1)


def noisy_rise(at, value):
    return value * (1.15 if at >= 700 else 1)


def flushing(look, _):
    return 0.001 * 1.35 ** max(0, look - 10)


def filling(look, _):
    return 8 - 0.3 * look


def stopped(look, value):
    return 0.0 if look >= 20 else value


CASES = {
    "AMP105.relative_error": (0.1, scanned(tensor(casts=(cast(relative_error=0.01),)))),
    "AMP105.erased": (0.2, scanned(tensor(casts=(cast(relative_error=0.5, flushed=0.3),)))),
    "AMP106.epsilon": (1e-3, scanned(tensor("bn.running_var", role="buffer", negatives=1, lowest=-5e-4))),
    "AMP107.saturated": (0.2, scanned(tensor(dtype="float8_e4m3fn", amax=448.0, at_max=8, examined=64))),
    "AMP110.displaced": (0.1, scanned(tensor(), indices=(index(displaced=100),))),
    "AMP111.steps": (200, scanned(tensor(**BLANK), *MOVING, optimizers=(optimizer(),))),
    "AMP112.elements": (4096, scanned(tensor(**BLANK), tensor("out.weight", **BLANK))),
    "AMP201.departure": (
        0.5,
        lambda thresholds: len(
            departing(Trace(step=3, ops=1, origins=(origin(affected=(), departs=0.3),)), thresholds)
        ),
    ),
    "AMP207.relative_error": (0.3, of_step(lambda c, t: severity(unexplained(c, t)), gradient_error=0.2)),
    "AMP207.wrong": (0.7, of_step(lambda c, t: severity(unexplained(c, t)), gradient_error=0.6)),
    "AMP208.departs": (0.5, lambda thresholds: len(departing_in_forward((WRONG,), thresholds))),
    "AMP208.alone": (0.7, lambda thresholds: len(far_alone(test_silent_rules.held(0, OFF), thresholds))),
    "AMP210.better": (
        10.0,
        of_step(
            lambda c, t: severity(stale_casts_finding(c.step, c.gradient_error, 0.05, OLD, thresholds=t)),
            gradient_error=0.3,
        ),
    ),
    "AMP301.flushed": (0.9, expected(figures(0.5), figures(0.0))),
    "AMP301.error_note": (1.5e-2, seen(replayed(1e-2))),
    "AMP301.error_warning": (5e-2, seen(replayed(3e-2))),
    "AMP301.error_bad": (0.3, seen(replayed(0.2))),
    "AMP301.zeroed_share": (0.3, of_step(underflow, gradient_error=0.5, zeroed_share=0.4)),
    "AMP301.zeroed": (0.01, of_step(underflow, gradient_error=0.5, zeroed=0.05, zeroed_share=0.02)),
    "AMP301.share_warning": (0.6, expected(figures(0.5), figures(0.0))),
    "AMP301.share_bad": (0.9, expected(figures(0.8), figures(0.0))),
    "AMP301.better": (1.2, seen(replayed(0.05), replayed(0.03))),
    "AMP302.headroom": (
        2.0,
        lambda thresholds: advise_precision(facts(forward={"block.2": 20000.0}), thresholds).precision,
    ),
    "AMP303.fp32_share": (0.5, lambda thresholds: severity(no_common_scale(["a"], 0.3, 1024.0, None, thresholds))),
    "AMP304.lost": (0.5, lambda thresholds: len(starved_parameters([test_silent_rules.held(0, NEARLY)], thresholds))),
    "AMP307.near": (
        0.2,
        lambda thresholds: test_shrinking_headroom.judged(outputs(growing()), thresholds=thresholds) is None,
    ),
    "AMP307.ahead": (
        1.0,
        lambda thresholds: test_shrinking_headroom.judged(outputs(growing()), thresholds=thresholds) is None,
    ),
    "AMP402.relative_error": (1e-6, scanned(tensor(), scalers=(ScalerState(scale=0.5, growth_tracker=5),))),
    "AMP402.falls": (9, scanned(tensor(), scalers=(ScalerState(scale=2.0**-8),))),
    "AMP407.ratio": (
        200.0,
        of_step(lambda c, t: severity(misuse(c, t)), gradient_ratio=100.0, events=(test_silent_rules.SCALED_STEP,)),
    ),
    "AMP407.relative_error": (
        0.5,
        of_step(lambda c, t: len(suspected_misuse(c, t)), gradient_error=0.2, events=(test_silent_rules.PLAIN,)),
    ),
    "AMP410.zeros": (0.7, scanned(HALF, moment("exp_avg", dtype="float16", zeros=600))),
    "AMP501.stalled": (0.9, of_step(lambda c, t: stagnation(c, t) is None, updates=(FLUSHING,))),
    "AMP502.update": (1e5, scanned(tensor(), optimizers=(optimizer(starved=[starved()]),))),
    "AMP502.starved": (0.5, scanned(tensor(), optimizers=(optimizer(starved=[starved()]),))),
    "AMP504.update": (0.6, scanned(tensor(), optimizers=(optimizer(steps=((256.0, 2),), dtypes=("bfloat16",)),))),
    "AMP506.share": (
        0.5,
        lambda thresholds: severity_of_frozen(test_single_updates.parameters(STILL_GAINS), [STILL_GAINS], thresholds),
    ),
    "AMP507.ratio": (
        4.0,
        lambda thresholds: len(far_from([test_silent_rules.held(0, test_single_updates.LONG)] * 3, thresholds)[1]),
    ),
    "AMP702.entries": (1000, ended(test_log_ends.VANISHED)),
    "AMP702.reach": (
        1.0,
        lambda thresholds: test_log_ends.explained(SCALED_DOWN, scale=2.0**-7, thresholds=thresholds).cause,
    ),
    "AMP705.entries": (100, ended(test_log_ends.STUCK)),
    "AMP705.loss": (5.0, ended(test_log_ends.STUCK)),
    "AMP710.start": (1000.0, trending([2.0**7, 2.0**9, 2.0**11, 2.0**13])),
    "AMP711.fall": (16.0, trending([1.0] * 3, scales=[2.0**12, 2.0**8, 2.0**4])),
    "AMP712.stalled": (0.99, against(STILL)),
    "AMP712.would_move": (0.99, against(STILL)),
    "AMP712.most": (0.9, against(STILL, replace(MOVED, elements=90))),
    "AMP713.would_move": (0.9, against(IDLE, MOVED)),
    "AMP720.deviations": (50.0, watched(steps(gradient_norm=test_step_rules.jump))),
    "AMP720.beyond": (50.0, watched(steps(gradient_norm=test_step_rules.jump))),
    "AMP720.times": (50.0, watched(steps(gradient_norm=test_step_rules.jump))),
    "AMP721.steps": (4, watched(steps(gradient_norm=test_step_rules.jump, loss=brief))),
    "AMP723.falls": (6, watched(steps(**test_step_rules.scale([100, 200, 300, 400])))),
    "AMP723.in_a_row": (2, watched(steps(**test_step_rules.scale([100, 101])))),
    "AMP723.least": (4096.0, watched(steps(**test_step_rules.scale([100, 101, 102, 103, 104])))),
    "AMP723.at_floor": (3, watched(steps(**test_step_rules.at_floor(14)))),
    "AMP723.skip_rate": (1e-4, recommended(noise(-6.0))),
    "AMP723.horizon": (50_000, recommended(noise(4.0))),
    "AMP724.sum": (4.0, watched(steps(900, loss=slight_rise, gradient_norm=noisy_rise))),
    "AMP724.loss": (0.5, watched(steps(900, loss=slight_rise))),
    "AMP724.norm": (0.5, watched(steps(900, gradient_norm=noisy_rise))),
    "AMP725.harmful": (0.9, watched(details(change=changed("flushed_share", 3, "gradient", flushing)))),
    "AMP725.rise": (1e6, watched(details(change=changed("flushed_share", 3, "gradient", flushing)))),
    "AMP725.horizon": (1, watched(details(22, change=changed("flushed_share", 3, "gradient", flushing)))),
    "AMP726.near": (0.0, watched(details(25, change=changed("log2_headroom", 4, "activation", filling)))),
    "AMP726.horizon": (1, watched(details(25, change=changed("log2_headroom", 4, "activation", filling)))),
    "AMP727.others": (1.0, watched(details(change=changed("update_ratio", 2, "parameter", stopped)))),
    "AMP728.falls": (1000.0, watched(details(change=changed("norm", 0, "gradient", test_tensor_rules.since(0.02))))),
    "AMP728.grows": (1000.0, watched(details(change=changed("norm", 0, "gradient", test_tensor_rules.since(50.0))))),
    "AMP729.factor": (20.0, watched(steps(learning_rates=lambda at, _: (1e-2 if at >= 400 else 1e-3,)))),
    "AMP730.factor": (5.0, watched(steps(seconds=lambda at, value: value * (3 if at >= 400 else 1)))),
    "AMP730.memory": (5.0, watched(steps(memory_bytes=lambda at, _: 10**9 * (2 if at >= 400 else 1)))),
    "AMP733.deviations": (1e5, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(1.1))))),
    "AMP733.change": (5.0, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(1.1))))),
    "AMP733.share": (0.9, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(1.1))))),
    "AMP734.log2_change": (10.0, watched(details(change=test_tensor_rules.eight))),
    "AMP735.steps": (20, watched(steps(batch_fingerprint=test_batch_rules.again(2, steps=12)))),
    "AMP735.new": (1000, watched(steps(batch_fingerprint=test_batch_rules.again(2)))),
    "AMP736.factor": (10.0, watched(steps(batch_rms=test_batch_rules.another_unit))),
    "AMP736.deviations": (1000.0, watched(steps(batch_rms=test_batch_rules.another_unit))),
    "AMP736.zeros": (0.9, watched(steps(batch_zero_share=test_batch_rules.dark))),
    "AMP737.deviations": (1e5, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(0.9))))),
    "AMP737.change": (5.0, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(0.9))))),
    "AMP737.share": (0.9, watched(details(change=changed("norm", 2, "parameter", test_tensor_rules.since(0.9))))),
    "AMP738.lost": (0.99, watched(details(change=test_tensor_rules.rounded_away))),
    "AMP739.share": (0.95, watched(steps(700, loss=test_step_rules.rots))),
    "AMP740.settling": (100, watched(test_skips.none_taken(60))),
    "AMP740.starts": (3, watched(test_skips.scaler_anew(5, 3))),
    "AMP741.loss": (1.2, watched(test_skips.quiet(60, loss=lambda at, v: v * (1.5 if at >= 25 else 1)))),
    "AMP741.norm": (1e3, watched(test_skips.quiet(120, norm=test_skips.climbing))),
}
"""By threshold: another value for it, and something whose outcome it decides."""


def test_every_threshold_has_its_case():
    """Here, or in the test of its rule alone, which is named for the rule."""
    assert list(CASES) == [key for key in all_thresholds() if key in CASES]
    for key, threshold in all_thresholds().items():
        if key not in CASES:
            own = ROOT / "diagnosis" / f"test_{rules()[threshold.code].name.replace('-', '_')}.py"
            assert f'{{"{threshold.code}": {{"{threshold.name}": ' in own.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", CASES)
def test_a_threshold_that_is_moved_turns_the_outcome(key):
    value, outcome = CASES[key]
    threshold = all_thresholds()[key]
    moved = thresholds_from({threshold.code: {threshold.name: value}})
    before, after = outcome(DEFAULT_THRESHOLDS), outcome(moved)
    assert before != after
    if isinstance(before, list):  # the rules of a scan together: no other rule has heard of it
        others = [[said for said in outcomes if said[0] != threshold.code] for outcomes in (before, after)]
        assert others[0] == others[1]


def test_a_threshold_belongs_to_a_rule_and_its_default_lies_in_its_range():
    for key, threshold in all_thresholds().items():
        assert threshold in rules()[threshold.code].thresholds, key
        assert threshold.lowest <= threshold.default <= threshold.highest, key
        assert threshold.lowest < threshold.highest, key
        assert thresholds_from({threshold.code: {threshold.name: threshold.default}}) == DEFAULT_THRESHOLDS, key
        assert threshold.why.endswith("."), key
        assert threshold.unit, key
