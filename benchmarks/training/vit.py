"""A vision transformer on handwritten digits: patches of 2x2, label smoothing, AdamW, clipping."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.gpt import adamw
from benchmarks.training.material import Batch, digit_batches, warm_up_then_cosine


class ViT(nn.Module):
    """A class token beside 16 patches, and torch's own encoder."""

    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) to logits (batch, 10)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x)[:, 0]))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Mean smoothed cross-entropy of the digit, in nats."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    model = ViT()
    return TrainingRun(
        model=model,
        batches=digit_batches(seed, steps, size=24),
        loss=classify,
        optimizer=adamw(model, lr=1e-3, decay=0.05, betas=(0.9, 0.999)),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        scaler=scaler or {},
        max_grad_norm=1.0,
    )
