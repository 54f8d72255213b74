"""Whose memory it is, where several tensors lie in one."""

from __future__ import annotations

import torch
from torch import nn

from tests.probes.traced import births_of


class Flat(nn.Module):
    """Two weights in one buffer, as flat optimizers and gradient buckets lay them."""

    def __init__(self, sick):
        super().__init__()
        memory = torch.ones(8)
        memory[4 * sick] = float("nan")
        self.first, self.second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])

    def forward(self, x):
        return (x * self.first).sum() + (x * self.second).sum()


def test_a_sick_weight_is_not_taken_for_its_neighbour():
    for sick, name in enumerate(("first", "second")):
        births = births_of(Flat(sick), lambda model, x: model(x), torch.ones(4))
        assert {birth.where.tensor for birth in births if birth.origin == "param"} == {name}
