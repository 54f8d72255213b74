"""torch's refusals of half tensors, as training code meets them, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun
from ampdoctor.errors import UserCodeError
from ampdoctor.replay.user_code import explained
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

WIDE = torch.ones(4, 4)
MASK = torch.ones(4, 4).bool()
FIRST = torch.arange(2)


def refusal(code, *arguments):
    with pytest.raises(Exception) as caught:
        code(*arguments)
    return explained(caught.value)


@pytest.mark.parametrize("code", [lambda x: x.masked_fill(MASK, -1e9), lambda x: functional.pad(x, (1, 1), value=-1e9)])
def test_a_constant_beyond_float16(code):
    said = refusal(code, WIDE.half())
    assert "65504" in said
    assert "torch.finfo(x.dtype).min" in said
    assert "3.39e38" in refusal(lambda x: x.masked_fill(MASK, -1e39), WIDE.bfloat16())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "code",
    [
        lambda x: functional.linear(x, WIDE),
        lambda x: functional.conv2d(x[None, None], WIDE[None, None]),
        lambda x: functional.cross_entropy(x, torch.zeros(4).long(), weight=WIDE[0]),
        lambda x: functional.scaled_dot_product_attention(x[None], WIDE[None], WIDE[None]),
        lambda x: functional.binary_cross_entropy(x.sigmoid(), WIDE),
        nn.LSTM(4, 4),
    ],
)
def test_operands_of_two_formats(code, half):
    assert "one operand is half" in refusal(code, WIDE.to(half))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "code",
    [
        lambda x: WIDE.clone().__setitem__(FIRST, x[:2]),
        lambda x: WIDE.clone().index_add_(0, FIRST, x[:2]),
        lambda x: WIDE.clone().scatter_add_(0, torch.zeros(4, 4).long(), x),
        lambda x: WIDE.clone().masked_scatter_(MASK, x),
    ],
)
def test_a_wide_buffer_into_which_half_is_written(code, half):
    assert "source.new_zeros" in refusal(code, WIDE.to(half))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", [torch.linalg.svd, torch.inverse, torch.fft.rfft])
def test_an_op_without_a_half_kernel(code, half):
    assert "no kernel for half" in refusal(code, WIDE.to(half))


def test_numpy_has_no_bfloat16():
    assert ".float().numpy()" in refusal(lambda x: x.numpy(), WIDE.bfloat16())


@pytest.mark.parametrize(
    "code",
    [
        lambda: WIDE @ torch.ones(3, 3),
        lambda: torch.linalg.cholesky(-WIDE),
        lambda: int("half"),
        lambda: WIDE.long() @ WIDE,
    ],
)
def test_other_mistakes_are_not_put_down_to_precision(code):
    assert refusal(code) is None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-2, -1)
        scores = scores.masked_fill(MASK.triu(1), -1e9)  # MASKED
        return self.out(scores.softmax(-1).to(x.dtype) @ x)


def attention(precision):
    torch.manual_seed(0)
    model = Attention()
    return TrainingRun(
        model=model,
        batches=[torch.randn(2, 4, 4)],
        loss=lambda m, x: m(x).float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        precision=precision,
    )


def test_a_large_mask_in_a_step_is_explained_with_its_line():
    with open(__file__, encoding="utf-8") as lines:  # noqa: PTH123 - its own file
        line = next(n for n, text in enumerate(lines, 1) if text.rstrip().endswith("# MASKED"))
    with pytest.raises(UserCodeError) as caught:
        bisect_nan(ReplayRequest(factory=f"{__file__}:attention", arguments={"precision": "fp16"}))
    assert caught.value.explained.startswith(f"test_refusals.py:{line}: a number in this call")
