"""A character transformer of 12 and of 36 layers, trained as nanoGPT trains: pre-norm, tied embedding, AdamW, clipping.

ampdoctor recommend benchmarks/training/gpt.py:make_run_12 --arg seed=1
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.material import Batch, characters, text_batches, warm_up_then_cosine


class Block(nn.Module):
    """Causal self-attention and an MLP of four times the width, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over characters; the projections into the residual stream start smaller the more there are of them."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Indices (batch, context) to logits (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next character, in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def adamw(
    model: nn.Module, lr: float, decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def make_run_12(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """Twelve layers.

    Args:
        seed: Of the initial weights and of the order of the data.
        precision: "fp32", "bf16" or "fp16".
        scaler: Arguments of the GradScaler; None for torch's own defaults.
        steps: Batches that there are, and the length of the schedule.
    """
    return _run(layers=12, width=48, batch=8, seed=seed, precision=precision, scaler=scaler, steps=steps)


def make_run_36(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """Thirty-six layers, narrower; the arguments are those of `make_run_12`."""
    return _run(layers=36, width=32, batch=4, seed=seed, precision=precision, scaler=scaler, steps=steps)


def _run(
    *, layers: int, width: int, batch: int, seed: int, precision: str, scaler: dict[str, float] | None, steps: int
) -> TrainingRun:
    torch.manual_seed(seed)
    context = 32
    _, vocabulary = characters()
    model = GPT(layers, width, heads=4, context=context, vocabulary=vocabulary)
    return TrainingRun(
        model=model,
        batches=text_batches(seed, steps, size=batch, context=context),
        loss=next_character,
        optimizer=adamw(model, lr=1e-3),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        scaler=scaler or {},
        max_grad_norm=1.0,
    )
