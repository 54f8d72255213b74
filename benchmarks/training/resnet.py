"""A ResNet on handwritten digits, trained as on CIFAR: batch norm, SGD with Nesterov momentum, weight decay, cosine."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.material import Batch, digit_batches, warm_up_then_cosine


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut; the last norm starts at zero."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        nn.init.zeros_(self.norm2.weight)
        self.shortcut = (
            nn.Identity()
            if inner == outer and stride == 1
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inner, height, width) to (batch, outer, height / stride, width / stride)."""
        inside = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inside + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of two blocks, global pooling, ten classes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, inner = [], width
        for outer, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            blocks += [Residual(inner, outer, stride), Residual(outer, outer, 1)]
            inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inner, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) to logits (batch, 10)."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the digit, in nats."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of every run here.

    Args:
        seed: Of the initial weights and of the order of the data.
        precision: "fp32", "bf16" or "fp16".
        scaler: Arguments of the GradScaler; None for torch's own defaults.
        steps: Batches that there are, and the length of the schedule.
    """
    torch.manual_seed(seed)
    model = ResNet()
    return TrainingRun(
        model=model,
        batches=digit_batches(seed, steps, size=32),
        loss=classify,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        scaler=scaler or {},
    )
