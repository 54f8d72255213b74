"""What was measured of a run: its modules, ranges and precision, and the state that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.json_records import Count, Fraction, Shape
from ampdoctor.evidence.targets import Target

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


# The terms of a range profile: what a measured place is, and what a format does to it.


SiteKind = Literal["activation_grad", "weight_grad", "activation", "weight"]
SitePart = Literal["output", "input", "parameter"]

KINDS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad", "activation", "weight")
"""The kinds in the order of a profile: gradients, which have curves by loss scale, come first."""
GRADIENTS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad")

PROFILE_MARK = "ampdoctor_profile"
"""Key in the header of a saved profile; it distinguishes a profile from a checkpoint, which may be safetensors, too."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Formats that a run may compute in (`precision.Compute`, which this room cannot see)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of measurement.

    Attributes:
        name: Name of the module as in `named_modules()` ("" is the model itself), or of the parameter.
        kind: What is measured.
        part: `output` or `input` of the module; `parameter` for weights and their gradients.
    """

    name: str
    kind: SiteKind
    part: SitePart

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.name.rpartition(".")[0] if self.part == "parameter" else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One measured place, all steps and calls together.

    Attributes:
        place: The place.
        half: In the half-precision run this tensor has, or passes through, the half format; only such places count in
            a summary. What autocast keeps in fp32 (layer norms, losses) cannot flush.
        weight: Number of the module's parameter elements, at least 1: the cost of keeping it in fp32.
    """

    place: Place
    half: bool
    weight: int

    @property
    def kind(self) -> SiteKind:
        """What was measured."""
        return self.place.kind

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.place.module

    @property
    def label(self) -> str:
        """Its name in a sentence: "head.output (activation_grad)"."""
        place = self.place
        named = place.name if place.part == "parameter" else f"{place.name or 'model'}.{place.part}"
        return f"{named} ({place.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFigures:
    """What a format does to a set of values at some loss scale.

    Attributes:
        flushed: Fraction of the nonzero finite values that becomes zero.
        subnormal: Fraction that keeps fewer bits than a normal number.
        overflowed: Fraction that the format cannot hold.
        relative_error: L2 norm of the rounding error over that of the values; inf with an overflow.
        zeros: Fraction of all values that are zero from the start, which is not underflow.
    """

    flushed: float
    subnormal: float
    overflowed: float
    relative_error: float
    zeros: float


# Which precision a run should have: what the advice rests on, and the advice.


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


# Optimizer state that training in fp32 never leaves behind, as the first step of a replay shows it: plain data.


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


# Facts about the settings of a run's own loss scaler, besides its state.


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSetting:
    """An argument of a GradScaler that its constructor takes and its first use refuses.

    Attributes:
        name: The argument ("growth_interval").
        given: Its value, as Python writes it.
        used: The value that the replay used instead.
        raised: torch's exception, type first.
    """

    name: str
    given: str
    used: float
    raised: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """The run's scaler before and after a checkpoint was loaded, and the checkpoint's.

    Attributes:
        own: The scaler as the factory made it.
        file: The scaler in the checkpoint.
        now: The scaler with which the replay goes on.
        asked: The GradScaler arguments that the run names; None if it passed a scaler, whose arguments are unknown.
    """

    own: ScalerState
    file: ScalerState
    now: ScalerState
    asked: frozenset[str] | None = None
