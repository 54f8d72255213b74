"""Which precision a run should have: what the advice rests on, and the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ampdoctor.evidence.codec import Shape
from ampdoctor.evidence.of_runs.modules import ModuleFacts, UpdateFacts
from ampdoctor.evidence.targets import Target

RunPrecision = Literal["fp16", "bf16", "tf32", "fp8", "fp32"]
RowPrecision = Literal["fp16", "bf16", "tf32", "fp32", "fp8 e4m3", "fp8 hybrid", "mxfp8"]
"""`fp8 hybrid` is E4M3 in the forward and E5M2 for gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far apart a tensor's values lie.

    Attributes:
        module: Its module.
        kind: `activation`, `weight` (the forward's operands) or `activation_grad` (the backward's).
        binades: log2 of the largest magnitude over the one below which a share tau of the nonzero values lies.
    """

    module: str
    kind: Literal["activation", "weight", "activation_grad"]
    binades: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFacts:
    """The loss scale that serves an fp16 run.

    Attributes:
        exponent: log2 of it.
        unserved: Modules whose gradients it does not serve.
        share: Their share of the parameters, 0 to 1.
    """

    exponent: int
    unserved: tuple[str, ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFacts:
    """What the choice of a precision rests on.

    Attributes:
        target: The hardware.
        own: The run's own precision ("fp32", "tf32", "bf16", "fp16").
        pure: Its weights are kept in that precision: no autocast, no fp32 master weights.
        forward: Largest magnitude of each module's half activations, masks left aside.
        forward_flushed: Share of the nonzero half activations that the target takes for zero in fp16, 0 to 1.
        scale: The loss scale for fp16; None where no half gradient was seen.
        fp16_error: Expected relative L2 error of the weight gradients in fp16 at that scale; None where not known.
        bf16_error: The same in bf16.
        harm: What was wrong in an fp16 replay that no loss scale cures, a clause ("the loss is not finite"); None where
            nothing was, or none was run.
        settled: The steps after that one were taken.
        spreads: Of the tensors that FP8 would hold.
        modules: What each module computes, in the order in which they first ran.
        updates: What bf16 weights would make of the updates; () where that was not looked at.
        precision_matters: The user needs more than bf16's 8 bits (training and sampling that must agree).
    """

    target: Target
    own: str
    pure: bool = False
    forward: Mapping[str, float] = field(default_factory=dict)
    forward_flushed: float = 0.0
    scale: ScaleFacts | None = None
    fp16_error: float | None = None
    bf16_error: float | None = None
    harm: str | None = None
    settled: bool = False
    spreads: tuple[Spread, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    updates: tuple[UpdateFacts, ...] = ()
    precision_matters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """What one module, or one op in it, should compute in.

    Attributes:
        module: As in `named_modules()`; "" is the model itself, or the loss.
        type: Its class.
        part: The op that the row speaks of; "" for the module's own products and parameters.
        precision: What to compute in; `fp8 hybrid` is E4M3 in the forward and E5M2 for gradients.
        reason: Why, with the numbers.
    """

    module: str
    type: str
    part: str
    precision: Annotated[RowPrecision, Shape(str)]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAdvice:
    """The precision for a run.

    Attributes:
        target: Name of the hardware.
        precision: For the run as a whole.
        why: In a sentence or two, with the numbers.
        alternative: Another precision that is as good; None where there is none.
        rows: By module, in the order in which they ran.
        remedies: What to do about what was found, one sentence each.
        notes: What else to know, one sentence each.
    """

    target: str
    precision: RunPrecision
    why: str
    alternative: RunPrecision | None = None
    rows: tuple[PrecisionRow, ...] = ()
    remedies: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def fp32_modules(self) -> tuple[str, ...]:
        """Modules that a half run has to keep in fp32 as a whole, beyond what autocast does by itself."""
        if self.precision in {"fp32", "tf32"}:
            return ()
        return tuple(row.module for row in self.rows if not row.part and row.precision in {"fp32", "tf32"})
