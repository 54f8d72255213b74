"""What is known of a run's modules and of its updates, beside their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampdoctor.evidence.codec import Count, Fraction

OVERFLOWED = 2.0**128
"""Stands for a magnitude that left its format: finite, as a file of JSON values wants, and beyond every format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module that computed something in its own forward.

    Attributes:
        name: As in `named_modules()`; "" is the model itself, or the loss and the loop's own code.
        type: Name of its class ("LayerNorm").
        parameters: Elements of its own parameters, its children's not counted.
        ops: What ran in its own forward, not in its children's: the user-level op ("linear", "softmax",
            "scaled_dot_product_attention") to the narrowest format that one of its calls computed in ("fp16", "bf16",
            "fp32", "fp64").
        logits_amax: Largest magnitude of the logits that an attention or a softmax in it took, what is masked out left
            aside; 2^128 (`OVERFLOWED`) where one was infinite; None where it took none.
        product_amax: Largest magnitude of what a matrix product or convolution of its own made in a half format, before
            any scaling or mask; 2^128 where it overflowed; None where it has no such product.
        gemm_multiple_of_16: All dimensions of its products with a matrix of weights are multiples of 16, as FP8 kernels
            want; None where it has no such product.
        gemm_smallest: The smallest dimension of those matrices; None where it has no such product.
    """

    name: str
    type: str
    parameters: Count = 0
    ops: Mapping[str, str] = field(default_factory=dict)
    logits_amax: float | None = None
    product_amax: float | None = None
    gemm_multiple_of_16: bool | None = None
    gemm_smallest: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """What an optimizer step would do to a parameter that is kept in bf16, over the steps that were looked at.

    Attributes:
        name: Of the parameter.
        optimizer: Full name of the optimizer's class ("torch.optim.adamw.AdamW").
        steps: Steps looked at.
        elements: Elements looked at, those steps together; an update that is not finite is left out.
        updated: Share of them that the fp32 step changes.
        stagnant: Of those, the share whose bf16 weight stays as it is (the update is below half an ulp).
        size: Norm of the fp32 update, those steps together.
        lost: Norm of the difference between the bf16 update and the fp32 one over `size`; 0.0 where nothing changes.
        log2_ratio: Median log2 of |update| / |weight| over elements where both are nonzero; None where there are none.
    """

    name: str
    optimizer: str
    steps: Count
    elements: Count
    updated: Fraction
    stagnant: Fraction
    size: float
    lost: float
    log2_ratio: float | None
