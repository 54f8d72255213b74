"""fp32 islands: under autocast of both policies, in pure half models, with tied weights and recomputation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampdoctor.errors import UsageError
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fp32_modules import Fp32Module, force_fp32

HALF, SINGLE = torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        if gain != 1.0:
            nn.init.constant_(self.down.weight, gain)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) + 1.0)


class Net(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block(gain), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x, *, recompute=None):
        for block in self.blocks:
            y = block(x) if recompute is None else checkpoint(block, x, use_reentrant=recompute)
            x = self.norm(y)
        return x


def record(model, name):
    seen = []
    model.get_submodule(name).register_forward_hook(lambda _m, args, out: seen.append((args[0].dtype, out.dtype)))
    return seen


def hooks(model):
    return [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for name, m in model.named_modules()
    ]


@pytest.mark.parametrize("policy", ["cuda", "native"])
def test_under_autocast_the_output_stays_fp32(policy):
    model = Net(gain=3e4)
    x = torch.rand(2, 4, requires_grad=True)
    with autocast_policy(policy), torch.autocast("cpu", HALF):
        seen = record(model, "blocks.0.down")
        assert not model.blocks[0](x).isfinite().all()
        with force_fp32(model, ["blocks.0.down"]) as in_fp32:
            y = model.blocks[0](x)
            assert y.isfinite().all()
            assert y.amax() > 65504
            (y.sum() * 1e-3).backward()
            assert torch.is_autocast_enabled("cpu")
    assert seen[-1][1] is SINGLE
    assert in_fp32.calls == {"blocks.0.down": 1}
    assert in_fp32.beyond == {}
    assert x.grad.isfinite().all()
    assert model.blocks[0].down.weight.grad.dtype is SINGLE


def test_a_pure_half_model():
    model = Net().half()
    x = torch.rand(2, 4, dtype=HALF)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identity = [(id(p), p.data_ptr()) for p in model.parameters()]
    seen = record(model, "blocks.0")
    plain = model(x)
    with force_fp32(model, ["blocks.0"]) as in_fp32:
        assert model.blocks[0].up.weight.dtype is SINGLE
        assert model.blocks[1].up.weight.dtype is HALF
        for _ in range(2):
            y = model(x)
        y.float().sum().backward()
        assert model.blocks[0].up.weight.grad.dtype is SINGLE
        assert model.blocks[1].up.weight.grad.dtype is HALF
    assert y.dtype is HALF
    assert seen[-1] == (SINGLE, HALF)
    assert in_fp32.calls == {"blocks.0": 2}
    assert in_fp32.beyond == {}
    torch.testing.assert_close(y, plain, rtol=0.02, atol=0.02)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == identity
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.blocks[0].up.weight.grad.dtype is HALF


def test_an_output_beyond_the_format_is_not_cured():
    model = Net(gain=3e4).half()
    x = torch.ones(2, 4, dtype=HALF)
    with force_fp32(model, ["blocks.0.down", "blocks.1"]) as in_fp32:
        assert not model.blocks[0](x).isfinite().all()
        model.blocks[1](x)
        first = in_fp32.beyond["blocks.0.down"]
        model.blocks[0](2 * x)
    assert set(in_fp32.beyond) == {"blocks.0.down"}
    assert in_fp32.beyond["blocks.0.down"] >= first > 65520


def test_nested_islands_and_a_list_of_modules():
    model = Net().half()
    with force_fp32(model, ["", "blocks", "blocks.0.down"]) as in_fp32:
        assert list(in_fp32.calls) == ["", "blocks.0", "blocks.1", "blocks.0.down"]
        model(torch.rand(2, 4, dtype=HALF))
    assert set(in_fp32.calls.values()) == {1}


@pytest.mark.parametrize("names", [["1", ""], ["", "1"], ["1.0", "1", ""]], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_an_island_in_an_island_narrows_nothing(names, own):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)).half()
    wide = copy.deepcopy(model).float()
    if own:  # one that the model comes with
        Fp32Module(HALF).attach(model[1][0].float())
    x = torch.rand(3, 4, dtype=HALF)
    expected = model(x)
    with force_fp32(model, names):
        got = model(x)
    assert got.dtype is HALF
    assert torch.equal(got, wide(x.float()).half())
    assert torch.equal(model(x), expected)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(batch={"x": [x, (x,)]}, flag=True)["y"]


class Inner(nn.Module):
    def forward(self, *, batch, flag):
        assert flag
        self.saw = batch["x"][0].dtype, batch["x"][1][0].dtype
        return {"y": batch["x"][0] * 1e4 * 1e3, "n": 3}


def test_nested_keyword_inputs_and_outputs():
    model = Keywords()
    x = torch.ones(2, dtype=HALF, requires_grad=True)
    with torch.autocast("cpu", HALF), force_fp32(model, ["inner"]):
        y = model(x)
        y.sum().backward()
    assert model.inner.saw == (SINGLE, SINGLE)
    assert y.tolist() == [1e7, 1e7]
    with force_fp32(model, ["inner"]) as in_fp32:  # no parameters: the inputs tell the model's dtype
        assert model(x).dtype is HALF
    assert in_fp32.beyond == {"inner": pytest.approx(1e7)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mid(self.embed(ids)))


def test_tied_weights_take_their_other_owner_along():
    model = Tied().half()
    ids = torch.tensor([1, 2])
    with force_fp32(model, ["head"]) as in_fp32:
        y = model(ids)
        y.float().sum().backward()
        assert model.head.weight is model.embed.weight
        assert model.head.weight.dtype is SINGLE
        assert model.mid.weight.dtype is HALF
    assert y.dtype is HALF
    assert in_fp32.calls == {"head": 1, "embed": 1}
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype is HALF
    with torch.autocast("cpu", HALF), force_fp32(Tied(), ["head"]) as in_fp32:
        assert in_fp32.calls == {"head": 0}


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("policy", ["cuda", "native"])
def test_activation_checkpointing(policy, recompute, pure):
    plain = Net()
    x = torch.rand(2, 4)
    if pure:
        plain, x = plain.half(), x.half()
    x.requires_grad_()
    model = copy.deepcopy(plain)
    names = ["blocks.0.down", "blocks.1"]

    def run(net, recompute):
        with force_fp32(net, names) as in_fp32:
            with torch.autocast("cpu", HALF, enabled=not pure):
                loss = net(x, recompute=recompute).float().pow(2).mean()
            loss.backward()
            assert not torch.is_autocast_enabled("cpu")
        return loss, in_fp32

    with autocast_policy(policy):
        expected, _ = run(plain, None)
        gradient, x.grad = x.grad, None
        loss, in_fp32 = run(model, recompute)
    assert in_fp32.calls == dict.fromkeys(names, 2)
    assert torch.equal(loss, expected)
    assert torch.equal(x.grad, gradient)
    for (_, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_after_an_exception_in_the_island():
    model = Net()
    before = hooks(model)
    with torch.autocast("cpu", HALF):
        with pytest.raises(RuntimeError), force_fp32(model, ["blocks.0", "blocks.0.up"]):
            model(torch.rand(2, 5))
        assert torch.is_autocast_enabled("cpu")
        with force_fp32(model, ["blocks.0"]):
            with pytest.raises(RuntimeError):
                model(torch.rand(2, 5))
            assert torch.is_autocast_enabled("cpu")
            assert model.blocks[0](torch.rand(2, 4)).dtype is SINGLE
        assert model.blocks[0](torch.rand(2, 4)).dtype is HALF
    assert hooks(model) == before


def test_after_an_interrupt_in_the_island():
    model = Net()

    def stop(*_):
        raise KeyboardInterrupt

    model.blocks[0].up.register_forward_hook(stop)
    with torch.autocast("cpu", HALF):
        with pytest.raises(KeyboardInterrupt), force_fp32(model, ["blocks.0"]):
            model(torch.rand(2, 4))
        assert torch.is_autocast_enabled("cpu")


def test_a_failing_pre_hook_of_someone_else():
    model = Net()

    def fail(*_):
        raise ValueError

    handle = model.blocks[0].register_forward_pre_hook(fail)
    with torch.autocast("cpu", HALF), force_fp32(model, ["blocks.0"]):
        with pytest.raises(ValueError):
            model(torch.rand(2, 4))
        handle.remove()
        assert torch.is_autocast_enabled("cpu")
        model(torch.rand(2, 4))
        assert torch.is_autocast_enabled("cpu")


def test_an_optimizer_that_has_stepped_goes_on():
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    x = torch.rand(2, 4, dtype=HALF)
    for names in ([], ["blocks.0"], []):
        with force_fp32(model, names, [optimizer]):
            optimizer.zero_grad()
            model(x).float().pow(2).mean().backward()
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {HALF}


def test_an_unknown_name():
    sentence = r"no module called 'block\.0'.*did you mean blocks\.0"
    with pytest.raises(UsageError, match=sentence), force_fp32(Net(), ["block.0"]):
        pass
    model = Net().half()
    with pytest.raises(UsageError), force_fp32(model, ["blocks.0", "zzz"]):
        pass
    assert {p.dtype for p in model.parameters()} == {HALF}
