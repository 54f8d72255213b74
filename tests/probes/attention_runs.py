"""Small runs whose modules compute what the advice on precision speaks of; factories, as a user would write them."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun

VOCABULARY = 32


class Attention(nn.Module):
    """Causal, with 4 heads: fused, or written out."""

    def __init__(self, width, *, fused, gain=1.0):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.fused, self.gain = fused, gain

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, 4, width // 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q = q * self.gain
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = (q @ k.transpose(-1, -2)) / (width // 4) ** 0.5
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            mixed = logits.masked_fill(later, torch.finfo(logits.dtype).min).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, n, width))


class RMSNorm(nn.Module):
    """Written out, its mean taken in the input's own format."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype) * self.weight


class Transformer(nn.Module):
    def __init__(self, *, fused=True, width=32, gain=1.0):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, fused=fused, gain=gain)
        self.up = nn.Linear(width, 2 * width)
        self.rms = RMSNorm(2 * width)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.attn(self.norm(x))
        return self.head(self.rms(self.up(x)))


def cross_entropy(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def transformer(*, fused=True, gain=1.0, precision="fp16", pure=False, lr=1e-3, length=17, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = Transformer(fused=fused, gain=gain)
    if pure:
        model = model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=model,
        batches=[torch.randint(0, VOCABULARY, (4, length), generator=generator) for _ in range(3)],
        loss=cross_entropy,
        optimizer=lambda m: optimizer(m.parameters(), lr=lr),
        precision=precision,
        autocast=not pure,
        scaler={"init_scale": 1024.0} if precision == "fp16" else None,
    )


def conv():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    return TrainingRun(
        model=model,
        batches=[(images, labels)],
        loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]).float(), batch[1]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        precision="fp16",
        scaler={"init_scale": 1024.0},
    )
