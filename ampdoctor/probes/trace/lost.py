"""What a format loses: elements that are 0 or 1 here and another number in float64 from the same inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampdoctor.probes.ops.arguments import Ran, Split
from ampdoctor.probes.ops.sites import Site

KEPT = 2**16
"""Lost elements that one record keeps; the first ones, where there are more: one is enough to name the op."""


@dataclass(frozen=True, slots=True)
class Maker:
    """What a value came from.

    Attributes:
        made_by: As in `ampdoctor.evidence.of_runs.trace.Operand`.
        site: Where the op ran; None for what was there before the step.
        dtype: The format that it was made in.
        fraction: Share of the result's elements that were lost.
        amax: Largest float64 magnitude among those elements; of elements rounded to one, the smallest.
    """

    made_by: str
    site: Site | None
    dtype: torch.dtype
    fraction: float = 0.0
    amax: float = 0.0


@dataclass(frozen=True, slots=True)
class Lost:
    """Elements of a storage that are 0 or 1 here and something else in float64.

    Attributes:
        maker: The op that lost them.
        places: Their positions in the storage, in elements.
        here: What they are: 0, 1 or -1.
        meant: What they are in float64.
    """

    maker: Maker
    places: torch.Tensor
    here: torch.Tensor
    meant: torch.Tensor


def record_of(result: torch.Tensor, at: torch.Tensor, here: torch.Tensor, meant: torch.Tensor, maker: Maker) -> Lost:
    """Remember lost elements.

    Args:
        result: What an op returned.
        at: Positions of the lost elements, as if the result were contiguous.
        here: Their values, in float64.
        meant: What they are without the loss, in float64.
        maker: The op that lost them.
    """
    left = at[:KEPT]
    places = torch.zeros_like(left).add_(result.storage_offset())
    for length, stride in zip(reversed(result.shape), reversed(result.stride()), strict=True):
        places += left % length * stride
        left = left // length
    return Lost(maker, places, here[:KEPT], meant[:KEPT])


def outside(lost: Lost, tensor: torch.Tensor) -> Lost | None:
    """What is left of a record after the tensor has been written."""
    size = int(tensor.untyped_storage().nbytes()) // tensor.element_size()
    if tensor.numel() >= size and tensor.is_contiguous():
        return None
    written = torch.zeros((size,), dtype=torch.bool, device=tensor.device)
    written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    keep = lost.places < size
    keep &= ~written[lost.places.clamp(max=size - 1)]
    if not bool(keep.any()):
        return None
    return Lost(lost.maker, lost.places[keep], lost.here[keep], lost.meant[keep])


def loser(ran: Ran, result: torch.Tensor, meant: torch.Tensor, *, zero: bool) -> Maker:
    """The op as the one that lost these elements: rounded to one, flushed, or an epsilon that was flushed.

    Args:
        ran: The op.
        result: What it returned.
        meant: The lost elements in float64.
        zero: They are 0 here; otherwise 1.
    """
    values = meant.abs()
    share = len(meant) / result.numel()
    if not zero:
        # of values that round to 1 the one farthest from it says most
        return Maker("rounded_to_one", ran.site, result.dtype, share, float(values.min()))
    numbers = [abs(number) for number, rounded in lost_numbers(ran.call, result.dtype, ran.kernel) if not rounded]
    epsilon = any(bool((values == number).any()) for number in numbers)
    return Maker("flushed_epsilon" if epsilon else "flushed", ran.site, result.dtype, share, float(values.max()))


LITERALS = {"binary_cross_entropy_backward": (1e-12,)}
"""Numbers that kernels of torch have in their code: `EPSILON` of aten/src/ATen/native/Loss.cpp and cuda/Loss.cu."""


def lost_numbers(call: Split, dtype: torch.dtype, kernel: str) -> Iterator[tuple[float, float]]:
    """Numbers that the format rounds to 0, 1 or -1, each with what it becomes.

    Args:
        call: The op's arguments.
        dtype: The format.
        kernel: The op's name, by which numbers in its own code are known.
    """
    for item in (*call.args, *call.kwargs.values(), LITERALS.get(kernel, ())):
        for value in item if isinstance(item, list | tuple) else (item,):
            number = float(value.detach()) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(number, float) and math.isfinite(number) and number:
                rounded = float(torch.tensor(number, dtype=torch.float64).to(dtype))
                if rounded in (0.0, 1.0, -1.0) and rounded != number:
                    yield number, rounded
