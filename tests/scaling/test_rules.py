from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.targets import FRAMEWORKS
from ampdoctor.scaling.scalers import DEFAULTS, ScalerSettings, expressible
from tests.scaling.simulated import library


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(
    st.builds(
        ScalerSettings,
        scale=st.floats(allow_nan=True, allow_infinity=True),
        growth_factor=st.floats(1.0, 8.0),
        backoff_factor=st.floats(0.0, 1.0),
        growth_interval=st.integers(-5, 10**6),
        hysteresis=st.integers(-1, 5),
    )
)
def test_what_can_be_expressed_is_expressed_as_itself(framework, settings):
    once = expressible(settings, framework)
    assert repr(expressible(once, framework)) == repr(once)  # NaN equals NaN here
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
        ("megatron", ScalerSettings(scale=3000.0, growth_interval=500, min_scale=1.0, hysteresis=3)),
    ],
)
def test_each_framework_keeps_what_it_can(framework, expected):
    settings = ScalerSettings(scale=3000.0, growth_factor=4.0, backoff_factor=0.75, growth_interval=500, hysteresis=3)
    assert expressible(settings, framework) == expected


def test_a_start_that_the_framework_can_say():
    for exponent in (1, 10, 39):
        assert expressible(ScalerSettings(scale=2.0**exponent), "deepspeed").scale == 2.0**exponent
        below = ScalerSettings(scale=math.nextafter(2.0**exponent, 0.0))
        assert expressible(below, "deepspeed").scale == 2.0 ** (exponent - 1)
    assert expressible(ScalerSettings(scale=2.0**-3), "deepspeed").scale == 1.0  # its floor
    assert expressible(ScalerSettings(scale=0.5), "megatron").min_scale == 0.5


def test_deepspeeds_defaults_are_its_configurations():
    config = library("deepspeed.runtime.precision_config").DeepSpeedFP16Config(enabled=True)
    arguments = config.dynamic_loss_scale_args()
    assert (arguments["init_scale"], arguments["scale_window"], arguments["min_scale"], arguments["delayed_shift"]) == (
        DEFAULTS["deepspeed"].scale,
        DEFAULTS["deepspeed"].growth_interval,
        DEFAULTS["deepspeed"].min_scale,
        DEFAULTS["deepspeed"].hysteresis,
    )
    assert not arguments["consecutive_hysteresis"]


def test_megatrons_defaults_are_its_configurations():
    config = library("megatron.core.optimizer.optimizer_config").OptimizerConfig()
    assert DEFAULTS["megatron"] == ScalerSettings(
        scale=config.initial_loss_scale,
        growth_interval=config.loss_scale_window,
        min_scale=config.min_loss_scale,
        hysteresis=config.hysteresis,
    )
