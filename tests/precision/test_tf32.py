from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampdoctor.precision.spec import round_to_tf32, tf32


def exact(value):
    """TF32 by arithmetic in fp64: 10 bits after the leading one, ties to even, subnormals at fp32's exponent."""
    if value == 0 or not np.isfinite(value):
        return value
    exponent = max(np.floor(np.log2(abs(value))), -126.0)
    quantum = 2.0 ** (exponent - 10)
    return float(np.rint(value / quantum) * quantum)


@given(st.floats(width=32, allow_nan=False, allow_infinity=True))
def test_against_arithmetic(value):
    rounded = round_to_tf32(torch.tensor([value])).item()
    expected = exact(float(np.float32(value)))
    if abs(expected) >= 2.0**128:
        expected = np.copysign(np.inf, expected)
    assert rounded == expected
    assert np.signbit(rounded) == np.signbit(value)


def test_special_values():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4028235e38])
    nan_payload = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    rounded = round_to_tf32(special)
    assert rounded[0].isnan()
    assert rounded[1:].tolist() == [float("inf"), -float("inf"), 0.0, -0.0, float("inf")]
    assert bool(round_to_tf32(nan_payload).isnan().all())
    assert round_to_tf32(torch.zeros(0)).shape == (0,)
    assert round_to_tf32(torch.tensor(1.0)).shape == ()


def test_other_layouts_and_no_other_dtype():
    x = torch.rand(5, 7)
    assert torch.equal(round_to_tf32(x.t()), round_to_tf32(x).t())
    with pytest.raises(TypeError, match="float32"):
        round_to_tf32(torch.ones(1, dtype=torch.float16))


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (torch.mm, [(4, 5), (5, 6)]),
        (torch.bmm, [(2, 4, 5), (2, 5, 6)]),
        (torch.matmul, [(2, 3, 4, 5), (5, 6)]),
        (nn.functional.linear, [(2, 3, 5), (6, 5)]),
        (nn.functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
        (nn.functional.conv_transpose1d, [(2, 3, 8), (3, 4, 3)]),
    ],
)
def test_operands_are_rounded_forward_and_backward(call, shapes):
    a, b = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    with tf32():
        y = call(a, b)
        upstream = torch.randn_like(y)
        y.backward(upstream)
    ra, rb = (round_to_tf32(t).requires_grad_() for t in (a, b))
    reference = call(ra, rb)
    reference.backward(round_to_tf32(upstream))
    torch.testing.assert_close(y, reference, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.grad, ra.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(b.grad, rb.grad, rtol=1e-6, atol=1e-6)
    plain = call(a.detach(), b.detach())
    assert (y - plain).abs().max() > 1e-5  # and without it, not


def test_the_bias_is_not_rounded():
    bias = torch.tensor([1 + 2**-20])
    with tf32():
        assert torch.addmm(bias, torch.zeros(1, 1), torch.zeros(1, 1)).item() == 1 + 2**-20


def test_attention_and_other_dtypes():
    q = torch.randn(1, 2, 4, 8)
    r = round_to_tf32(q)
    with tf32():
        got = nn.functional.scaled_dot_product_attention(q, q, q)
        half = torch.mm(torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2, dtype=torch.float16))
        double = torch.full((1, 1), 1 + 2**-30, dtype=torch.float64)
        assert torch.equal(torch.mm(double, torch.ones_like(double)), double)
    assert half.dtype is torch.float16
    torch.testing.assert_close(got, nn.functional.scaled_dot_product_attention(r, r, r), rtol=2e-3, atol=2e-3)
    assert not torch.equal(got, nn.functional.scaled_dot_product_attention(q, q, q))


def test_a_recurrent_network_runs():
    lstm = nn.LSTM(4, 3)
    x = torch.randn(5, 2, 4)
    with tf32():
        y = lstm(x)[0]
        y.sum().backward()
    assert not torch.equal(y, lstm(x)[0])
    torch.testing.assert_close(y, lstm(x)[0], rtol=1e-2, atol=1e-3)
