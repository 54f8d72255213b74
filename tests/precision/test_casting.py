from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.precision.casting import cast_model

HALF, SINGLE = torch.float16, torch.float32


def bits(model):
    return {
        name: tensor.clone().view(torch.int16) for name, tensor in model.state_dict().items() if tensor.dtype is HALF
    }


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).half()


def test_up_and_back_exactly():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
        model[0].weight.view(torch.int16)[0, 1] = 0x7C01  # a signalling NaN: no cast keeps its bits
        model[0].weight[0, 2] = 2**-24
    before = bits(model)
    identity = [(id(p), p.data_ptr()) for p in model.parameters()]
    with cast_model(model, SINGLE) as swap:
        assert {p.dtype for p in [*model.parameters(), *model[1].buffers()]} == {SINGLE, torch.long}
        assert len(swap) == 8
        model(torch.rand(3, 4))
    after = bits(model)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == identity
    assert all(torch.equal(before[name], after[name]) for name in before if "running" not in name)
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])


def test_a_step_in_between_is_rounded_back():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with cast_model(model, SINGLE):
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
        wide = model[2].bias.detach().clone()
        assert model[2].bias.grad.dtype is SINGLE
    assert model[2].bias.grad.dtype is HALF
    assert torch.equal(model[2].bias, wide.half())


def test_a_graph_built_before_does_not_hold_the_old_dtype():
    model = net()
    model(torch.rand(3, 4).half()).sum().backward()
    held = model[0].weight.view(-1)  # keeps the gradient accumulator alive
    with cast_model(model, SINGLE):
        assert model[0].weight.grad.dtype is SINGLE
        model(torch.rand(3, 4)).sum().backward()
        assert model[0].weight.grad.dtype is SINGLE
    model(torch.rand(3, 4).half()).sum().backward()
    assert model[0].weight.grad.dtype is HALF
    assert held.dtype is HALF


def test_optimizer_state_goes_along():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model(torch.rand(3, 4).half()).sum().backward()
    optimizer.step()
    parameter = model[0].weight
    moment = optimizer.state[parameter]["exp_avg"].clone()
    assert moment.dtype is HALF
    with cast_model(model, SINGLE, [optimizer]):
        assert optimizer.state[parameter]["exp_avg"].dtype is SINGLE
        model(torch.rand(3, 4)).sum().backward()
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype is HALF
    assert not torch.equal(optimizer.state[parameter]["exp_avg"], moment)
    optimizer.step()


def test_pure_half_and_back_after_an_exception():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    model.register_buffer("ids", torch.arange(3))
    with pytest.raises(ZeroDivisionError), cast_model(model, HALF):  # noqa: PT012
        assert model(torch.rand(2, 3).half()).dtype is HALF
        assert model.ids.dtype is torch.long
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, before)


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).half()
    model.b.weight = model.a.weight
    with cast_model(model, SINGLE):
        assert model.b.weight is model.a.weight
        assert model.b.weight.dtype is SINGLE
    assert model.b.weight is model.a.weight


def test_the_fp32_reference_leaves_fp64():
    model = nn.Linear(2, 2).double()
    with cast_model(model, SINGLE) as swap:
        assert len(swap) == 0
        assert model.weight.dtype is torch.float64
