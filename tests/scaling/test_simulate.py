from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampdoctor.scaling.closed_forms import equilibrium_skip_rate
from ampdoctor.scaling.scalers import ScalerSettings, simulate_lanes
from tests.scaling.simulated import Step, simulate, skip_rate

traces = st.lists(
    st.one_of(
        st.none(),
        st.just(0.0),
        st.integers(-40, 40).map(lambda e: 2.0**e),
        st.floats(1e-30, 1e30),
        st.sampled_from([math.inf, 1.0, 65520.0 / 65536.0, 65519.0 / 65536.0]),
    ),
    max_size=60,
)
scalers = st.builds(
    ScalerSettings,
    scale=st.one_of(st.integers(-140, 127).map(lambda e: 2.0**e), st.sampled_from([0.0, 1000.0, 3e38, math.inf, -4.0])),
    growth_factor=st.sampled_from([2.0, 4.0, 1.0001, 1.5]),
    backoff_factor=st.sampled_from([0.5, 0.25, 0.75, 0.0]),
    growth_interval=st.sampled_from([0, 1, 2, 3, 7, 2000]),
    growth_tracker=st.integers(0, 8),
)


def run_the_real_one(start, trace):
    """torch's scaler, given gradients that went through fp16 at its scale."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", **{**start.arguments(), "growth_factor": max(start.growth_factor, 1.0001)})
    scaler.load_state_dict(
        {
            "scale": start.scale,
            "growth_factor": start.growth_factor,
            "backoff_factor": start.backoff_factor,
            "growth_interval": start.growth_interval,
            "_growth_tracker": start.growth_tracker,
        }
    )
    steps = []
    for largest in trace:
        with torch.no_grad():
            parameter.zero_()
        scaler.scale(torch.ones(()))  # the scale becomes a tensor at the first call
        scale = scaler.get_scale()
        scaled = torch.tensor([(largest or 0.0)], dtype=torch.float64) * scale
        parameter.grad = scaled.to(torch.float16).float()
        stepped = []
        handle = optimizer.register_step_post_hook(lambda *_, s=stepped: s.append(1))
        scaler.step(optimizer)
        handle.remove()
        scaler.update()
        steps.append((scale, not stepped, bool(stepped) and not bool(torch.isfinite(parameter).all())))
    return steps, scaler.get_scale()


@given(scalers, traces)
@example(ScalerSettings(scale=65536.0), [math.inf] * 60 + [1.0])
@example(ScalerSettings(scale=2.0**-127), [math.inf, 1.0, 1.0])
@example(ScalerSettings(scale=2.0**127, growth_interval=1), [0.0, 1e-38, 1e-38])
@example(ScalerSettings(growth_interval=3, growth_tracker=5), [1e-3] * 8)
@settings(max_examples=150)
def test_it_does_what_torchs_scaler_does(start, trace):
    real, _ = run_the_real_one(start, trace)
    simulated = simulate(start, trace)
    assert repr([(s.scale, s.skipped, s.inf_in_weights) for s in simulated]) == repr(real)  # NaN equals NaN here


@pytest.mark.parametrize(
    ("framework", "scales"),
    [
        # growth, after interval steps, refills the hysteresis; the floor holds
        ("megatron", [4.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0, 2.0]),
        # growth comes a step later; an overflow at the floor raises, and the last step is not run
        ("deepspeed", [4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0, 2.0]),
    ],
)
def test_floor_and_hysteresis_of_other_frameworks(framework, scales):
    start = ScalerSettings(scale=4.0, growth_interval=2, min_scale=2.0, hysteresis=2)
    calm = [0.0] * (2 if framework == "megatron" else 3)
    steps = simulate(start, [math.inf, *calm, *[math.inf] * 5], framework)
    assert [step.scale for step in steps] == scales


def test_it_skips_as_often_as_the_closed_form_says():
    start = ScalerSettings(scale=2.0**10, growth_interval=50)
    generator = torch.Generator().manual_seed(1)
    trace = torch.exp2(torch.randn(20_000, generator=generator, dtype=torch.float64)).tolist()
    assert skip_rate(simulate(start, trace)) == pytest.approx(equilibrium_skip_rate(2.0, 0.5, 50), rel=0.25)


@pytest.mark.parametrize("framework", ["torch", "deepspeed", "megatron"])
def test_lanes_side_by_side_do_what_each_does_alone(framework):
    generator = np.random.default_rng(3)
    maxima = np.exp2(generator.normal(-2.0, 3.0, (3, 300)))
    maxima[generator.random(maxima.shape) < 0.02] = np.inf
    lanes = [
        ScalerSettings(growth_interval=interval, hysteresis=hysteresis, min_scale=floor)
        for interval in (3, 20)
        for hysteresis in (1, 2)
        for floor in (1.0, 2.0**12)
    ]
    together = simulate_lanes(lanes, maxima, framework)
    for i, j in itertools.product(range(len(lanes)), range(len(maxima))):
        alone = simulate(lanes[i], maxima[j], framework)
        run = [
            Step(*step)
            for step in zip(together.scale[i, j], together.skipped[i, j], together.inf_in_weights[i, j], strict=True)
        ]
        assert tuple(run[: len(alone)]) == alone
        assert together.ended[i, j].tolist() == [k >= len(alone) for k in range(300)]
