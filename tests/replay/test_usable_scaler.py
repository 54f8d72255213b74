"""Settings that torch refuses at their first use are replaced in place; all others stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ampdoctor.replay.parts import make_usable


def steps(scaler):
    """One step with a scaler, as a user's loop makes it."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("arguments", "used"),
    [
        ({"growth_interval": 2.5}, 2000),
        ({"growth_interval": 300.0}, 300),
        ({"growth_interval": float("nan")}, 2000),
        ({"growth_interval": 1e300}, 2000),
        ({"growth_interval": 2**80}, 2000),
        ({"growth_interval": "2000"}, 2000),
        ({"growth_interval": None}, 2000),
        ({"growth_interval": True}, 2000),
        ({"init_scale": None}, 65536.0),
        ({"init_scale": "1024"}, 65536.0),
        ({"init_scale": 1e39}, 65536.0),
        ({"init_scale": [1.0]}, 65536.0),
    ],
)
def test_what_torch_refuses_is_replaced_and_told(arguments, used):
    with pytest.raises((TypeError, RuntimeError, OverflowError, ValueError)):
        steps(torch.amp.GradScaler("cpu", **arguments))
    scaler = torch.amp.GradScaler("cpu", **arguments)
    (refused,) = make_usable(scaler)
    assert (refused.name, refused.given, refused.used) == (*arguments, repr(*arguments.values()), used)
    steps(scaler)
    assert scaler.state_dict()["scale" if refused.name == "init_scale" else refused.name] == used
    assert make_usable(scaler) == ()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"init_scale": -1},
        {"init_scale": float("inf")},
        {"init_scale": True},
        {"init_scale": torch.tensor(64.0)},
        {"growth_interval": 0},
        {"growth_interval": 2**40},
        {"growth_interval": np.int64(7)},
        {"backoff_factor": False},
        {"backoff_factor": float("nan")},
        {"growth_factor": float("inf")},
    ],
)
def test_what_torch_takes_is_kept(arguments):
    try:
        steps(torch.amp.GradScaler("cpu", **arguments))
    except AssertionError as error:  # up to torch 2.10 its constructor asks more
        pytest.skip(f"no scaler is built: {error}")
    scaler = torch.amp.GradScaler("cpu", **arguments)
    assert make_usable(scaler) == ()
    for name, value in arguments.items():
        assert getattr(scaler, f"_{name}") == pytest.approx(float(value), nan_ok=True)
    steps(scaler)


def test_a_disabled_scaler_and_one_of_another_kind_are_left_alone():
    assert make_usable(torch.amp.GradScaler("cpu", growth_interval=2.5, enabled=False)) == ()
    assert make_usable(object()) == ()


def test_a_scale_in_use_stays():
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    steps(scaler)
    scaler._growth_interval = 2.5
    assert [refused.name for refused in make_usable(scaler)] == ["growth_interval"]
    assert scaler.get_scale() == 512.0


def test_the_default_dtype_is_not_asked():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    try:
        assert make_usable(torch.amp.GradScaler("cpu")) == ()
    finally:
        torch.set_default_dtype(before)
