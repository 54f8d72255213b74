"""How modules were made is noted, and nothing else changes."""

from __future__ import annotations

import gc
import weakref

from torch import nn

from ampdoctor.hooks.json_values import read
from ampdoctor.live.recording.models import Constructions


class Block(nn.Module):
    def __init__(self, width, /, *sizes, act="relu", **more):
        super().__init__()
        self.width, self.more = width, more


class Wider(Block):
    def __init__(self, config, scale=2):
        config = dict(config)
        super().__init__(config["width"] * scale, 1, 2, act="gelu")


class Plain(nn.Module):
    pass


class Around(nn.Module):
    def __init__(self, inner, loss=None):
        super().__init__()
        self.inner = inner


def noted(make):
    made = Constructions()
    before = nn.Module.__init__
    with made.recording():
        module = make()
    assert nn.Module.__init__ is before
    return made, made.of(module), module


def arguments(entry):
    args = [read(one, lambda _module, _name: None) for one in entry["args"]]
    return args, {name: read(one, lambda _module, _name: None) for name, one in entry["kwargs"].items()}


def test_the_outermost_constructor_counts():
    _, entry, _ = noted(lambda: Wider({"width": 4}))
    assert entry["class"].endswith(":Wider")
    assert entry["file"] == __file__
    assert arguments(entry) == ([], {"config": {"width": 4}, "scale": 2})


def test_every_kind_of_parameter():
    assert arguments(noted(lambda: Block(3, 5, 7, act="gelu", bias=True))[1]) == (
        [3, 5, 7],
        {"act": "gelu", "bias": True},
    )
    assert arguments(noted(lambda: Block(3))[1]) == ([3], {"act": "relu"})
    assert arguments(noted(Plain)[1]) == ([], {})


def test_a_module_of_the_users_may_be_an_argument_and_one_of_torchs_is_named():
    made, entry, _ = noted(lambda: Around(Block(3)))
    assert entry["kwargs"]["inner"]["made"]["args"] == [3]
    assert noted(lambda: Around(nn.Linear(2, 2)))[1]["why"] == "a Linear"
    assert made.of(nn.Linear(2, 2)) is None


class Settings:
    def __init__(self):
        self.big = [0.0, 0.0]


def test_nothing_is_kept_alive():
    settings = Settings()
    made = Constructions()
    with made.recording():
        module = Around(None, loss=settings)
    settings.big.append(1.0)
    assert made.of(module)["kwargs"]["loss"]["fields"] == {"big": [0.0, 0.0]}
    there, held = weakref.ref(module), weakref.ref(settings)
    del module, settings
    gc.collect()
    assert there() is None
    assert held() is None
