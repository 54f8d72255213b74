from __future__ import annotations

import math

import pytest
import torch

from ampdoctor.live.numbers.norms_and_samples import MOST, Updates, cut, moved, sample
from ampdoctor.live.numbers.readings import tensor_detail


def test_small_tensors_are_counted_whole_and_large_ones_in_all_columns():
    named = [("small", torch.arange(12.0).view(3, 4).t()), ("large", torch.arange(1024.0).repeat(1000, 1))]
    (samples,) = sample(named)
    small, large = cut(samples.plan, samples.buffer)
    assert sorted(small.tolist()) == list(map(float, range(12)))
    assert samples.plan[1].elements == 1024 * 1000
    assert MOST / 2 < large.numel() <= MOST
    assert len(large.unique()) > 900  # a stride of 250 would show 512 columns of 1024


def test_a_gradient_s_figures_are_the_histogram_s_at_the_loss_scale():
    values = torch.tensor([0.0, 0.0, 2.0**-30, 2.0**-20, 1.0, 4.0, math.inf, -1.0])
    (samples,) = sample([("w", values)])
    reading = tensor_detail(
        "gradient", samples.plan[0], samples.buffer, 0, half="fp16", factor=16.0, extremes=torch.tensor([-8.0, 4.0])
    )
    assert (reading.zero_share, reading.nonfinite) == (0.25, 1)
    assert reading.flushed_share == pytest.approx(1 / 5)  # 2^-26; of those that are finite and not zero
    assert reading.amax == 8.0  # the sample's is 4
    assert reading.log2_headroom == pytest.approx(math.log2(65504 / 128))
    assert reading.format == "fp32"


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_updates_are_those_of_the_weights(options):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(300, 300))
    frozen = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([parameter, frozen], lr=1e-2, **options)
    parameter.grad = torch.randn(300, 300)
    before = parameter.detach().clone()
    updates = Updates([("w", parameter), ("frozen", frozen)])
    optimizer.step()
    (change,) = updates.changes()
    weights, changes = (cut(updates.before[0].plan, buffer) for buffer in (updates.before[0].buffer, change))
    figures = moved(weights[0], changes[0])
    assert figures.ratio == pytest.approx(float((parameter.detach() - before).norm() / before.norm()), rel=0.05)
    assert figures.unmoved == 0.0
    still = moved(weights[1], changes[1])
    assert (still.ratio, still.unmoved) == (None, 1.0)


def test_an_optimizer_that_draws_random_numbers_leaves_open_what_did_not_move():
    """Stochastic rounding leaves most weights as they were, and loses nothing."""
    weight = torch.ones(8, dtype=torch.bfloat16)
    said = []
    for draws in (False, True):
        updates = Updates([("w", weight)])
        if draws:
            torch.rand(1)
        (change,) = updates.changes()
        said.append((updates.random, moved(torch.ones(8), change, random=updates.random).unmoved))
    assert said == [(False, 1.0), (True, None)]
