"""Replayed steps without a change, with it, and in fp32."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """How one replayed step ended, in the numbers that people compare.

    Attributes:
        step: The step.
        loss: As the user's step returned it; None if it returned none.
        scale: Loss scale during the step; None without an enabled scaler.
        gradient_norm: L2 norm of all gradients that the optimizer got; None if they were not recorded, or no optimizer
            stepped.
        skipped: True if the scaler skipped it.
        finite: True if nothing that harms training was non-finite, also in a skipped step.
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
        without: The run as it is.
        changed: The run with the change.
        fp32: The reference.
    """

    without: tuple[ReplayedStep, ...] = ()
    changed: tuple[ReplayedStep, ...] = ()
    fp32: tuple[ReplayedStep, ...] = ()
