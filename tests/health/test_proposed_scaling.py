from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ampdoctor.evidence.report_health import Curve, HealthAxis, HealthRun, HeatMap, ScalerHistory
from ampdoctor.evidence.report_scaler import ScalePath
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.health.proposed_scaling import largest_gradients, with_proposed_scaling
from ampdoctor.scaling import ScalerSettings, simulate
from ampdoctor.scaling.scalers import simulate_lanes
from ampdoctor.scaling.search import drawn

SHORT = ScalerSettings(growth_interval=20)
"""Grows so often that it overflows every few dozen steps."""


def trace(steps, *, centre=-6.0, spread=0.3, seed=0):
    """The largest unscaled gradient of each step."""
    return np.exp2(centre + spread * np.random.default_rng(seed).standard_normal(steps))


def watched(maxima, settings, *, width=1, every=1, first_step=0):
    """A run as its log has it after `settings` scaled these gradients by torch's rules."""
    run = simulate_lanes([settings], maxima[None, :], "torch")
    scale, skipped = run.scale[0, 0], run.skipped[0, 0]
    with np.errstate(divide="ignore"):
        headroom = math.log2(65504.0) - np.log2(maxima) - np.log2(scale)
    seen = (np.arange(len(maxima)) % every == 0) & ~skipped
    spans = [np.arange(begin, min(begin + width, len(maxima))) for begin in range(0, len(maxima), width)]

    def column(kind):
        known = [headroom[span][seen[span]] for span in spans]
        return tuple(float(kind(values)) if len(values) else None for values in known)

    path = drawn(run)
    return HealthRun(
        name="run", source="run", format="ampdoctor", steps=len(maxima), skipped=int(skipped.sum()),
        first_step=first_step, last_step=first_step + len(maxima) - 1,
        axis=HealthAxis(
            first=tuple(first_step + int(span[0]) for span in spans),
            last=tuple(first_step + int(span[-1]) for span in spans),
            skipped=tuple(int(skipped[span].sum()) for span in spans),
        ),
        curves=(Curve(name="headroom_binades", low=column(np.min), middle=column(np.median), high=column(np.max)),),
        scalers=(
            ScalerHistory(
                path=ScalePath(
                    points=tuple((step + first_step, value) for step, value in path.points), changes=path.changes,
                    skips=tuple(step + first_step for step in path.skips), skipped=path.skipped, replica=0,
                ),
                growths=0, backoffs=0,
            ),
        ),
    )  # fmt: skip


def flushing(run, share):
    one = HeatMap(name="flushed_share", role="gradient", steps=(0, 5), tensors=("a",), of=1, values=((share, share),))
    return replace(run, maps=(one,))


def settings_of(arguments):
    return ScalerSettings(
        scale=arguments.init_scale,
        growth_factor=arguments.growth_factor,
        backoff_factor=arguments.backoff_factor,
        growth_interval=arguments.growth_interval,
    )


@pytest.mark.parametrize("first_step", [0, 700])
def test_the_proposed_settings_do_what_the_scaler_would_do_with_the_true_gradients(first_step):
    maxima = trace(3000)
    run = watched(maxima, SHORT, first_step=first_step)
    (scaler,) = with_proposed_scaling(run, Thresholds()).scalers
    truth = simulate(settings_of(scaler.recommended), maxima.tolist())
    assert scaler.path == run.scalers[0].path
    assert scaler.would_be.skips == tuple(first_step + n for n, step in enumerate(truth) if step.skipped)
    changes = [n for n, step in enumerate(truth) if n == 0 or step.scale != truth[n - 1].scale]
    assert scaler.would_be.points == tuple((n + first_step, truth[n].scale) for n in changes)
    assert scaler.would_be.skipped < run.skipped / 5


@pytest.mark.parametrize(("width", "every"), [(25, 1), (25, 10), (1, 10), (400, 20)])
def test_condensed_and_sampled_logs_give_nearly_the_same(width, every):
    maxima = trace(20_000, seed=3)
    (scaler,) = with_proposed_scaling(watched(maxima, SHORT, width=width, every=every), Thresholds()).scalers
    truth = simulate(settings_of(scaler.recommended), maxima.tolist())
    skips = sum(step.skipped for step in truth)
    assert abs(scaler.would_be.skipped - skips) <= 0.002 * len(maxima)


def test_skips_of_which_only_a_choice_is_kept_lie_in_the_spans_that_count_them():
    run = watched(trace(20_000, seed=3), SHORT, width=25)
    scaler = run.scalers[0]
    thinned = replace(run, scalers=(replace(scaler, path=replace(scaler.path, skips=scaler.path.skips[::5])),))
    assert largest_gradients(thinned).skipped == run.skipped
    (found,) = with_proposed_scaling(thinned, Thresholds()).scalers
    (known,) = with_proposed_scaling(run, Thresholds()).scalers
    assert abs(math.log2(found.recommended.init_scale / known.recommended.init_scale)) <= 2
    assert found.would_be.skipped < run.skipped / 5


def test_a_scaler_that_serves_its_run_is_left_alone():
    run = watched(trace(3000), ScalerSettings(scale=2.0**20))
    assert run.skipped <= 3
    assert with_proposed_scaling(run, Thresholds()) == run


def test_a_higher_scale_is_proposed_only_where_gradients_are_flushed():
    low = watched(trace(2500, centre=-14.0), ScalerSettings(scale=2.0**8))
    assert with_proposed_scaling(low, Thresholds()) == low
    assert with_proposed_scaling(flushing(low, 1e-4), Thresholds()) == flushing(low, 1e-4)
    (scaler,) = with_proposed_scaling(flushing(low, 0.3), Thresholds()).scalers
    assert scaler.recommended.init_scale >= 2.0**20


def test_every_step_is_bounded_by_what_became_of_it():
    maxima = trace(600, spread=2.0)
    run = watched(maxima, SHORT, every=7)
    assert run.skipped > 10
    found = largest_gradients(run)
    skipped = np.zeros(600, bool)
    skipped[list(run.scalers[0].path.skips)] = True
    overflows = np.exp2(found.log2_amax) * found.scale >= 65520.0
    assert overflows.tolist() == skipped.tolist()
    seen = (np.arange(600) % 7 == 0) & ~skipped
    assert found.log2_amax[seen] == pytest.approx(np.log2(maxima[seen]), abs=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"scalers": ()},
        {"curves": ()},
        {"steps": 0, "axis": HealthAxis(first=(), last=())},
        {"curves": (Curve(name="headroom_binades", low=(None,) * 3000, middle=(None,) * 3000, high=(None,) * 3000),)},
    ],
    ids=["no scaler", "no headroom", "no step", "no known headroom"],
)
def test_nothing_is_proposed_where_the_log_does_not_say_enough(change):
    run = replace(watched(trace(3000), SHORT), **change)
    assert with_proposed_scaling(run, Thresholds()) == run


def test_nothing_is_proposed_for_several_scalers_or_from_a_few_steps():
    run = watched(trace(3000), SHORT)
    several = replace(run, scalers=run.scalers * 2)
    assert with_proposed_scaling(several, Thresholds()) == several
    few = watched(trace(40), SHORT)
    assert with_proposed_scaling(few, Thresholds()) == few
