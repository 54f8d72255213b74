"""What the runs learn from: English text and small images that need no download, and the schedule most of them share.

The text is the Python language reference as the standard library carries it, so its wording is that of the
interpreter's version; the images are scikit-learn's handwritten digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Batch = tuple[Tensor, Tensor]
Batches = Callable[[], Iterator[Batch]]


@cache
def characters() -> tuple[Tensor, int]:
    """The text as indices of its characters: ((length,) int64, number of different characters)."""
    text = _text()
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text]), len(alphabet)


@cache
def words() -> tuple[str, ...]:
    """The different lower-case words of 3 to 10 letters in the text, in alphabetical order."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{3,10}\b", _text()))))


@cache
def digits() -> Batch:
    """The images, ((1797, 1, 8, 8) fp32 in 0 to 1), and which digit each shows, ((1797,) int64)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16.0
    return images, torch.from_numpy(data.target).long()


def text_batches(seed: int, steps: int, size: int, context: int) -> Batches:
    """`steps` batches of `size` random windows of the text: ((size, context) inputs, the same shifted by one)."""

    def batches() -> Iterator[Batch]:
        text, _ = characters()
        order = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(text) - context - 1, (size, 1), generator=order)
            windows = text[starts + torch.arange(context + 1)]
            yield windows[:, :-1], windows[:, 1:]

    return batches


def digit_batches(seed: int, steps: int, size: int) -> Batches:
    """`steps` batches of `size` images with their labels; every epoch has an order of its own."""

    def batches() -> Iterator[Batch]:
        images, labels = digits()
        for chosen in drawn(seed, steps, size, len(labels)):
            yield images[chosen], labels[chosen]

    return batches


def drawn(seed: int, steps: int, size: int, length: int) -> Iterator[Tensor]:
    """`steps` times `size` indices below `length`: without repetition within an epoch, whose rest is left out."""
    order = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(left) < size:
            left = torch.randperm(length, generator=order)
        yield left[:size]
        left = left[size:]


def warm_up_then_cosine(steps: int, warm_up: int = 20) -> Callable[[Optimizer], LambdaLR]:
    """The learning rate rises to the optimizer's own over `warm_up` steps and falls to a tenth of it at `steps`."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        through = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * through))

    return lambda optimizer: LambdaLR(optimizer, factor)


@cache
def _text() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
