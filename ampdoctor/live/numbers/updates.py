"""How far an optimizer's step moves each parameter, from the same few elements before and after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampdoctor.hooks.torch_internals import no_modes
from ampdoctor.live.numbers.sampling import Samples, sample
from ampdoctor.numerics.tensors import Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One parameter in one step.

    Attributes:
        ratio: L2 norm of the update over that of the parameter before, of the sampled elements; None where the
            parameter is zero there, or one of the two is not finite.
        unmoved: Share of the sampled elements that the step left as they were; None where the optimizer draws random
            numbers: stochastic rounding leaves most weights as they were, and loses nothing.
    """

    ratio: float | None
    unmoved: float | None


class Updates:
    """Samples parameters when a step is about to be taken; no more of them is ever copied.

    An optimizer's step is seen whole: decay and update in one, foreach or fused, in place or by a new tensor in
    `parameter.data`. Of a step that is skipped, on the host or on the device, nothing moves.

    Args:
        named: Name and parameter.

    Attributes:
        before: By device, before the step.
        random: Random numbers were drawn between `before` and `changes`.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self.before: list[Samples] = sample(named)
        self.random = False
        self._generators = _states(self.before)

    def changes(self) -> list[Tensor]:
        """Returns what the step has added to the elements of each of `before`, on the device.

        A parameter whose shape or dtype the step has changed makes its device's update NaN.
        """
        found = []
        self.random = _states(self.before) != self._generators
        for before, after in zip(self.before, sample(self._named), strict=True):
            with Unseen(before.buffer):
                same = before.plan == after.plan
                found.append(after.buffer - before.buffer if same else torch.full_like(before.buffer, math.nan))
        return found


def _states(samples: Sequence[Samples]) -> list[bytes]:
    """The states of the generators of the samples' devices, and of the CPU's; on the host, nothing waits."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        devices = sorted({one.buffer.device.index or 0 for one in samples if one.buffer.device.type == "cuda"})
        generators += [torch.cuda.default_generators[index] for index in devices]
    with no_modes():
        return [generator.get_state().numpy().tobytes() for generator in generators]


def moved(before: Tensor, change: Tensor, *, random: bool = False) -> Moved:
    """Returns the figures of one parameter.

    Args:
        before: Its sampled elements before the step, on the CPU.
        change: What the step has added to each.
        random: The optimizer draws random numbers.
    """
    weight, update = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in (before, change))
    known = weight > 0.0 and math.isfinite(weight) and math.isfinite(update)
    still = int((change == 0.0).sum()) / max(change.numel(), 1)
    return Moved(ratio=update / weight if known else None, unmoved=None if random else still)
