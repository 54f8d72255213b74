"""Steps that are recorded as a loop takes them, and their bundles."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampdoctor.replay.bundles.write import write_bundle
from ampdoctor.replay.user_modules import Spec, load_object
from tests.replay.bundles.steps import Loop

MODEL = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    width: int
    hidden: int = 16


class Net(nn.Module):
    def __init__(self, config, *, act=nn.ReLU, dropout=0.1):
        super().__init__()
        self.first = nn.Linear(config.width, config.hidden)
        self.norm = nn.BatchNorm1d(config.hidden)
        self.act = act()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(config.hidden, 4)

    def forward(self, x):
        return self.last(self.drop(self.act(self.norm(self.first(x)))))


def make_model():
    return Net(Config(8), act=nn.GELU)
"""


@pytest.fixture
def code(tmp_path):
    """Returns the user's file, `net.py`, in a folder of its own."""
    file = tmp_path / "code" / "net.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(MODEL))
    return file


@pytest.fixture
def theirs(code):
    """Returns the user's module as the training has it."""

    def named(name):
        spec = Spec.parse(f"{code}:{name}")
        return load_object(spec, path=spec.search_path(None), reuse=True)

    return SimpleNamespace(Net=named("Net"), Config=named("Config"))


@pytest.fixture
def recorded(theirs):
    """Returns model, program and constructions of a step with dropout, BatchNorm, accumulation and loss code."""
    loop = Loop()
    torch.manual_seed(1)
    with loop.made.recording():
        model = theirs.Net(theirs.Config(8), act=nn.GELU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def train(_step):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x.t().contiguous().t())
                loss = nn.functional.cross_entropy(out.float(), y, label_smoothing=0.1) + out.pow(2).mean() / 10
            (loss / 2).backward()

    program = loop.record(train, optimizer)
    return SimpleNamespace(model=model, program=program, made=loop.made, optimizer=optimizer)


@pytest.fixture
def bundle(recorded, tmp_path):
    """Returns the folder of its bundle."""
    write_bundle(tmp_path / "bundle-31000", recorded.program, made=recorded.made.of)
    return tmp_path / "bundle-31000"


@pytest.fixture
def loop():
    """Returns a recorder of loops."""
    return Loop()
