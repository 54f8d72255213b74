"""Facts about a run's modules and its updates, besides their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ampdoctor.evidence.codec import Count, Fraction

OVERFLOWED = 2.0**128
"""Stands for a magnitude that left its format: finite, because it is written to JSON, and larger than every format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module that computed something in its own forward.

    Attributes:
        name: As in `named_modules()`; "" is the model itself, or the loss and the loop's own code.
        type: Name of its class ("LayerNorm").
        parameters: Number of elements of its own parameters, without its children's.
        ops: Ops of its own forward, without its children's: each user-level op ("linear", "softmax",
            "scaled_dot_product_attention") with the narrowest format that one of its calls computed in ("fp16", "bf16",
            "fp32", "fp64").
        logits_amax: Largest magnitude of the logits of an attention or a softmax in it, without what is masked out;
            2^128 (`OVERFLOWED`) if one was infinite; None without logits.
        product_amax: Largest magnitude of the result of its own matrix product or convolution in a half format, before
            any scaling or mask; 2^128 if it overflowed; None without such a product.
        gemm_multiple_of_16: True if all dimensions of its products with a matrix of weights are multiples of 16, as FP8
            kernels need; None without such a product.
        gemm_smallest: The smallest dimension of those matrices; None without such a product.
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
    """The effect of an optimizer step on a parameter that is kept in bf16, over the examined steps.

    Attributes:
        name: The parameter's name.
        optimizer: Full name of the optimizer's class ("torch.optim.adamw.AdamW").
        steps: Number of examined steps.
        elements: Number of examined elements in all steps; an update that is not finite is left out.
        updated: Share of them that the fp32 step changes.
        stagnant: Share of those whose bf16 weight stays as it is (the update is below half an ulp).
        size: Norm of the fp32 update, all steps together.
        lost: Norm of the difference between the bf16 and the fp32 update, over `size`; 0.0 if nothing changes.
        log2_ratio: Median log2 of |update| / |weight| over elements where both are nonzero, of a random 2^14 in each
            step where there are more; None without such elements.
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
