"""The gradients that come back to models' outputs, of which half loses some before any layer has seen them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ampdoctor.live.numbers.sampling import Sampled, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A gradient that has come back to an output.

    Attributes:
        module: Name of the module; "" is the model itself.
        part: "output" or "input".
        call: Number of the module's call in the step, from 0.
        sampled: What stands for it in `values`.
        values: A copy of its sampled elements, one-dimensional and on its device. They carry the loss scale.
    """

    module: str
    part: str
    call: int
    sampled: Sampled
    values: Tensor


def arrived(module: str, gradient: Tensor, *, part: str = "output", call: int = 0) -> Arrived | None:
    """Returns a copy of a few thousand elements, without waiting for the device; None where there is nothing to count.

    Args:
        module: Name of the module.
        gradient: Any shape, layout and device; as the backward delivers it.
        part: "output" or "input".
        call: Number of the module's call.
    """
    if not (gradient.is_floating_point() or gradient.is_complex()) or gradient.is_meta or not gradient.numel():
        return None
    (samples,) = sample([(module, gradient)])
    return Arrived(module=module, part=part, call=call, sampled=samples.plan[0], values=samples.buffer)
