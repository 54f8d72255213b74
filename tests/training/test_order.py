"""Several changes of one training: it trains with each, and ends as it was when the last comes off first."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor.errors import UsageError

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
ISLAND = {"kind": "fp32_modules", "value": ["1"]}
EMBEDDED = {"kind": "fp32_modules", "value": ["0"]}  # its inputs are indices, which do not tell a dtype
WIDE, BRAIN = {"kind": "dtype", "value": "float32"}, {"kind": "dtype", "value": "bfloat16"}


def half_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)).half()


def trained(model, optimizer):
    optimizer.zero_grad()
    model(torch.tensor([1, 2])).float().pow(2).mean().backward()
    optimizer.step()


def look(model, optimizer):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    moments = [state["exp_avg"].dtype for state in optimizer.state.values()]
    return [p.dtype for p in model.parameters()], moments, hooks


ROOT, BOTH = {"kind": "fp32_modules", "value": [""]}, {"kind": "fp32_modules", "value": ["1", ""]}
PART = {"kind": "fp32_modules", "value": ["0.0"]}


@pytest.mark.parametrize(
    ("nested", "changes"),
    [
        (False, (BRAIN, WIDE, EMBEDDED)),
        (False, (EMBEDDED, BRAIN, ISLAND)),
        (True, (ROOT, EMBEDDED, PART)),
        (True, (EMBEDDED, ROOT, BRAIN)),
        (True, (PART, BOTH, WIDE)),
    ],
    ids=str,
)
def test_a_half_model_trains_at_every_moment_and_ends_as_it_was(nested, changes):
    """Also with an island in an island."""
    model = half_model()
    if nested:
        model[0] = nn.Sequential(model[0], nn.Linear(4, 4).half())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    trained(model, optimizer)
    before = look(model, optimizer)
    handles = []
    for change in changes:
        handles.append(ampdoctor.apply(model, change, optimizer=optimizer))
        trained(model, optimizer)
    for handle in reversed(handles):
        handle.remove()
        trained(model, optimizer)
    assert look(model, optimizer) == before


@pytest.mark.parametrize(
    ("fp32_module", "copied", "dtype"),
    [(ISLAND, False, BRAIN), (EMBEDDED, True, WIDE)],
    ids=["linear-bfloat16", "embedding-copied-float32"],
)
def test_an_island_whose_handle_is_gone_follows_its_model(fp32_module, copied, dtype):
    model = half_model()
    ampdoctor.apply(model, fp32_module)
    model = copy.deepcopy(model) if copied else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    before = look(model, optimizer)
    with ampdoctor.apply(model, dtype, optimizer=optimizer):
        trained(model, optimizer)
        expected = {"float32": {SINGLE}, "bfloat16": {BF16, SINGLE}}[dtype["value"]]
        assert {p.dtype for p in model.parameters()} == expected
    optimizer.state.clear()
    assert look(model, optimizer) == before
    trained(model, optimizer)


def test_settings_end_as_they_were():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "eps": 1e-6}])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
    with ampdoctor.apply(model, {"kind": "optimizer", "value": {"eps": 1e-3}}, optimizer={"g": optimizer}):
        assert [group["eps"] for group in optimizer.param_groups] == [1e-3, 1e-3]
    changes = [
        {"kind": "init_scale", "value": 32.0},
        {"kind": "scaler", "value": {"init_scale": 8.0, "growth_interval": 5}},
        {"kind": "optimizer", "value": {"eps": 1e-3}},
        {"kind": "optimizer", "value": {"eps": 1e-2, "lr": 1e-5}},
    ]
    handles = [ampdoctor.apply(model, change, optimizer=optimizer, scaler=scaler) for change in changes]
    handles.append(ampdoctor.apply(model, BRAIN, scaler=scaler))
    for handle in reversed(handles):
        handle.remove()
    assert (optimizer.state_dict(), scaler.state_dict()) == before


def test_an_earlier_change_is_not_removed_before_a_later_one():
    model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu", init_scale=64.0)
    first, second = (ampdoctor.apply(model, {"kind": "init_scale", "value": s}, scaler=scaler) for s in (32.0, 8.0))
    other = ampdoctor.apply(model, {"kind": "fp32_modules", "value": [""]}, scaler=scaler)
    with pytest.raises(UsageError, match="a later change of the same model, optimizer or scaler is active"):
        first.remove()
    assert (first.active, scaler.get_scale()) == (True, 8.0)
    second.remove()
    first.remove()
    other.remove()
    assert scaler.get_scale() == 64.0


def test_bf16_after_float32_is_refused():
    model = half_model()
    with ampdoctor.apply(model, WIDE), pytest.raises(UsageError, match="made the whole model float32"):
        ampdoctor.apply(model, BRAIN)
    with ampdoctor.apply(model, BRAIN):
        assert {p.dtype for p in model.parameters()} == {BF16}


def test_the_other_owner_of_a_tied_weight_is_held_as_well():
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).half()
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = ampdoctor.apply(model, WIDE)
    second = ampdoctor.apply(model, {"kind": "fp32_modules", "value": ["2"]})
    for handle in (second, first):
        handle.remove()
        trained(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {HALF}


def test_moments_with_a_dtype_of_their_own_keep_it():
    model = half_model()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    trained(model, optimizer)
    state = optimizer.state[model[1].weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].float()
    first, second = (ampdoctor.apply(model, ISLAND, optimizer=optimizer) for _ in range(2))
    second.remove()
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (SINGLE, SINGLE)
    first.remove()
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (HALF, SINGLE)


def test_nothing_is_kept_alive():
    model = half_model()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    trained(model, optimizer)
    for change in (ISLAND, {"kind": "init_scale", "value": 2.0}, {"kind": "optimizer", "value": {"eps": 1e-3}}):
        ampdoctor.apply(model, change, optimizer=optimizer, scaler=scaler)
    alive = [weakref.ref(thing) for thing in (model, model[1].weight, optimizer, scaler)]
    del model, optimizer, scaler
    gc.collect()
    assert [thing() for thing in alive] == [None] * 4


def test_a_format_of_another_model_owns_the_scaler_that_it_switches_off():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    first = ampdoctor.apply(nn.Linear(2, 2), {"kind": "init_scale", "value": 8.0}, scaler=scaler)
    second = ampdoctor.apply(nn.Linear(2, 2), BRAIN, scaler=scaler)
    with pytest.raises(UsageError, match="a later change of the same model, optimizer or scaler is active"):
        first.remove()
    second.remove()
    first.remove()
    assert scaler.get_scale() == 64.0
