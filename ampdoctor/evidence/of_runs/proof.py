"""What replayed steps showed, without a change, with it, and in fp32."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """How one replayed step ended, in the numbers that people compare.

    Attributes:
        step: The step.
        loss: As the user's step returned it; None where it returned none.
        scale: Loss scale during the step; None without an enabled scaler.
        gradient_norm: L2 norm of all gradients as the optimizer got them; None where they were not looked at, or no
            optimizer stepped.
        skipped: The scaler skipped it.
        finite: Nothing that harms training was non-finite, in a skipped step either.
    """

    step: int
    loss: float | None
    scale: float | None
    gradient_norm: float | None
    skipped: bool
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The same steps three times, as far as they were replayed.

    Attributes:
        without: As the run is.
        changed: With the change in place.
        fp32: The reference.
    """

    without: tuple[ReplayedStep, ...] = ()
    changed: tuple[ReplayedStep, ...] = ()
    fp32: tuple[ReplayedStep, ...] = ()
