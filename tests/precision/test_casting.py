"""Casting: tensors in nested values, models that change their dtype for a while, fp32 master weights."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from ampdoctor.precision.casting import cast_model, cast_up, map_tensors, master_weights

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
    with cast_model(model, SINGLE):
        assert {p.dtype for p in [*model.parameters(), *model[1].buffers()]} == {SINGLE, torch.long}
        model(torch.rand(3, 4))
    after = bits(model)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == identity
    assert all(torch.equal(before[name], after[name]) for name in before if "running" not in name)
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])


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


def test_pure_half_and_back_after_an_exception():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    model.register_buffer("ids", torch.arange(3))
    with pytest.raises(ZeroDivisionError), cast_model(model, HALF):  # noqa: PT012
        assert model(torch.rand(2, 3).half()).dtype is HALF
        assert model.ids.dtype is torch.long
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, before)


def test_the_fp32_reference_leaves_fp64():
    model = nn.Linear(2, 2).double()
    with cast_model(model, SINGLE):
        assert model.weight.dtype is torch.float64


# -- nested values --

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - as users write them
H = torch.ones(2, dtype=torch.float16)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


class Encoding(UserDict):
    pass


def test_every_container_keeps_its_type():
    values = [[H], (H, 1), Pair(H, "x"), {"a": H}, OrderedDict(a=H), defaultdict(list, a=H), Batch(H, "b")]
    values += [Encoding({"a": H}), BaseModelOutput(last_hidden_state=H), {"a": [{"b": (H,)}]}]
    for value in values:
        found = []
        up = cast_up(value)
        assert type(up) is type(value)
        map_tensors(up, lambda tensor, found=found: found.append(tensor.dtype) or tensor)
        assert found == [torch.float32]
        found.clear()
        map_tensors(value, lambda tensor, found=found: found.append(tensor.dtype) or tensor)
        assert found == [torch.float16]  # the original is untouched
    assert cast_up(defaultdict(list, a=H))["new"] == []
    assert cast_up(BaseModelOutput(last_hidden_state=H)).last_hidden_state.dtype is torch.float32


def test_what_needs_no_change_is_returned_itself():
    cache = object()
    value = {"x": torch.ones(2), "cache": cache, "text": "half", "n": 3, "size": torch.Size([2])}
    assert cast_up(value) is value
    assert cast_up([value, None]) is not None


# -- master weights --


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


def test_with_a_scaler_clipping_and_accumulation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    x = torch.rand(3, 4, dtype=HALF)
    with master_weights([optimizer]) as kept:
        for _ in range(2):
            scaler.scale(model(x).float().mean()).backward()
        master = kept.pairs[0][1]
        assert master.grad.dtype is SINGLE
        assert model[0].weight.grad is None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([m for _, m in kept.pairs], 1e-3)
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


def test_state_from_before_is_continued_and_fp32_parameters_are_left():
    model = nn.ModuleDict({"narrow": nn.Linear(2, 2).half(), "wide": nn.Linear(2, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    model["narrow"](torch.rand(1, 2).half()).sum().backward()
    model["wide"](torch.rand(1, 2)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model["narrow"].weight]["exp_avg"].clone()
    with master_weights([optimizer]) as kept:
        assert len(kept.pairs) == 2
        assert torch.equal(optimizer.state[kept.pairs[0][1]]["exp_avg"], moment.float())
        assert kept.pairs[0][1].grad is not None
        optimizer.step()
        with torch.no_grad():
            model["narrow"].weight.fill_(0.5)
        kept.reload()
        assert kept.pairs[0][1].unique().tolist() == [0.5]
    assert model["wide"].weight in set(optimizer.param_groups[0]["params"])


def test_a_weight_shared_by_two_optimizers_has_one_master():
    model = nn.Linear(2, 2).half()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with master_weights([first, second]) as kept:
        assert len(kept.pairs) == 2
        assert first.param_groups[0]["params"][0] is second.param_groups[0]["params"][0]
