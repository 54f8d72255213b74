"""What a batch is like: drawn when a model is called with it, told when the step's numbers have arrived."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampdoctor.live.numbers.sampling import strided
from ampdoctor.numerics.tensors import Unseen, is_plain

MOST = 512
"""Elements of a batch: the root mean square of normal ones is known within 6 % at 95 % (1.96 / sqrt(2 * 512))."""
_IDS = frozenset({torch.int64, torch.int32, torch.int16})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReading:
    """What a step's batches are like; None where none was seen, or of ids.

    Attributes:
        elements: Number of their elements, of all micro-steps.
        rms: Root mean square.
        zero_share: Share that is zero.
        fingerprint: CRC-32.
    """

    elements: int | None = None
    rms: float | None = None
    zero_share: float | None = None
    fingerprint: int | None = None


NO_BATCH = BatchReading()


def drawn_from(batch: Tensor) -> Tensor | None:
    """Returns at most `MOST` elements, evenly over memory, in float32 on the batch's device; None where it has none.

    Args:
        batch: Any; a copy is drawn of one that is dense and has numbers or ids.
    """
    if not is_plain(batch) or batch.is_meta or batch.layout is not torch.strided or not batch.numel():
        return None
    if batch.is_complex() or batch.dtype is torch.bool:
        return None
    with Unseen(batch):
        return strided(batch.detach(), MOST).to(torch.float32, copy=True)


def is_numbers(batch: Tensor) -> bool:
    """Whether a batch has numbers, of which one may be larger than another; ids may not."""
    return batch.dtype not in _IDS


def batch_of(drawn: Sequence[Tensor], *, elements: int, numbers: bool) -> BatchReading:
    """Returns what the batches of a step are like.

    Args:
        drawn: Of each, on the CPU.
        elements: That the batches have.
        numbers: They have numbers, and no ids.
    """
    if not drawn:
        return NO_BATCH
    fingerprint, squares, zeros, counted = 0, 0.0, 0, 0
    for one in drawn:
        fingerprint = zlib.crc32(one.numpy().tobytes(), fingerprint)
        if numbers:
            squares += float(one.double().square().sum())
            zeros += int((one == 0).sum())
            counted += one.numel()
    if not counted:
        return BatchReading(elements=elements, fingerprint=fingerprint)
    return BatchReading(
        elements=elements, rms=math.sqrt(squares / counted), zero_share=zeros / counted, fingerprint=fingerprint
    )
