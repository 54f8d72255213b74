"""Loops in which a watch could go wrong: each is trained bare and watched, and must end bit for bit the same."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ampdoctor

STEPS = 30


def scaler(scale=256.0, interval=2000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def mlp(width=8, out=1):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, out))


def state(*parts):
    """Every tensor of models and optimizers, and every random state."""
    numpys = np.random.get_state()[1].astype(int)  # noqa: NPY002 - what loops use
    tensors = [torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(numpys)]
    for part in parts:
        if isinstance(part, nn.Module):
            tensors += [*part.parameters(), *part.buffers()]
        elif isinstance(part, torch.optim.Optimizer):
            tensors += [v for s in part.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        else:
            tensors.append(torch.tensor([part.get_scale(), part._get_growth_tracker()]))
    return [t.detach().coalesce().to_dense().clone() if t.is_sparse else t.detach().clone() for t in tensors]


def lines(folder, kind="step"):
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def bare(train):
    seed()
    return state(*train())


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what loops use


def watched(train, folder, **settings):
    """Train under a watch; returns the state afterwards, and the watch."""
    seed()
    with ampdoctor.watch(folder=folder, every=settings.pop("every", 7), tell=lambda _: None, **settings) as watch:
        parts = train()
    return state(*parts), watch


def equal(mine, theirs):
    assert len(mine) == len(theirs)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))


def updates(optimizer, loss_of, *, steps=STEPS):
    """Plain updates by the losses of the steps."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()


# -- healthy loops: nothing said, nothing changed --------------------------------------------------------------------


def plain():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, optimizer


def accumulating():
    model, scale = mlp(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).float().pow(2).mean() / 3
        scale.scale(loss).backward()
        if step % 3 == 2:
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    return model, optimizer, scale


def keeping_the_best():
    """Copies and saves of everything, in the middle; from the middle on the copy is trained."""
    model, scale = mlp(), scaler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).float().pow(2).mean()
        optimizer.zero_grad()
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        scheduler.step()
        if step in (4, 7):
            pickle.loads(pickle.dumps((model, optimizer, scale.state_dict(), scheduler.state_dict())))
            model, optimizer, scale, scheduler = copy.deepcopy((model, optimizer, scale, scheduler))
            assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(
                map(id, model.parameters())
            )
    return model, optimizer, scale


def adversarial():
    """A GAN: two optimizers, one scaler; the generator's backward leaves gradients in the discriminator."""
    seen, made, scale = mlp(), mlp(out=4), scaler()
    of_seen = torch.optim.Adam(seen.parameters(), lr=1e-3)
    of_made = torch.optim.Adam(made.parameters(), lr=1e-3)
    for _ in range(STEPS):
        real, fake = torch.randn(8, 4), made(torch.randn(8, 4))
        of_seen.zero_grad()
        loss = nn.functional.softplus(-seen(real)).mean() + nn.functional.softplus(seen(fake.detach())).mean()
        scale.scale(loss).backward()
        scale.step(of_seen)
        of_made.zero_grad()
        scale.scale(nn.functional.softplus(-seen(fake)).mean()).backward()
        scale.step(of_made)
        scale.update()
    return seen, made, of_seen, of_made, scale


def averaged():
    """An average of the weights, batch norm, and evaluation between the steps."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.update_parameters(model)
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                mean(torch.randn(8, 4))
                model(torch.randn(8, 4))
            model.train()
    return model, mean, optimizer


class Odd(nn.Module):
    """Frozen, unused, tied, sparse, empty and 0-dim parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.frozen, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.gain, self.empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0))

    def forward(self, tokens):
        return self.gain * self.tied(self.first(self.frozen(self.words(tokens)))).sum() + self.empty.sum()


def odd():
    model = Odd()
    sparse = torch.optim.SparseAdam(list(model.words.parameters()), lr=1e-2)
    rest = [p for name, p in model.named_parameters() if not name.startswith("words") and p.requires_grad]
    optimizer = torch.optim.SGD(rest, lr=1e-4)
    for _ in range(STEPS):
        loss = model(torch.randint(10, (3, 5))).pow(2) / 100
        sparse.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        sparse.step()
        optimizer.step()
    return model, sparse, optimizer


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.body, self.head, self.reentrant = mlp(out=8), nn.Linear(8, 1), reentrant

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


def checkpointed(reentrant):
    def train():
        model = Checkpointed(reentrant=reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        updates(optimizer, lambda _: model(torch.randn(8, 4).requires_grad_()).pow(2).mean())
        return model, optimizer

    return train


def with_closures():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    for _ in range(STEPS):
        x = torch.randn(8, 4)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return (model,)


def penalised():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(_):
        x = torch.randn(8, 4, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    updates(optimizer, loss_of)
    return model, optimizer


def loaded():
    model, data = mlp(), TensorDataset(torch.randn(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=8, shuffle=True, num_workers=1):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    return model, optimizer


LOOPS = {
    "plain": plain,
    "accumulation": accumulating,
    "copies": keeping_the_best,
    "GAN": adversarial,
    "EMA and batch norm": averaged,
    "odd parameters": odd,
    "checkpointing, reentrant": checkpointed(reentrant=True),
    "checkpointing": checkpointed(reentrant=False),
    "closures": with_closures,
    "gradient penalty": penalised,
    "workers": loaded,
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_ends_as_it_would_have_and_nothing_is_said(name, tmp_path, caplog):
    train = LOOPS[name]
    left, watch = watched(train, tmp_path)
    assert watch.report is None
    assert [record.getMessage() for record in caplog.records] == []
    assert equal(bare(train), left)
    assert len(lines(tmp_path)) >= 10
    assert all(math.isfinite(line.get("loss", 0.0)) for line in lines(tmp_path))


# -- scalers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_counted_once_and_gradients_are_read_unscaled(fused, tmp_path):
    """Step 3 leaves fp16's range at the scale of 2^10 and not at half of it: a scaler that settles is healthy."""

    def train(unscaled=None):
        model, scale = nn.Linear(4, 1), scaler(2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).sum() * (100.0 if step == 3 else 1.0)
            scale.scale(loss).backward()
            if unscaled is not None:
                unscaled.append(
                    float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) / scale.get_scale()
                )
            scale.step(optimizer)
            scale.update()
        return model, optimizer, scale

    left, watch = watched(train, tmp_path)
    norms = []
    seed()
    train(norms)
    assert equal(bare(train), left)
    assert watch.report is None
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == list(range(6))
    assert [line["skipped"] for line in steps] == [False, False, False, True, False, False]
    assert [line["accepted"] for line in steps] == [0, 1, 2, 3, 3, 4]
    for line, norm in zip(steps, norms, strict=True):
        if not line["skipped"]:
            assert line["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_last_micro_batch_alone_is_bad(tmp_path):
    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x).abs().mul(x[0, 0] != 0).log().mean()

    def train():
        model = Log()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                x = torch.randn(8, 4)
                if (step, micro) == (2, 2):
                    x[0, 0] = 0
                (model(x) / 3).backward()
            optimizer.step()
        return (model,)

    _, watch = watched(train, tmp_path)
    (finding,) = watch.report.findings
    assert watch.report.run["step"] == 2
    assert finding.where.op == "aten.log"
    assert finding.where.call == 2


# -- compiled models -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_keeps_its_one_graph(tmp_path):
    from torch._dynamo.testing import CompileCounterWithBackend

    def train(counter):
        torch._dynamo.reset()
        model = mlp()
        fast = torch.compile(model, backend=counter)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        updates(optimizer, lambda _: fast(torch.randn(8, 4)).pow(2).mean(), steps=6)
        return model, optimizer

    alone, beside = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    seed()
    expected = state(*train(alone))
    left, watch = watched(lambda: train(beside), tmp_path)
    assert watch.report is None
    assert equal(expected, left)
    assert beside.frame_count == alone.frame_count == 1
    assert len(lines(tmp_path)) == 6


def test_a_compiled_clipping_stays_one_graph(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    clip = torch.compile(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), backend="eager", fullgraph=True)
    with ampdoctor.watch(folder=tmp_path):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            assert clip().isfinite()  # a mode of ours in the graph raises, because of `fullgraph`
            optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_compiled_in_place_is_said_to_be_unseen(tmp_path, caplog):
    torch._dynamo.reset()
    model = mlp()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ampdoctor.watch(folder=tmp_path) as watch:
        updates(
            optimizer, lambda step: model(torch.randn(8, 4)).pow(2).mean() * (math.inf if step == 4 else 1.0), steps=6
        )
    said = [record.getMessage() for record in caplog.records]
    assert sum("Sequential.compile()" in sentence for sentence in said) == 1
    assert len(lines(tmp_path)) == 6
    assert watch.report is not None
    assert not watch.report.findings or not any(
        f.prescription and f.prescription.verified for f in watch.report.findings
    )


# -- what only looks like a call -------------------------------------------------------------------------------------


class Sqrt(nn.Module):
    """Its body's backward is not finite where `x` is 0, and finite forward."""

    def __init__(self, wrap):
        super().__init__()
        self.body, self.head, self.wrap = nn.Linear(4, 4, bias=False), nn.Linear(4, 1), wrap

    def forward(self, x):
        return self.head(self.wrap(lambda y: self.body(y).sqrt(), x) if self.wrap else self.body(x).sqrt())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_no_call(reentrant, tmp_path):
    def train():
        model = Sqrt(lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
        nn.init.constant_(model.body.weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        updates(optimizer, lambda step: model((torch.rand(8, 4) * (step != 3)).requires_grad_()).mean(), steps=5)
        return model, optimizer

    _, watch = watched(train, tmp_path)
    assert watch.report.run["step"] == 3
    assert watch.report.findings[0].where.phase == "backward"
    assert not any("do not explain" in skipped.reason for skipped in watch.report.skipped)


def test_a_closure_is_judged_after_it_has_run_and_before_the_update(tmp_path):
    """Lightning's way: forward and backward run inside the optimizer's step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weights = []

    def train():
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = (model(torch.randn(8, 4)).abs() * (step != 2)).log().mean()
                loss.backward()
                return loss

            weights.append(copy.deepcopy(model.state_dict()))
            optimizer.step(closure)
        return (model,)

    _, watch = watched(train, tmp_path, on_sick="record")
    assert watch.report.run["step"] == 2
    assert watch.report.findings[0].where.op == "aten.log"
    assert all(value.isfinite().all() for value in weights[2].values())
