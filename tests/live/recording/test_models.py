from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ampdoctor.live.recording.models import OutermostModels


class Heard:
    """Notes the calls: the model's class and whether it returned."""

    def __init__(self):
        self.calls = []

    def entered(self, module):
        pass

    def left(self, module, _args, _kwargs, output):
        self.calls.append((type(module).__name__, output is not None))


class Stops(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *, stop):
        if stop:
            raise StopIteration
        return self.inner(x)


def test_a_forward_that_raises_is_left_without_a_warning():
    heard, model = Heard(), Stops()
    with warnings.catch_warnings(), OutermostModels(heard).watching():
        warnings.simplefilter("error")
        with pytest.raises(StopIteration):
            model(torch.zeros(1, 2), stop=True)
        model(torch.zeros(1, 2), stop=False)
    assert heard.calls == [("Stops", False), ("Stops", True)]
