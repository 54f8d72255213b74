"""What a loop's own code did to its gradients in one step, beside its scaler."""

from __future__ import annotations

from dataclasses import dataclass

from ampdoctor.evidence.location import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of an optimizer's gradients between two moments."""

    factor: float | None  # of all gradients, 1.0 if unchanged; None if it is not one number
    bound: float | None  # magnitude to which each was clipped, if any
    most: float  # largest magnitude before, among the samples
    norm: float  # L2 norm of all of them afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """A step on gradients of scaled losses alone.

    `by_itself` says that the optimizer divides the gradients in its own step, or may: it is none of torch's, or a fused
    one. `scaled_again` is the line that scaled a loss of which a part was scaled already. `before` and `after` are
    changes of the gradients before they were unscaled, and since the backward or the unscaling; None if unknown.
    """

    step: int
    scale: float  # the loss scale
    unscaled: bool  # a scaler has divided the gradients by it
    by_itself: bool
    knows_scale: bool  # the loop has read it, and may multiply and divide by it
    scaled_again: Source | None
    before: Change | None
    after: Change | None
    clipped: float  # factor of `clip_grad_norm_`; 1.0 without one
    source: Source | None  # the line that makes the step
