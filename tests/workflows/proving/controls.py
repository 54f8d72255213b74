"""Healthy runs that look alarming: masks of every make, in every precision."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun

WIDTH = 16
LENGTH = 6


def causal():
    return torch.ones(LENGTH, LENGTH).triu(1).bool()


def filled(scores, value):
    return scores.masked_fill(causal(), value)


def added(scores, value):
    return scores + torch.zeros(LENGTH, LENGTH, dtype=scores.dtype).masked_fill(causal(), value)


MASKS = {
    "inf_filled": lambda scores, _: filled(scores, -math.inf),
    "inf_added": lambda scores, _: added(scores, -math.inf),
    "min_added": lambda scores, _: added(scores, torch.finfo(scores.dtype).min),
    "fp32_min_added": lambda scores, _: (
        scores + torch.zeros(LENGTH, LENGTH).masked_fill(causal(), torch.finfo(torch.float32).min)
    ),
    "where": lambda scores, _: torch.where(causal(), torch.tensor(-math.inf, dtype=scores.dtype), scores),
    "buffer": lambda scores, buffer: scores + buffer.to(scores.dtype),
    "python_number": lambda scores, _: scores - 1e9 * causal(),
    "sdpa": None,
    "full_row": lambda scores, _: filled(scores, -math.inf).index_fill(-2, torch.tensor([2]), -math.inf),
}


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = mask
        self.register_buffer("bias", torch.zeros(LENGTH, LENGTH).masked_fill(causal(), -math.inf))
        self.register_buffer("low", torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.mask == "sdpa":
            return self.out(functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias.to(q.dtype)))
        scores = MASKS[self.mask](q @ k.transpose(-1, -2) / 4, self.bias)
        return self.out(scores.softmax(-1).to(v.dtype) @ v)


class Model(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.attention = Attention(mask)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.attention(x)))


def loss(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def make_run(mask: str, precision: str, *, pure: bool = False):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(mask)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    if pure and half is not None:
        model.to(half)
    return TrainingRun(
        model=model,
        batches=[torch.randint(0, 11, (3, LENGTH), generator=generator) for _ in range(2)],
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        precision=precision,
        autocast=not pure,
        scaler={"init_scale": 1024.0} if precision == "fp16" and not pure else None,
    )
