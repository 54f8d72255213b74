"""What is known of a run's modules and of its updates, beside their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module that was run.

    Attributes:
        name: As in `named_modules()`; "" is the model itself, or the loss and the loop's own code.
        type: Name of its class ("LayerNorm").
        parameters: Elements of its own parameters, its children's not counted.
        ops: What ran in its own forward, not in its children's: the user-level op ("linear", "softmax",
            "scaled_dot_product_attention") to the dtype that autocast had it compute in ("fp16", "bf16", "fp32").
        logits_amax: Largest magnitude of the logits that an attention or a softmax in it took; None where it took none.
        gemm_multiple_of_16: All dimensions of its matrix products are multiples of 16, as FP8 kernels want; None where
            it has no such product.
    """

    name: str
    type: str
    parameters: int = 0
    ops: Mapping[str, str] = field(default_factory=dict)
    logits_amax: float | None = None
    gemm_multiple_of_16: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """What an optimizer step would do to a parameter that is kept in bf16, over the steps that were looked at.

    Attributes:
        name: Of the parameter.
        steps: Steps looked at.
        updated: Share of the elements that the fp32 step changes.
        stagnant: Of those, the share whose bf16 weight stays as it is (the update is below half an ulp).
        log2_ratio: Median log2 of |update| / |weight| over elements where both are nonzero; None where there are none.
    """

    name: str
    steps: int
    updated: float
    stagnant: float
    log2_ratio: float | None
