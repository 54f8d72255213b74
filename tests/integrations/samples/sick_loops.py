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


def test_past_the_scaler():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    torch.amp.GradScaler("cpu", init_scale=2.0**24).scale(half_loss(model)).backward()
    optimizer.step()


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
