"""Runs whose shadow steps are looked at: three kinds of network, and habits that a shadow step must survive."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def noise(*shape, steps=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.proj(scores @ v)
        return x + self.down(self.act(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, *, width=32, depth=2, vocabulary=50):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.norm(self.drop(self.blocks(self.tok(ids)))))


def next_token(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def tokens(steps=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (16, 25), generator=generator) for _ in range(steps)]


def transformer(**more):
    torch.manual_seed(0)
    usual = {"batches": tokens(), "loss": next_token, "optimizer": adam, "precision": "fp16", "scaler": {}}
    return TrainingRun(**{"model": Transformer(), **usual, **more})


def convolutions(**more):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    usual = {
        "batches": noise(32, 3, 16, 16),
        "loss": lambda m, x: functional.cross_entropy(m(x).float(), torch.arange(len(x)) % 10),
        "optimizer": sgd,
        "precision": "fp16",
        "scaler": {},
    }
    return TrainingRun(model=model, **{**usual, **more})


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inward, self.lstm = nn.Linear(8, width // 2), nn.LSTM(width // 2, width, num_layers=2, batch_first=True)
        self.outward = nn.Linear(width, 8)

    def forward(self, x):
        return self.outward(self.lstm(self.inward(x))[0])


def lstm(width=32, **more):
    torch.manual_seed(0)
    usual = {
        "batches": noise(16, 12, 8),
        "loss": lambda m, x: (m(x[:, :-1]).float() - x[:, 1:]).square().mean(),
        "optimizer": adam,
        "precision": "fp16",
        "scaler": {},
    }
    return TrainingRun(model=Recurrent(width), **{**usual, **more})


NETWORKS = {"transformer": transformer, "convolutions": convolutions, "lstm": lstm}


def two_optimizers():
    """A step of the user's own, with one optimizer for the blocks and one for the rest."""

    def optimizers(model):
        inner = {id(p) for p in model.blocks.parameters()}
        return {
            "blocks": torch.optim.AdamW(model.blocks.parameters(), lr=1e-3),
            "rest": torch.optim.SGD([p for p in model.parameters() if id(p) not in inner], lr=1e-2),
        }

    def step(model, batch, optimizer, scaler, autocast):
        for each in optimizer.values():
            each.zero_grad()
        with autocast():
            loss = next_token(model, batch)
        scaler.scale(loss).backward()
        for each in optimizer.values():
            scaler.step(each)
        scaler.update()
        return loss

    return transformer(optimizer=optimizers, step=step)


def pure_half():
    """No autocast, no scaler: weights and gradients in fp16."""

    def loss(model, ids):
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    torch.manual_seed(0)
    return transformer(model=Transformer().half(), autocast=False, scaler=None, loss=loss, optimizer=sgd)
