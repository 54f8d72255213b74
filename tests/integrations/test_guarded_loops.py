"""What the guard says of a loop, at its steps and at its end; and that it leaves the loop as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.integrations.pytest_guard import AmpGuard, NonFinite
from tests.live.test_survival import in_place


def told(loop, *, max_skipped=None, **parts):
    """The code and the step of the finding with which the guard fails a loop; None where it does not."""
    try:
        with AmpGuard()(max_skipped=max_skipped, **parts) as watch:
            loop()
    except NonFinite:
        finding = watch.report.findings[0]
        return finding.code, finding.where.step
    assert watch.report is None
    return None


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def small():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), 1e-3)


def batches(*, bad, value=torch.nan, count=4):
    torch.manual_seed(0)
    made = [torch.randn(4, 8) for _ in range(count)]
    made[bad][0, 0] = value
    return made


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = in_place()
    yield
    assert in_place() == before


class Acting(nn.Module):
    """Acts on itself in each call."""

    def __init__(self, act):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), act
        self.register_buffer("kept", torch.zeros(4, 4))

    def forward(self, x):
        self.act(self)
        return (self.fc(x) + self.kept.clamp(max=0)).softmax(-1)


def train(model, batches, make=torch.optim.SGD):
    optimizer = make([p for p in model.parameters() if p.requires_grad], 0.1)
    for x in batches:
        step(model, optimizer, x)


def test_a_buffer_that_becomes_infinite_is_seen_in_its_step_and_a_mask_is_none():
    def mask():
        return torch.full((4, 4), -torch.inf).triu(1)

    lost = Acting(lambda model: model.kept.add_(torch.inf))
    assert told(lambda: train(lost, [torch.ones(4, 4)] * 3))[1] == 0
    late = Acting(lambda model: setattr(model, "kept", mask()))
    assert told(lambda: train(late, [torch.ones(4, 4)] * 2)) is None
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(0)
    assert told(lambda: train(norm, [torch.randn(3, 4) * 1e30 for _ in range(3)])) == ("AMP201", 0)


def test_a_moment_that_is_infinite_before_the_loop_is_the_checkpoints_fault():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, torch.ones(3, 4))
    optimizer.state[model.weight]["exp_avg_sq"][0, 0] = torch.inf
    assert told(lambda: step(model, optimizer, torch.ones(3, 4))) == ("AMP103", 0)


def norm_is_finite(model):
    return bool(nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite())


def each_is_finite(model):
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("looks", "to_none", "value", "bad"), [(norm_is_finite, True, torch.nan, 0), (each_is_finite, False, torch.nan, 3)]
)
def test_a_loop_that_looks_at_its_gradients_and_leaves_the_step_out_is_well(looks, to_none, value, bad):
    def loop(uses):
        model, optimizer = small()
        for x in batches(value=value, bad=bad):
            optimizer.zero_grad(set_to_none=to_none)
            model(x).pow(2).mean().backward()
            if uses or looks(model):
                optimizer.step()

    # of a first step that is left out and is the last as well, nothing tells it from a test without a step
    assert told(lambda: loop(uses=False)) is None
    assert told(lambda: loop(uses=True))[1] == bad


def test_a_single_backward_without_a_step_is_judged_by_its_loss_and_its_gradients():
    model, optimizer = small()
    parts = {"model": model, "optimizer": {"only": optimizer}}
    assert told(lambda: model(batches(bad=0)[0]).pow(2).mean().backward(), **parts) == ("AMP204", 0)
    optimizer.zero_grad()
    assert told(lambda: model(torch.zeros(1, 8)).mul(0).sqrt().sum().backward(), **parts) == ("AMP202", 0)
    optimizer.zero_grad()
    assert told(lambda: model(torch.ones(1, 8)).sum().backward(), **parts) is None


def test_a_model_that_is_given_is_looked_at_at_the_end_whatever_was_done_with_it():
    model, _ = small()

    def update():
        with torch.no_grad():
            model.weight.mul_(1e38).mul_(1e38)

    assert told(update, model=model)[0] == "AMP101"
    assert told(lambda: model(torch.ones(2, 8)).detach(), model=model) is None  # as it came


def test_a_watch_that_fails_is_said():
    def loop(guard):
        with guard() as watch:
            step(*small(), torch.ones(2, 8))
            watch.failed(ValueError("ours"))

    with pytest.warns(pytest.PytestWarning, match="the rest of the test was not watched: ValueError: ours"):
        loop(AmpGuard())
