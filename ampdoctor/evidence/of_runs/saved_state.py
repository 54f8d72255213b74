"""Optimizer state that training in fp32 never leaves behind, as the first step of a replay shows it: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedMoment:
    """A parameter whose second moment holds zeros beside first moments that no rounding explains.

    Attributes:
        name: The parameter's name.
        module: Name of the module that owns it.
        entry: The second moment ("exp_avg_sq").
        dtype: Its dtype without "torch.".
        starved: Number of elements that are zero there and nonzero in the first moment.
        elements: Number of the parameter's elements.
        largest: Largest magnitude of the first moment at such an element.
        epsilon: The optimizer's epsilon.
        update: Norm of the parameter's first update; None where it cannot be measured.
        fresh: Norm of the same update if the parameter's optimizer state is begun anew; None likewise.
    """

    name: str
    module: str
    entry: str
    dtype: str
    starved: int
    elements: int
    largest: float
    epsilon: float
    update: float | None = None
    fresh: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfCounter:
    """A step counter in a half format.

    Attributes:
        name: The parameter's name.
        module: Name of the module that owns it.
        dtype: "bfloat16" or "float16".
        count: Its value before the first step.
        after: Its value after the first step that the optimizer took; None if it took none.
        widened: The same, counted in fp32.
        betas: Decay rates of the optimizer's moments; () for an optimizer without.
    """

    name: str
    module: str
    dtype: str
    count: float
    after: float | None = None
    widened: float | None = None
    betas: tuple[float, ...] = ()

    @property
    def stands(self) -> bool:
        """True if it did not move and does in fp32."""
        return self.after == self.count and self.widened is not None and self.widened > self.count
