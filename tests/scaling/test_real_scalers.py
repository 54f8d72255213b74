"""The simulators beside the real scalers of other frameworks, over random traces (make scalers installs them)."""

from __future__ import annotations

import math
import types

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ampdoctor.scaling.scalers import ScalerSettings
from tests.scaling.simulated import library, simulate

traces = st.lists(
    st.one_of(
        st.just(0.0),
        st.integers(-20, 30).map(lambda e: 2.0**e),
        st.floats(1e-12, 1e12),
        st.sampled_from([math.inf, math.nan, 1.0, 65520.0 / 65536.0, 65519.0 / 65536.0]),
    ),
    max_size=80,
)
runs = st.lists(st.tuples(st.sampled_from([2.0**-4, 2.0, 2.0**9, math.inf]), st.integers(1, 12)), max_size=8).map(
    lambda pairs: [value for value, length in pairs for _ in range(length)]
)
powers = st.integers(-6, 34).map(lambda e: 2.0**e)


def overflows(largest, scale):
    """Whether the magnitude times the scale, as fp32 multiplies it, fits fp16."""
    factor = torch.tensor(scale, dtype=torch.float64).float().double()
    return not bool(torch.isfinite((largest * factor).half()))


def real_run(scale_of, update, trace):
    """(scale, skipped) of each step, up to the one at which the real scaler raises."""
    steps = []
    for largest in trace:
        scale = float(scale_of())
        found = overflows(largest, scale)
        steps.append((scale, found))
        try:
            update(found)
        except Exception:  # noqa: BLE001 - DeepSpeed raises that itself
            break
    return steps


def simulated(start, trace, framework):
    return [(step.scale, step.skipped) for step in simulate(start, trace, framework)]


@pytest.fixture(scope="module")
def deepspeed_scalers():
    module = library("deepspeed.runtime.fp16.loss_scaler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", types.SimpleNamespace(get_rank=lambda: 0))  # one process, no process group
        patch.setattr(module.logger, "disabled", True)
        yield module


@given(
    start=st.builds(
        ScalerSettings,
        scale=powers,
        growth_interval=st.sampled_from([1, 2, 3, 7, 1000]),
        min_scale=st.sampled_from([1, 8, 0.25]),
        hysteresis=st.integers(1, 4),
    ),
    trace=st.one_of(traces, runs),
)
@example(start=ScalerSettings(scale=4.0, min_scale=1, hysteresis=2), trace=[math.inf] * 9)
@example(
    start=ScalerSettings(scale=2.0, min_scale=1, hysteresis=2, growth_interval=3), trace=[math.inf, *[2.0**-9] * 12] * 4
)
@hypothesis_settings(max_examples=300)
def test_it_does_what_deepspeeds_scaler_does(start, trace, deepspeed_scalers):
    real = deepspeed_scalers.CreateLossScaler(
        torch.half,
        static_loss_scale=0,
        dynamic_scaling=True,
        dynamic_loss_args={
            "init_scale": start.scale,
            "scale_window": start.growth_interval,
            "min_scale": start.min_scale,
            "delayed_shift": start.hysteresis,
            "consecutive_hysteresis": False,
        },
    )
    assert simulated(start, trace, "deepspeed") == real_run(lambda: real.loss_scale, real.update_scale, trace)


@pytest.fixture(scope="module")
def megatron_scaler():
    module = library("megatron.core.optimizer.grad_scaler")

    def on_the_cpu(values, dtype, device):
        assert device == "cuda"
        return torch.tensor(values, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "torch", types.SimpleNamespace(tensor=on_the_cpu, float=torch.float, max=torch.max)
        )  # it makes its three numbers on a GPU
        yield module.DynamicGradScaler


@given(
    start=st.builds(
        ScalerSettings,
        scale=st.one_of(powers, st.sampled_from([2.0**126, 1000.3])),
        growth_interval=st.sampled_from([1, 2, 3, 7, 1000]),
        min_scale=st.sampled_from([2.0**-8, 2.0**-7, 0.01]),
        hysteresis=st.integers(1, 4),
    ),
    trace=st.one_of(traces, runs),
)
@example(start=ScalerSettings(scale=2.0**126, growth_interval=1, min_scale=1.0), trace=[0.0] * 4)
@example(start=ScalerSettings(scale=2.0**-6, min_scale=0.01, hysteresis=1), trace=[math.inf] * 3)
@hypothesis_settings(max_examples=300)
def test_it_does_what_megatrons_scaler_does(start, trace, megatron_scaler):
    real = megatron_scaler(start.scale, start.min_scale, 2.0, 0.5, start.growth_interval, start.hysteresis)
    assert simulated(start, trace, "megatron") == real_run(lambda: real.scale, real.update, trace)
