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


def test_nothing_is_imported_for_it(module):
    with standing_in(module, "Trainer", "train", twice):
        assert module not in sys.modules
    assert importlib.import_module(module).Trainer().train(3) == 3


def test_another_finder_may_ask_all_finders_as_well(module):
    class Asking:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name != module:
                return None
            others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not Asking)
            return next((spec for spec in others if spec is not None), None)

    with standing_in(module, "Trainer", "train", twice):
        sys.meta_path.insert(0, Asking)
        try:
            assert importlib.import_module(module).Trainer().train(3) == 6
        finally:
            sys.meta_path.remove(Asking)


def test_a_module_that_was_found_inside_and_is_run_afterwards_is_its_own(module):
    with standing_in(module, "Trainer", "train", twice):
        spec = importlib.util.find_spec(module)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.Trainer().train(3) == 3
    assert "exec_module" not in vars(spec.loader)
