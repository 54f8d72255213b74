"""On tensors of a device that has no values, whatever would wait for one raises or is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn.utils import clip_grad, clip_grad_norm_

from ampdoctor.hooks.torch_internals import no_modes
from ampdoctor.live.numbers.async_reader import AsyncReader
from ampdoctor.live.numbers.step_numbers import StepNumbers


class Copy:
    """It is done at the third question."""

    waited = 0

    def __init__(self):
        self.asked = 0

    def query(self):
        self.asked += 1
        return self.asked > 2

    def synchronize(self):
        Copy.waited += 1


def send(tensor, buffer):
    assert tensor.device.type == "cuda"
    with no_modes():
        return torch.ones(tensor.shape, dtype=tensor.dtype) if buffer is None else buffer, Copy()


@pytest.fixture
def ops(monkeypatch):
    """Every op that runs on a fake tensor, with the device types of what it takes and makes."""
    seen = []
    dispatch = FakeTensorMode.dispatch

    def noting(self, func, types, args=(), kwargs=None):
        given = {t.device.type for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        seen.append((str(func), given, set()))  # before it runs, for it may raise
        result = dispatch(self, func, types, args, kwargs)
        made = {t.device.type for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)}
        seen[-1] = (str(func), given, made)
        return result

    monkeypatch.setattr(FakeTensorMode, "dispatch", noting)
    return seen


def waiting(ops):
    """Those that read a value, or bring one to the host by themselves."""
    readers = ("_local_scalar", "nonzero", "is_nonzero", "equal.default", "item")
    return [op for op in ops if any(r in op[0] for r in readers) or ("cuda" in op[1] and "cpu" in op[2])]


def on_gpu(mode, *shape, dtype=torch.float32):
    """A tensor of a GPU that this machine need not have."""
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda:0"))


def loop(numbers, mode, *, steps, max_norm=None, unscaled=True, scaled=True):
    shapes = {"embedding": (16, 8), "weight": (300, 300), "bias": (300,), "number": (), "none": (4,), "nothing": (0,)}
    named = [(name, nn.Parameter(on_gpu(mode, *shape))) for name, shape in shapes.items()]
    named.append(("half", nn.Parameter(on_gpu(mode, 9, 9, dtype=torch.float16))))
    scale = on_gpu(mode) if scaled else None
    for step in range(steps):
        numbers.begin_step(step)
        for name, p in named:
            p.grad = None if name == "none" else on_gpu(mode, *p.shape, dtype=p.dtype)
        numbers.loss(on_gpu(mode, dtype=torch.float16))
        if numbers.looking:
            numbers.incoming("", on_gpu(mode, 4, 300, dtype=torch.float16))
        if unscaled:
            numbers.unscaling(p for _, p in named)
        if max_norm:
            clip_grad_norm_([p for _, p in named], max_norm)
        flag = on_gpu(mode, 1) if scaled else None
        norm = numbers.about_to_step("o", named, number=step, scale=scale, found_inf=flag, unscaled=unscaled)
        assert norm.device.type == "cuda"
        numbers.stepped("o")


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"unscaled": False}, {"scaled": False}])
def test_nothing_waits_for_the_device(options, ops, monkeypatch):
    monkeypatch.setattr(Copy, "waited", 0)
    told, makes = [], []
    numbers = StepNumbers(told.append, makes.append, every=2, later=AsyncReader(send, ahead=8))
    mode = FakeTensorMode()
    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *_: on_gpu(mode))  # torch's own want a real GPU
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", lambda *_: None)
    with numbers.watching():
        loop(numbers, mode, steps=5, **options)
        assert Copy.waited == 0
        assert numbers.failed is None
        assert 0 < len(told) < 5
        assert len({name for name, _, _ in ops}) > 10
        assert waiting(ops) == []
    assert numbers.failed is None
    assert [step.step for step in told] == list(range(5))
    assert [step.max_norm is not None for step in told] == ["max_norm" in options] * 5
    assert len(makes) == 3
    assert [len(make({}, str).tensors) for make in makes] == [6 + 7 + 1] * 3
    assert numbers.lost == 0


def test_the_trap_shuts(ops):
    tensor = on_gpu(FakeTensorMode(), 2)
    with pytest.raises((DataDependentOutputException, RuntimeError)):
        float(tensor)
    tensor.cpu()
    assert "aten._to_copy.default" in {name for name, _, _ in waiting(ops)}
