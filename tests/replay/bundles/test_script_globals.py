"""A model whose class speaks of what its script has made of the command line."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from ampdoctor.errors import FactoryError
from ampdoctor.replay.bundles.write import write_bundle
from tests.replay.bundles.steps import gradients, load_bundle, replayed, same

SCRIPT = """
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=6)
opt = parser.parse_args([])
width = int(opt.width)
data = torch.zeros(3)
depth = 1


def activated(x):
    return x * opt.width


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return activated(self.layer(x))

    def noisy(self, x):
        return x + data.sum()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Returns the file, and the module that it is as `__main__`."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    main = ModuleType("__main__")
    main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(SCRIPT, str(file), "exec"), vars(main))
    return file, main


def test_a_bundle_brings_them_and_says_so(script, loop, tmp_path):
    file, main = script
    with loop.made.recording():
        model = main.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(_step):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).pow(2).mean().backward()

    program = loop.record(train, optimizer)
    folder = tmp_path / "bundle-7"
    write_bundle(folder, program, made=loop.made.of)
    real = gradients(model)
    sys.modules["__main__"] = ModuleType("__main__")
    run = load_bundle(str(folder), model=str(file))
    assert any("width" in note and "opt" in note for note in run.notes)
    _, found = replayed(run)
    same(found, real)

    manifest = folder / "manifest.json"
    said = json.loads(manifest.read_text())
    del said["globals"]["width"]
    said["globals"]["len"] = 3
    manifest.write_text(json.dumps(said))
    with pytest.raises(FactoryError, match=r"speaks of 'width'.*FILE:make_model"):
        load_bundle(str(folder), model=str(file))
