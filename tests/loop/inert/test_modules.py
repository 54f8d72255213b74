"""Modules are put together of what they hold, and no constructor runs."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from ampdoctor.hooks.json_values import NotSerializableError, UnreadableTreeError, module_read, module_written


class Agent(nn.Module):
    """Is made of what nobody can write down."""

    def __init__(self, environment):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(environment.inputs(), 3), nn.BatchNorm1d(3), nn.Tanh())
        self.scale = 2.5
        self.critic = None

    def forward(self, x):
        return self.actor(x) * self.scale


class Environment:
    def inputs(self):
        return 4


def there(tree):
    return module_written_back(tree, lambda module, name: vars(sys.modules[module])[name])


def module_written_back(tree, find):
    module, _, name = tree["class"].partition(":")
    return module_read(tree, find(module, name), find, lambda part: module_written_back(part, find))


def written(module):
    return module_written(module, written)


def test_a_module_comes_back_without_its_constructor():
    torch.manual_seed(0)
    agent = Agent(Environment())
    again = there(written(agent))
    assert str(again) == str(agent)
    assert (again.scale, again.critic) == (2.5, None)
    assert {name: p.shape for name, p in again.named_parameters()} == {n: p.shape for n, p in agent.named_parameters()}
    again.load_state_dict(agent.state_dict(), strict=False)
    again.actor[1]._buffers.update(agent.actor[1]._buffers)
    x = torch.randn(5, 4)
    assert torch.equal(again(x), agent(x))


def test_hooks_tensors_and_classes_without_a_name_are_not_written():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    loose = nn.Linear(2, 2)
    loose.held = [torch.ones(1)]

    class Local(nn.Module):
        pass

    for module in (hooked, loose, Local()):
        with pytest.raises(NotSerializableError):
            written(nn.Sequential(module))


@pytest.mark.parametrize(
    "edit",
    [
        {"fields": {"forward": 1}},
        {"fields": {"_parameters": {"kind": "dict", "items": []}}},
        {"fields": {"__class__": 1}},
        {"fields": []},
        {"parameters": {"weight": [-1]}},
        {"parameters": {"weight": [2**40, 2**40]}},
        {"buffers": [3]},
        {"modules": {"": None}},
    ],
)
def test_what_is_no_module_is_refused(edit):
    with pytest.raises((UnreadableTreeError, KeyError)):
        there({**written(nn.Linear(2, 2)), **edit})
