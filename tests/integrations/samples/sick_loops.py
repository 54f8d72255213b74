"""Tests of a user, each with a training that goes non-finite in a way of its own."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.amp_finite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) ** 2)


def half_loss(model, factor=1.0):
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(4, 8))
    return out.float().sum() * factor


def test_nan_in_a_batch():
    linear = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    for step in range(3):
        x = torch.ones(2, 3)
        x[0, 1] = float("nan") if step == 2 else 0.0
        optimizer.zero_grad()
        linear(x).sum().backward()
        optimizer.step()


def test_derivative_of_a_root():
    linear = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    linear(torch.zeros(2, 3)).sqrt().sum().backward()
    optimizer.step()


def test_epsilon_that_half_precision_lacks():
    linear = nn.Linear(3, 3).half()
    optimizer = torch.optim.Adam(linear.parameters(), eps=1e-8)
    (linear(torch.ones(2, 3).half()).float().mean() * 1e-4).backward()
    optimizer.step()


def test_no_scale_works():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, 1e6)).backward()
        scaler.step(optimizer)
        scaler.update()


def test_past_the_scaler():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.amp.GradScaler("cpu", init_scale=2.0**24).scale(half_loss(model)).backward()
    optimizer.step()


def test_clipped_before_it_is_unscaled():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(half_loss(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_scale_never_updated():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(6):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        optimizer.zero_grad()
        scaler.scale(half_loss(model)).backward()
        scaler.step(optimizer)


def test_without_an_optimizer():
    nn.Linear(3, 1)(torch.ones(2, 3)).mul(0).sqrt().sum().backward()


def test_an_update_by_hand():
    linear = nn.Linear(3, 1)
    linear(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.sub_(parameter.grad * float("inf"))
    assert linear.weight.isinf().all()


def test_an_update_with_gradients_that_were_handed_out():
    linear = nn.Linear(3, 1)
    for rate in (0.1, float("inf")):
        gradients = torch.autograd.grad(linear(torch.ones(2, 3)).sum(), list(linear.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(linear.parameters(), gradients, strict=True):
                parameter.sub_(gradient * rate)


def test_a_bad_batch_whose_gradients_are_used():
    linear = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    for value in (1.0, float("nan")):
        optimizer.zero_grad()
        linear(torch.full((2, 3), value)).sum().backward()
        nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        optimizer.step()


def test_gradients_of_no_loss():
    out = nn.Linear(3, 3)(torch.ones(2, 3)).mul(0).sqrt()
    out.backward(torch.ones(2, 3))


def test_own_check():
    loss = nn.Linear(3, 1)(torch.ones(2, 3)).mul(0).log().mean()
    assert torch.isfinite(loss), "bad loss"


def test_swallowed():
    linear = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    linear(torch.ones(2, 3)).mul(0).log().mean().backward()
    try:
        optimizer.step()
    except BaseException:
        pass


def test_two_optimizers():
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for model in (one, two))
    for step in range(4):
        made = one(torch.randn(3, 2))
        second.zero_grad()
        two(made.detach()).mean().backward()
        second.step()
        first.zero_grad()
        (two(made).mean() / (0.0 if step == 3 else 1.0)).backward()
        first.step()
