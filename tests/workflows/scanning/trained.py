"""Tiny models that are really trained, and their checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn


class Tiny(nn.Module):
    """A norm, two matrices and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.gelu(self.norm(self.inner(x))))


class Training:
    """A training that can be saved at any time."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, lr: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.model = Tiny().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")
        self.dtype = dtype
        self.step = 0

    def run(self, steps: int) -> Training:
        for _ in range(steps):
            x = torch.randn(32, 16, dtype=self.dtype)
            loss = (self.model(x) - x[:, :4].tanh()).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = float(loss.detach())
            self.step += 1
        return self

    def poison(self) -> Training:
        with torch.no_grad():
            self.model.inner.weight[3, 5] = math.nan
        return self

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "global_step": self.step,
            "loss": self.loss,
        }

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.state(), path)
        return path
