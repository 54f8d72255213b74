"""A snapshot brings back the same objects with the same bits, any number of times."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.errors import UserCodeError
from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import Snapshot


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.lin.weight
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("expanded", torch.tensor(1.0).expand(4))
        self.register_buffer("reshaped", torch.arange(4.0))
        self.register_buffer("absent", None)
        flat = torch.arange(6.0)
        self.register_buffer("whole", flat)
        self.register_buffer("part", flat[2:4])
        self.calls = 0
        self.queue = torch.zeros(3)
        self.memory = None

    def forward(self, x):
        self.calls += 1
        self.hidden += 1.0
        self.replaced = self.replaced + 1.0
        self.queue[self.calls % 3] += 1.0
        self.memory = x.detach()
        self.fresh = x.detach()
        return self.drop(self.norm(self.tied(self.lin(x))))


def bits(value):
    """Everything in a nested value that can differ, with tensors as bytes."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return str(value.dtype), tuple(value.shape), dense.reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def state_of(model, optimizers=(), scaler=None, schedulers=()):
    return bits(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "grads": {name: p.grad for name, p in model.named_parameters()},
            "grad wanted": {name: p.requires_grad for name, p in model.named_parameters()},
            "modes": [module.training for module in model.modules()],
            "plain": {n: v for n, v in vars(model).items() if isinstance(v, int | torch.Tensor | None)},
            "optimizers": [o.state_dict() for o in optimizers],
            "scaler": None if scaler is None else {k: v for k, v in vars(scaler).items() if k != "step"},
            "schedulers": [s.state_dict() for s in schedulers],
            "random": (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        }
    )


def disturb(model, optimizer, scaler, scheduler):
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3) + random.random()).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True),
    ],
)
def test_every_bit_comes_back_repeatedly(make, warm):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    if warm:
        disturb(model, optimizer, scaler, scheduler)
    before = state_of(model, [optimizer], scaler, [scheduler])
    snapshot = Snapshot(model, {"optimizer": optimizer}, scaler, (scheduler,))
    after = []
    for _ in range(3):
        disturb(model, optimizer, scaler, scheduler)
        after.append(state_of(model, [optimizer], scaler, [scheduler]))
        assert after[-1] != before
        snapshot.restore()
        assert state_of(model, [optimizer], scaler, [scheduler]) == before
    assert after[0] == after[1] == after[2]


def test_identity_aliases_and_views_survive():
    model = Net()
    parameters = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    replaced = model.replaced
    snapshot = Snapshot(model, {}, None)
    model(torch.randn(4, 3)).sum().backward()
    with torch.no_grad():
        model.lin.weight.zero_()
    model.tied.weight = nn.Parameter(torch.ones(3, 3))
    model.part.fill_(-1.0)
    model.reshaped.t_().resize_(2, 2)
    model.register_buffer("late", torch.ones(1))
    model.absent = torch.ones(1)
    snapshot.restore()
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == parameters
    assert model.tied.weight is model.lin.weight
    assert model.replaced is replaced
    assert model.absent is None
    assert "late" not in dict(model.named_buffers())
    assert not hasattr(model, "fresh")
    assert model.reshaped.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    model.whole[2] = 9.0
    assert model.part[0] == 9.0


@pytest.mark.parametrize("kind", ["none", "dense", "sparse"])
def test_gradients_come_back_as_they_were(kind):
    model = nn.Embedding(5, 2, sparse=kind == "sparse")
    if kind != "none":
        model(torch.tensor([1, 3])).sum().backward()
    grad = model.weight.grad
    values = None if grad is None else grad.to_dense().clone()
    snapshot = Snapshot(model, {}, None)
    for _ in range(2):
        model(torch.tensor([0, 1, 2])).sum().backward()
        model.weight.grad = None if kind == "dense" else model.weight.grad * 2
        snapshot.restore()
        if grad is None:
            assert model.weight.grad is None
        else:
            assert model.weight.grad.layout is grad.layout
            assert torch.equal(model.weight.grad.to_dense(), values)


def test_a_lazy_scaler_is_lazy_again_and_an_unfinished_one_unfinished():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    lazy = Snapshot(model, {"o": optimizer}, scaler)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    unscaled = Snapshot(model, {"o": optimizer}, scaler)
    scaler.step(optimizer)
    scaler.update(2.0)
    unscaled.restore()
    assert scaler.get_scale() == 8.0
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    lazy.restore()
    assert scaler._scale is None
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    lazy.restore()
    assert scaler.get_scale() == 8.0


def test_groups_and_members_of_an_optimizer_come_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([model.weight], lr=0.5)
    snapshot = Snapshot(model, {"o": optimizer}, None)
    optimizer.add_param_group({"params": [model.bias], "lr": 0.1})
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.param_groups[0]["extra"] = 1
    snapshot.restore()
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5
    assert "extra" not in group
    assert len(group["params"]) == 1
    assert group["params"][0] is model.weight


def test_every_generator_comes_back():
    own = torch.Generator().manual_seed(4)
    snapshot = Snapshot(nn.Linear(1, 1), {}, None, generators=(own,))

    def draw():
        numbers = np.random.rand(), torch.rand(1, generator=own).item()  # noqa: NPY002
        return random.random(), torch.rand(1).item(), *numbers

    first = draw()
    draw()
    snapshot.restore()
    assert draw() == first


class Stubborn:
    """A scheduler of the user's own that cannot go back."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise LookupError("not again")


def test_what_cannot_be_put_back_is_the_users_error_and_the_rest_goes_back_all_the_same():
    model = nn.Linear(2, 2)
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    torch.manual_seed(3)
    snapshot = Snapshot(model, {}, None, (Stubborn(), other))
    other.last_epoch = 7
    torch.manual_seed(5)
    with pytest.raises(UserCodeError, match="putting the run's state back raised LookupError: not again"):
        snapshot.restore()
    assert other.last_epoch == 0
    assert torch.initial_seed() == 3


@pytest.mark.parametrize("known", [True, False])
def test_a_scaler_of_the_steps_own_goes_back_also_where_it_was_not_known_yet(known):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def step(model, batch, optimizer):
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    batches = [torch.full((3, 2), 1e3)] * 4
    session = Session(
        TrainingRun(model=model, batches=batches, step=step, optimizer=optimizer), device=torch.device("cpu")
    )
    if known:
        assert session.has_step(0)
        session.step(0)
    before, scale = session.snapshot(), scaler.get_scale()
    for _ in range(2):
        assert session.has_step(1)
        assert session.step(1).skipped
        assert scaler.get_scale() == scale / 2
        before.restore()
        assert scaler.get_scale() == scale


def test_wanted_gradients_and_parameters_that_only_an_optimizer_holds_come_back():
    model, master = nn.Linear(2, 2), torch.ones(3, requires_grad=True)
    model.bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([master], lr=1.0)
    snapshot = Snapshot(model, {"o": optimizer}, None)
    model.weight.requires_grad_(requires_grad=False)
    model.bias.requires_grad_()
    master.sum().backward()
    optimizer.step()
    snapshot.restore()
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
    assert (master.tolist(), master.grad) == ([1.0, 1.0, 1.0], None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_the_mode_of_a_scripted_module_comes_back():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    snapshot = Snapshot(model, {}, None)
    model.eval()
    snapshot.restore()
    assert model[0].training
