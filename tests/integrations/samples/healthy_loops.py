"""Tests of a user, all of them well: what is non-finite in them harms nothing."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.amp_finite


def small():
    linear = nn.Linear(3, 3)
    return linear, torch.optim.SGD(linear.parameters(), 0.1)


def test_without_torch():
    assert sum([1, 2]) == 3


def test_infinity_that_no_loss_depends_on():
    assert torch.log(torch.zeros(3)).exp().sum() == 0


def test_attention_with_a_causal_mask():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    optimizer = torch.optim.SGD(attention.parameters(), 0.1)
    x = torch.randn(2, 4, 8)
    mask = torch.full((4, 4), float("-inf")).triu(1)
    for _ in range(2):
        optimizer.zero_grad()
        attention(x, x, x, attn_mask=mask)[0].sum().backward()
        optimizer.step()


def test_loop_that_looks_before_it_propagates():
    linear, optimizer = small()
    for factor in (1.0, float("inf"), 1.0):
        loss = linear(torch.ones(2, 3)).sum() * factor
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()


def test_gradients_that_are_looked_at_and_not_used():
    linear, optimizer = small()
    for factor in (1.0, 3e38, 1.0):
        optimizer.zero_grad()
        (linear(torch.full((2, 3), 0.1)) * factor).tanh().sum().backward()
        norm = nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()


def test_a_saliency_map_of_what_is_not_finite():
    linear, _ = small()
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(linear(x).mul(0).log().sum(), x)


def test_tensors_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        linear, optimizer = small()
        linear(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_an_update_by_hand():
    linear, _ = small()
    linear(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.sub_(parameter.grad * 0.1)


def test_no_gradients_at_all():
    with torch.inference_mode():
        assert nn.Linear(3, 3)(torch.ones(2, 3)).shape == (2, 3)
