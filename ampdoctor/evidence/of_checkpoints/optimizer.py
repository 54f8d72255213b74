"""Facts about an optimizer's saved state besides the values of its moments: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """Settings of one parameter group; None if the group has no such number.

    Attributes:
        learning_rate: `lr`.
        betas: Decay rates of the moments; () for an optimizer without.
        epsilon: `eps`.
        weight_decay: `weight_decay`.
        fused: True for the fused implementation, which computes in fp32 whatever the state's dtype.
        capturable: True for one that CUDA graphs can record; torch loads its step counters, and a fused one's, as fp32.
        parameters: Number of parameters in the group.
    """

    learning_rate: float | None = None
    betas: tuple[float, ...] = ()
    epsilon: float | None = None
    weight_decay: float | None = None
    fused: bool = False
    capturable: bool = False
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StarvedMoment:
    """A second moment that holds zeros at elements where its first moment does not.

    Attributes:
        name, module, group, file: As in `TensorSummary`.
        entry: The second moment ("exp_avg_sq").
        dtype: Its stored dtype without "torch.".
        starved: Number of elements that are zero there and nonzero in the first moment.
        examined: Number of compared elements.
        largest: Largest magnitude of the first moment at such an element; 0.0 without one.
    """

    name: str
    module: str
    group: str
    file: str
    entry: str
    dtype: str
    starved: int
    examined: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSummary:
    """An optimizer's state in numbers.

    Attributes:
        path: Its path ("optimizer"), with its file if several have one path.
        groups: Its parameter groups.
        steps: Number of parameters by number of steps, as (step, parameters), ascending.
        step_dtypes: Dtypes of the step counters that are tensors, without "torch.".
        starved: Second moments that may hold zeros beside nonzero first moments, with what was found there.
    """

    path: str
    groups: tuple[OptimizerGroup, ...] = ()
    steps: tuple[tuple[float, int], ...] = ()
    step_dtypes: tuple[str, ...] = ()
    starved: tuple[StarvedMoment, ...] = ()
