from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ampdoctor.evidence.targets import FRAMEWORKS
from ampdoctor.scaling.scalers import DEFAULTS, RULES, ScalerSettings, expressible

asked = st.builds(
    ScalerSettings,
    scale=st.floats(allow_nan=True, allow_infinity=True),
    growth_factor=st.floats(1.0, 8.0),
    backoff_factor=st.floats(0.0, 1.0),
    growth_interval=st.one_of(st.integers(-5, 10**6), st.floats()),
    min_scale=st.one_of(st.none(), st.floats()),
    hysteresis=st.integers(-1, 5),
)


def test_every_framework_has_rules_and_defaults():
    assert set(RULES) == set(DEFAULTS) == set(FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(settings=asked)
@example(settings=ScalerSettings(min_scale=1.7e308))
def test_what_can_be_expressed_is_expressed_as_itself(framework, settings):
    once = expressible(settings, framework)
    assert repr(expressible(once, framework)) == repr(once)  # NaN equals NaN here


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_defaults_can_be_expressed(framework):
    assert expressible(DEFAULTS[framework], framework) == DEFAULTS[framework]


def test_torchs_defaults_are_the_real_ones():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert ScalerSettings.of_state(scaler.state_dict()) == DEFAULTS["torch"]


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("torch", ScalerSettings(scale=3000.0, growth_factor=4.0, backoff_factor=0.75, growth_interval=500)),
        ("deepspeed", ScalerSettings(scale=2048.0, growth_interval=500, min_scale=1.0, hysteresis=3)),
        ("megatron", ScalerSettings(scale=3000.0, growth_interval=500, min_scale=1.5, hysteresis=3)),
    ],
)
def test_each_framework_keeps_what_it_can(framework, expected):
    settings = ScalerSettings(
        scale=3000.0, growth_factor=4.0, backoff_factor=0.75, growth_interval=500, min_scale=1.5, hysteresis=3
    )
    assert expressible(settings, framework) == expected


def test_deepspeeds_power_is_the_one_at_or_below():
    for exponent in range(1, 40):
        assert expressible(ScalerSettings(scale=2.0**exponent), "deepspeed").scale == 2.0**exponent
        assert expressible(ScalerSettings(scale=math.nextafter(2.0**exponent, 0.0)), "deepspeed").scale == 2.0 ** (
            exponent - 1
        )


def test_deepspeed_does_not_start_below_its_floor():
    assert expressible(ScalerSettings(scale=2.0**-3), "deepspeed").scale == 1.0
    assert expressible(ScalerSettings(scale=4.0, min_scale=9.5), "deepspeed") == ScalerSettings(
        scale=16.0, min_scale=9.0
    )


def test_deepspeeds_defaults_are_its_configurations(real):
    config = real("deepspeed.runtime.precision_config").DeepSpeedFP16Config(enabled=True)
    arguments = config.dynamic_loss_scale_args()
    assert (arguments["init_scale"], arguments["scale_window"], arguments["min_scale"], arguments["delayed_shift"]) == (
        DEFAULTS["deepspeed"].scale,
        DEFAULTS["deepspeed"].growth_interval,
        DEFAULTS["deepspeed"].min_scale,
        DEFAULTS["deepspeed"].hysteresis,
    )
    assert not arguments["consecutive_hysteresis"]


def test_megatrons_defaults_are_its_configurations(real):
    config = real("megatron.core.optimizer.optimizer_config").OptimizerConfig()
    assert DEFAULTS["megatron"] == ScalerSettings(
        scale=config.initial_loss_scale,
        growth_interval=config.loss_scale_window,
        min_scale=config.min_loss_scale,
        hysteresis=config.hysteresis,
    )
