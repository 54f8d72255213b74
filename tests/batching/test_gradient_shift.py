"""By how much gradients move, beside what autograd gives for the same samples cut in another way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ampdoctor.batching.plans import BatchPlan, gradient_shift

WIDTH = 3
LENGTHS = (5, 2, 7, 3, 6, 1, 4, 8, 2, 5, 3, 7, 1, 6, 8, 4)
"""Tokens of each of the 16 samples of a global batch."""


def plan(micro, accumulation, ranks=1):
    return BatchPlan(micro_batch=micro, accumulation=accumulation, data_parallel=ranks)


def losses_of(reduction, parts, cut):
    """The loss of one micro-batch, from its samples' losses by token, as each kind of training writes it."""
    every = torch.cat(parts)
    if reduction == "sum":
        return every.sum()
    if reduction == "tokens":
        return every.sum() * cut.data_parallel / sum(LENGTHS)
    if reduction == "step":
        return every.sum() / sum(LENGTHS)
    return torch.stack([part.mean() for part in parts]).mean() / cut.accumulation


def local_gradients(cut, reduction, samples):
    """By sample, the gradients of what the layer puts out; by backward, those of its weight; all ranks' together."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False).double()
    activations, weights = [], []
    for begin in range(0, len(samples), cut.micro_batch):
        outputs = [layer(sample) for sample in samples[begin : begin + cut.micro_batch]]
        for output in outputs:
            output.retain_grad()
        layer.weight.grad = None
        losses_of(reduction, [output.square().sum(-1) for output in outputs], cut).backward()
        activations += [output.grad for output in outputs]
        weights.append(layer.weight.grad)
    return activations, weights


def binades(smaller, larger):
    return math.log2(float(torch.stack([t.norm() for t in larger]).mean())) - math.log2(
        float(torch.stack([t.norm() for t in smaller]).mean())
    )


PAIRS = [
    (plan(4, 1, 4), plan(4, 2, 2)),
    (plan(4, 1, 4), plan(8, 1, 2)),
    (plan(1, 4, 4), plan(16, 1, 1)),
    (plan(2, 8), plan(4, 1, 4)),
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "tokens", "step"])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_samples_activation_gradient_moves_exactly_so_far(before, after, reduction):
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn(length, WIDTH, generator=generator, dtype=torch.float64) for length in LENGTHS]
    (old, _), (new, _) = (local_gradients(cut, reduction, samples) for cut in (before, after))
    moved = gradient_shift(before, after, reduction).activation
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one * 2.0**-moved, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "tokens", "step"])
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_weight_gradients_of_samples_that_agree_move_exactly_so_far(before, after, reduction):
    alike = [torch.arange(1.0, WIDTH + 1.0, dtype=torch.float64).expand(1, WIDTH)] * len(LENGTHS)
    (_, old), (_, new) = (local_gradients(cut, reduction, alike) for cut in (before, after))
    moved = gradient_shift(before, after, reduction).weight
    torch.testing.assert_close(new[0], old[0] * 2.0**-moved, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "tokens", "step"])
@pytest.mark.parametrize(("before", "after"), [(plan(4, 1, 64), plan(64, 1, 4)), (plan(16, 4, 4), plan(1, 64, 4))])
def test_weight_gradients_of_independent_samples_move_by_the_root(before, after, reduction):
    generator = torch.Generator().manual_seed(2)

    def sums(cut):
        """What one backward sums where each sample's gradient is a random direction."""
        noise = torch.randn(cut.global_batch, 32, generator=generator, dtype=torch.float64)
        factor = 1.0 if reduction in ("sum", "step") else 1.0 / (cut.micro_batch * cut.accumulation)
        return [part.sum(0) * factor for part in noise.split(cut.micro_batch)]

    shift = gradient_shift(before, after, reduction)
    assert binades(sums(after), sums(before)) == pytest.approx(shift.weight_noise, abs=0.1)
    assert abs(shift.weight - shift.weight_noise) > 1.9  # so that the test can tell them apart
