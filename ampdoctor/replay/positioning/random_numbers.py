"""Brings the process's random generators to where a checkpoint's were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ampdoctor.checkpoints.standing import RandomNumbers


def set_generators(saved: RandomNumbers) -> None:
    """Set the generators whose states were saved."""
    import numpy as np

    if saved.torch is not None:
        torch.set_rng_state(saved.torch)
    if saved.python is not None:
        random.setstate(saved.python)
    if saved.numpy is not None:
        np.random.set_state(saved.numpy)  # noqa: NPY002 - the global one is what user code draws from


def not_restored(saved: RandomNumbers, device: str) -> Iterator[str]:
    """Yields what of the random numbers (dropout, augmentation) is another than in the training, a clause each."""
    if saved.torch is None:
        yield "the file holds no random state of torch: random numbers (dropout) are others than the training's"
    if saved.of_devices and device == "cpu":
        yield "random numbers that the training drew on its GPU (dropout) are others here: a CPU draws its own"
