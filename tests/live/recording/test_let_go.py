"""What a watch has put in torch's place may be kept by anybody, and leads to nothing of the loop's afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import ampdoctor


def loop(kept, *, fails):
    """Trains, keeps what stands in torch's place meanwhile, and returns weak references to what is its own."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, x):
            return self.out(x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    kept += [nn.Module.__init__, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, Variable._execution_engine]
    kept += [torch.Tensor.backward, torch.autograd.backward, nn.utils.clip_grad._get_total_norm]
    kept += [nn.utils.clip_grad._clip_grads_with_norm_, _BaseDataLoaderIter.__next__]
    kept += [getattr(torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update")]
    for (batch,) in DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    model(batch)
    if fails:
        model(batch).pow(2).mean().backward()
        with pytest.raises(TypeError):
            optimizer.step("no closure")
        with pytest.raises(RuntimeError):
            model(batch[:, :2])
    return [weakref.ref(one) for one in (model, Net, optimizer, scaler, batch)]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_loop_is_held_by_a_watch_that_is_over(fails, tmp_path):
    kept = []
    with ampdoctor.watch(folder=tmp_path) as watch:
        left = loop(kept, fails=fails)
    gc.collect()
    assert [reference() for reference in left] == [None] * 5
    assert watch.report is None
    x = torch.ones(2, requires_grad=True)
    kept[4](x.sum())  # what was taken meanwhile calls on
    assert x.grad.tolist() == [1.0, 1.0]
