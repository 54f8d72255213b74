"""A replayed step is the user's own loop, bit for bit, watched or not; and nothing of the watching stays behind."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ampdoctor import TrainingRun
from ampdoctor.errors import FactoryError, ReplayError, UserCodeError
from ampdoctor.probes.gradients import GradientProbe
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.parts import choose_device
from ampdoctor.replay.session import Session
from tests.probes.traced import stepped

CPU = torch.device("cpu")
STEPS = 3
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.act = nn.ReLU(inplace=True)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 7)

    def middle(self, x):
        return self.drop(self.act(self.norm(self.conv(x))))

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.training else self.middle(x)
        x, _ = self.rnn(x.transpose(1, 2))
        return self.head(x)


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 7, (3, 5), generator=generator) for _ in range(count)]


def loss(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def network():
    torch.manual_seed(0)
    return Net()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_optimizers(model):
    return {
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1),
        "rest": torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("head")]),
    }


def by_hand(model, *, precision, scale=None, accumulate=1, clip=None, divide=True, steps=STEPS, two=False, decay=False):
    """The recipe of PyTorch's AMP page, and nothing of ours."""
    optimizers = [*two_optimizers(model).values()] if two else [adam(model)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers] if decay else []
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    data = iter(batches(steps * accumulate))
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = 0.0
        for _ in range(accumulate):
            with torch.autocast("cpu", DTYPES[precision]) if precision in DTYPES else nullcontext():
                value = loss(model, next(data))
            if divide:
                value = value / accumulate
            scaler.scale(value).backward()
            total = total + value.detach()
        if clip is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for o in optimizers for g in o.param_groups for p in g["params"]], clip)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(total)
    return losses


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def replayed(run, *probes, precision=None, steps=STEPS):
    session = Session(run, device=CPU, precision=precision)
    try:
        return [outcome.loss for outcome in stepped(session, *probes, steps=steps)]
    finally:
        session.close()


def probes():
    return [NonFiniteProbe(), GradientProbe(), OpTraceProbe(flushes=True)]


RECIPES = {
    "fp16": {"precision": "fp16", "scale": 64.0},
    "accumulated": {"precision": "fp16", "scale": 64.0, "accumulate": 3},
    "summed": {"precision": "bf16", "accumulate": 2, "divide": False, "clip": 1.0},
    "fp32": {"precision": "fp32"},
    "two_optimizers": {"precision": "fp16", "scale": 64.0, "two": True, "clip": 0.5},
    "scheduled": {"precision": "fp16", "scale": 64.0, "decay": True},
    "skipping": {"precision": "fp16", "scale": 2.0**40},
}


def run_of(model, *, precision, scale=None, accumulate=1, clip=None, divide=True, steps=STEPS, two=False, decay=False):
    return TrainingRun(
        model=model,
        batches=lambda: iter(batches(steps * accumulate)),
        loss=loss,
        optimizer=two_optimizers if two else adam,
        scheduler=(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)) if decay else None,
        precision=precision,
        scaler=None if scale is None else {"init_scale": scale},
        max_grad_norm=clip,
        accumulation_steps=accumulate,
        divide_loss=divide,
    )


BARE = ("accumulated", "scheduled")
"""Recipes that nothing watches, which is quicker."""


@pytest.mark.parametrize(
    ("recipe", "watched"), [("fp16", False), *((recipe, recipe not in BARE) for recipe in RECIPES)]
)
def test_a_replay_is_the_hand_written_loop_bit_for_bit(recipe, watched):
    hand, ours = network(), network()
    torch.manual_seed(1)
    expected = by_hand(hand, **RECIPES[recipe])
    torch.manual_seed(1)
    losses = replayed(run_of(ours, **RECIPES[recipe]), *(probes() if watched else ()))
    assert losses == [float(value) for value in expected]
    assert same(state(ours), state(hand))


def test_master_weights():
    torch.manual_seed(0)
    wide = nn.Linear(4, 2)
    hand = nn.Linear(4, 2).half()
    hand.load_state_dict(wide.state_dict())
    ours = nn.Linear(4, 2).half()
    ours.load_state_dict(hand.state_dict())
    master_weights = [p.detach().float() for p in hand.parameters()]
    optimizer = torch.optim.SGD(master_weights, lr=1e-4)
    data = [torch.randn(3, 4, generator=torch.Generator().manual_seed(s)).half() for s in range(STEPS)]
    for x in data:
        hand.zero_grad()
        hand(x).float().square().mean().backward()
        for master, parameter in zip(master_weights, hand.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(master_weights, hand.parameters(), strict=True):
                parameter.copy_(master)
    run = TrainingRun(
        model=ours,
        batches=data,
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4),
        autocast=False,
        master_weights=True,
    )
    session = Session(run, device=CPU)
    stepped(session, *probes(), steps=STEPS)
    assert same(state(ours), state(hand))
    held = session.optimizers["optimizer"].param_groups[0]["params"]
    assert all(torch.equal(a, b) for a, b in zip(held, master_weights, strict=True))
    session.close()
    assert [id(p) for p in session.optimizers["optimizer"].param_groups[0]["params"]] == [
        id(p) for p in ours.parameters()
    ]


def test_tf32_rounds_what_a_matmul_takes():
    plain, ours = nn.Linear(64, 64), nn.Linear(64, 64)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(8, 64)
    run = TrainingRun(model=ours, batches=[x], loss=lambda m, x: m(x).sum(), precision="tf32")
    with torch.no_grad():
        weight, inputs = (
            (t.view(torch.int32) + 0xFFF + ((t.view(torch.int32) >> 13) & 1)).bitwise_and(~0x1FFF).view(torch.float32)
            for t in (plain.weight.detach(), x)
        )
        expected = functional.linear(inputs, weight, plain.bias).sum()
    assert replayed(run, steps=1)[0] == pytest.approx(float(expected), rel=1e-6)


def test_the_users_own_step_gets_what_it_asks_for():
    seen = {}

    def step(batch, model, optimizer, scaler, autocast, run, step):  # noqa: PLR0917 - everything that there is
        seen.update(run=run, step=step, optimizer=optimizer)
        with autocast():
            value = loss(model, batch)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        return value

    hand, ours = network(), network()
    torch.manual_seed(1)
    expected = by_hand(hand, precision="fp16", scale=64.0)
    run = run_of(ours, precision="fp16", scale=64.0)
    run.step, run.loss = step, None
    torch.manual_seed(1)
    assert replayed(run, NonFiniteProbe(), OpTraceProbe()) == [float(value) for value in expected]
    assert same(state(ours), state(hand))
    assert seen["run"] is run
    assert seen["step"] == STEPS - 1
    assert isinstance(seen["optimizer"], torch.optim.AdamW)


@pytest.mark.parametrize("result", [None, 1.5, np.float64(1.5)])
def test_a_step_may_return_a_number_or_nothing(result):
    run = TrainingRun(model=nn.Linear(1, 1), batches=[1], step=lambda: result)
    assert replayed(run, NonFiniteProbe(), OpTraceProbe(), steps=1) == [result]


def test_a_step_that_returns_something_else_is_told_so():
    run = TrainingRun(model=nn.Linear(1, 1), batches=[1], step=lambda: {"loss": 1.0})
    with pytest.raises(FactoryError, match="returned dict"):
        replayed(run, steps=1)


def leftovers(model):
    hooks = (
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
    )  # fmt: skip
    found = [(name, hook) for name, module in model.named_modules() for hook in hooks if getattr(module, hook)]
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
            found.append((name, "tensor hook"))
    return found


class Own(nn.Module):
    """Hands out its parameter itself: the one output whose hooks do not die with the graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Own()

    def forward(self, x):
        return (x * self.own()).sum()


@pytest.mark.parametrize("fails", ["no", "loss", "backward", "optimizer", "interrupt"])
def test_hooks_modes_and_wrapped_methods_are_gone(fails):
    def failing(model, x):
        value = model(x)
        if fails == "loss":
            raise ValueError("in the loss")
        if fails == "interrupt":
            raise KeyboardInterrupt
        if fails == "backward":
            value.register_hook(lambda _: 1 / 0)
        return value

    model = Outer()
    run = TrainingRun(
        model=model,
        batches=[torch.ones(3)],
        loss=failing,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        scaler={"init_scale": 2.0},
    )
    session = Session(run, device=CPU)
    optimizer = session.optimizers["optimizer"]
    if fails == "optimizer":
        optimizer.param_groups[0]["lr"] = "a mistake"
    attributes = set(vars(session.scaler)), set(vars(optimizer)), set(vars(torch.autograd))
    engine = torch.autograd.Variable._execution_engine
    expected = {"no": nullcontext(), "interrupt": pytest.raises(KeyboardInterrupt)}
    with expected.get(fails, pytest.raises(UserCodeError, match="step 0 raised")):
        stepped(session, NonFiniteProbe(), GradientProbe(), OpTraceProbe())
    assert leftovers(model) == []
    assert attributes == (set(vars(session.scaler)), set(vars(optimizer)), set(vars(torch.autograd)))
    assert torch.autograd.Variable._execution_engine is engine
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.is_autocast_enabled("cpu")
    # and the same session still works
    if fails == "optimizer":
        optimizer.param_groups[0]["lr"] = 0.1
    session.run.loss = lambda model, x: model(x)
    with session.watched(NonFiniteProbe()):
        assert session.step(0).optimizer_steps == 1


def test_the_reference_is_fp32_throughout_and_leaves_no_trace():
    model = nn.Linear(3, 2).half()
    seen = SimpleQueue()  # a list would be put back

    def look(m, x):
        seen.put((m.weight.dtype, x.dtype, torch.is_autocast_enabled("cpu")))
        return m(x).float().sum()

    run = TrainingRun(
        model=model,
        batches=[torch.ones(1, 3).half()],
        loss=look,
        optimizer=lambda m: torch.optim.Adam(m.parameters()),
        autocast=False,
    )
    session = Session(run, device=CPU)
    assert session.has_step(0)
    snapshot = session.snapshot()
    before = state(model)
    with session.reference():
        session.step(0)
    snapshot.restore()
    session.step(0)
    assert seen.get_nowait() == (torch.float32, torch.float32, False)
    assert seen.get_nowait() == (torch.float16, torch.float16, False)
    snapshot.restore()
    assert same(state(model), before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize(
    ("dtype", "compute", "scripted"), [(torch.float16, "bf16", True), (torch.bfloat16, "fp32", False)]
)
def test_computing_in_another_format_where_the_loss_casts_the_inputs(dtype, compute, scripted):
    """As `apply` does it in a training."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)
    net = torch.jit.script(net) if scripted else net
    seen = []

    def cast_loss(model, batch):
        y = model(batch.to(dtype))
        seen.append(y.dtype)
        return y.float().pow(2).mean()

    run = TrainingRun(
        model=net,
        batches=[torch.rand(2, 4)],
        loss=cast_loss,
        precision="fp16" if dtype is torch.float16 else "bf16",
        autocast=False,
        scaler=None,
    )
    session = Session(run, device=CPU)
    assert session.has_step(0)
    with session.computing_in(compute):
        session.step(0)
    session.step(0)
    assert seen == [torch.float32 if compute == "fp32" else torch.bfloat16, dtype]


@pytest.mark.parametrize("name", ["gpu", "mps:0"])
def test_a_device_that_is_none(name):
    with pytest.raises(ReplayError, match="is not auto, cpu, cuda or cuda:N"):
        choose_device(name)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": lambda _: 3}, "optimizer is int, not an optimizer"),
        ({"scaler": lambda: 3}, "gave int, not a GradScaler"),
        ({"scaler": {"no_such_argument": 1}}, "no_such_argument"),
        ({"scheduler": lambda _: 3}, "is int, which has no step"),
    ],
)
def test_parts_of_the_wrong_kind(changes, sentence):
    with pytest.raises(FactoryError, match=sentence):
        Session(TrainingRun(model=nn.Linear(1, 1), batches=[1], loss=loss, **changes), device=CPU)


def test_a_step_says_once_what_it_says_however_often_it_is_replayed(capsys):
    def step(model, batch, autocast):
        with autocast():
            functional.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten()).backward()
        sys.stdout.write("took a step")

    session = Session(TrainingRun(model=network(), batches=batches(), step=step), device=CPU)
    assert session.has_step(1)
    start = session.snapshot()
    with session.reference():
        session.step(0)
    for index in (0, 0, 1):
        start.restore()
        session.step(index)
    session.close()
    assert capsys.readouterr().err.count("took a step") == 2
