"""What a loop's own code has made of its gradients in one step, beside its scaler."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.evidence.location import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What was done to an optimizer's gradients between two moments.

    Attributes:
        factor: By which all were multiplied, 1.0 where they are as they were; None where that is not one number.
        bound: The magnitude to which each was cut, where they were; None else.
        most: Their largest magnitude before, among the samples.
        norm: Their L2 norm afterwards, of all of them.
    """

    factor: float | None
    bound: float | None
    most: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """A step on gradients of scaled losses alone.

    Attributes:
        step: The step.
        scale: The loss scale.
        unscaled: A scaler has divided the gradients by it.
        by_itself: The optimizer divides them in its own step, or may: it is none of torch's, or a fused one.
        knows_scale: The loop has asked for the scale, and may multiply and divide by it.
        scaled_again: The line that has scaled a loss of which a part was scaled already; None without one.
        before: What was done to the gradients before they were unscaled; None where that is not known.
        after: What was done to them since the backward, or since they were unscaled; None where that is not known.
        clipped: By which `clip_grad_norm_` has multiplied them, 1.0 without one.
        source: The line that makes the step.
    """

    step: int
    scale: float
    unscaled: bool
    by_itself: bool
    knows_scale: bool
    scaled_again: Source | None
    before: Change | None
    after: Change | None
    clipped: float
    source: Source | None
