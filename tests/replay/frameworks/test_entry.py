"""A method of a class that something else stands in for, before and after its module is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from ampdoctor.replay.frameworks.resuming import standing_in


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "frame_work.py").write_text("class Trainer:\n    def train(self, steps=1):\n        return steps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "frame_work"
    sys.modules.pop("frame_work", None)


def twice(original):
    return lambda self, steps=1: 2 * original(self, steps)


@pytest.mark.parametrize("imported", ["before", "inside"])
def test_it_stands_in_only_inside(module, imported):
    finders = list(sys.meta_path)
    if imported == "before":
        importlib.import_module(module)
    with standing_in(module, "Trainer", "train", twice):
        inside = importlib.import_module(module).Trainer().train(3)
    assert (inside, sys.modules[module].Trainer().train(3)) == (6, 3)
    assert sys.meta_path == finders
