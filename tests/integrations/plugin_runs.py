"""Small tests of a user, and how pytest runs them with the plugin."""

from __future__ import annotations

from importlib.metadata import entry_points

import torch._dynamo  # noqa: F401 - a pytest run inside this one forgets what it loads, and torch loaded twice crashes

import ampdoctor.integrations.pytest_guard  # noqa: F401 - as above

PLUGIN = "ampdoctor.integrations.pytest_plugin"
INSTALLED = bool(entry_points(group="pytest11", name="ampdoctor"))
ARGUMENTS = [*([] if INSTALLED else ["-p", PLUGIN]), "-p", "no:randomly", "-p", "no:cacheprovider", "--strict-markers"]

LOOP = """
import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) ** 2)


def train(x, *, init_scale=1024.0, steps=3, update=True, guarded=True):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def marked(*bodies, marker="@pytest.mark.amp_finite"):
    return LOOP + "".join(f"\n\n{marker}\ndef test_{index}():\n    {body}\n" for index, body in enumerate(bodies))
