"""Images of digits beside captions, learned as CLIP learns: two encoders, a contrastive loss, a learned temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from ampdoctor import TrainingRun
from benchmarks.training.gpt import adamw
from benchmarks.training.material import Batch, Batches, digit_batches, warm_up_then_cosine

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = ("a photo of the number {}", "a blurry {}", "the digit {}", "a drawing of a {}", "handwritten {}", "my {}")
WORDS = sorted({word for template in TEMPLATES for word in template.split()} - {"{}"} | set(NAMES))
LONGEST = max(len(template.split()) for template in TEMPLATES)


class Clip(nn.Module):
    """A convolutional image encoder and a transformer over the words of the caption."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 48, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(48, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(256, width),
        )
        self.tokens = nn.Embedding(len(WORDS) + 1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.text = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, width, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) and word indices (batch, LONGEST) to the logits of each pair, (batch, batch)."""
        words = self.text(self.tokens(captions) + self.positions)
        caption = F.normalize(self.project(self.norm(words).mean(dim=1)), dim=-1)
        image = F.normalize(self.image(images), dim=-1)
        return self.logit_scale.exp().clamp(max=100.0) * image @ caption.T


def contrast(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of both cross-entropies, of the caption given the image and the other way round, in nats."""
    logits = model(*batch)
    pairs = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def caption_batches(seed: int, steps: int, size: int) -> Batches:
    """Batches of images with a caption each, as word indices (size, LONGEST); 0 fills up."""

    def batches() -> Iterator[Batch]:
        choice = torch.Generator().manual_seed(seed)
        for images, labels in digit_batches(seed, steps, size)():
            templates = torch.randint(len(TEMPLATES), (size,), generator=choice)
            captions = torch.zeros(size, LONGEST, dtype=torch.long)
            for row, (label, template) in enumerate(zip(labels, templates, strict=True)):
                said = TEMPLATES[int(template)].format(NAMES[int(label)]).split()
                captions[row, : len(said)] = torch.tensor([1 + WORDS.index(word) for word in said])
            yield images, captions

    return batches


def make_run(
    seed: int = 0, precision: str = "fp16", scaler: dict[str, float] | None = None, steps: int = 200
) -> TrainingRun:
    """The run; the arguments are those of `resnet.make_run`."""
    torch.manual_seed(seed)
    model = Clip()
    return TrainingRun(
        model=model,
        batches=caption_batches(seed, steps, size=48),
        loss=contrast,
        optimizer=adamw(model, lr=1e-3, decay=0.2, betas=(0.9, 0.98)),
        scheduler=warm_up_then_cosine(steps),
        precision=precision,
        scaler=scaler or {},
    )
