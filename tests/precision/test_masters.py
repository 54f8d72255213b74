from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.precision.casting import master_weights

HALF, SINGLE = torch.float16, torch.float32


def test_a_small_update_is_not_lost():
    model = nn.Linear(1, 1, bias=False, dtype=HALF)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-13)
    with master_weights([optimizer]):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=HALF)).sum().backward()
            optimizer.step()
        assert model.weight.item() == pytest.approx(1 - 2**-10, abs=2**-11)
        assert model.weight.item() != 1.0
    stepped = nn.Linear(1, 1, bias=False, dtype=HALF)
    nn.init.ones_(stepped.weight)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=2**-13)
    for _ in range(8):
        optimizer.zero_grad()
        stepped(torch.ones(1, 1, dtype=HALF)).sum().backward()
        optimizer.step()
    assert stepped.weight.item() == 1.0


def test_with_a_scaler_clipping_and_accumulation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    x = torch.rand(3, 4, dtype=HALF)
    with master_weights([optimizer]) as masters:
        for _ in range(2):
            scaler.scale(model(x).float().mean()).backward()
        master = masters.pairs[0][1]
        assert master.grad.dtype is SINGLE
        assert model[0].weight.grad is None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([m for _, m in masters.pairs], 1e-3)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[0].weight, master.to(HALF))
        assert optimizer.state[master]["exp_avg"].dtype is SINGLE
        optimizer.zero_grad()
        assert master.grad is None
        model(x).mean().backward()
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is HALF
    assert model[0].weight.grad.dtype is HALF
    optimizer.step()


def test_an_infinite_gradient_skips_the_step():
    model = nn.Linear(2, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    before = model.weight.detach().clone()
    with master_weights([optimizer]):
        scaler.scale(model(torch.full((1, 2), 1e4, dtype=HALF)).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_state_from_before_is_continued_and_fp32_parameters_are_left():
    model = nn.ModuleDict({"narrow": nn.Linear(2, 2).half(), "wide": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model["narrow"](torch.rand(1, 2).half()).sum().backward()
    model["wide"](torch.rand(1, 2)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model["narrow"].weight]["exp_avg"].clone()
    with master_weights([optimizer]) as masters:
        assert len(masters.pairs) == 2
        assert torch.equal(optimizer.state[masters.pairs[0][1]]["exp_avg"], moment.float())
        assert masters.pairs[0][1].grad is not None
        optimizer.step()
        with torch.no_grad():
            model["narrow"].weight.fill_(0.5)
        masters.reload()
        assert masters.pairs[0][1].unique().tolist() == [0.5]
    assert model["wide"].weight in set(optimizer.param_groups[0]["params"])


def test_a_weight_shared_by_two_optimizers_has_one_master():
    model = nn.Linear(2, 2).half()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with master_weights([first, second]) as masters:
        assert len(masters.pairs) == 2
        assert first.param_groups[0]["params"][0] is second.param_groups[0]["params"][0]
