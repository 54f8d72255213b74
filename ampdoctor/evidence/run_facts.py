"""Measurements of a run: its modules, ranges and precision, and the state that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ampdoctor.evidence.checkpoint_stats import ScalerState
from ampdoctor.evidence.json_records import Count, Fraction, Shape
from ampdoctor.evidence.location import Source
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
        logits_amax: Largest magnitude of the logits of a softmax in it, without what is masked out; 2^128
            (`OVERFLOWED`) if one was infinite; None without logits, and for a fused attention.
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


# -- range profiles --

SiteKind = Literal["activation_grad", "weight_grad", "activation", "weight"]
SitePart = Literal["output", "input", "parameter"]

KINDS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad", "activation", "weight")
"""The kinds in the order of a profile: gradients, which have curves by loss scale, come first."""
GRADIENTS: tuple[SiteKind, ...] = ("activation_grad", "weight_grad")

PROFILE_MARK = "ampdoctor_profile"
"""Key in the header of a saved profile; it distinguishes a profile from a checkpoint, which may be safetensors, too."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Formats that a run may compute in (`precision.spec.Compute`, which this room may not import)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of measurement: a module's output or input, or a parameter (its weights or gradients)."""

    name: str  # of the module ("" is the model itself), or of the parameter
    kind: SiteKind
    part: SitePart

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.name.rpartition(".")[0] if self.part == "parameter" else self.name

    @property
    def shown(self) -> str:
        """Its name for people: "head.output"."""
        return self.name if self.part == "parameter" else f"{self.name or 'model'}.{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One measured place, all steps and calls together."""

    place: Place
    half: bool  # has, or passes through, the half format in the half-precision run: only such places count in a summary
    weight: int  # parameter elements of the module, at least 1: the cost of keeping it in fp32

    @property
    def kind(self) -> SiteKind:
        """The kind of measurement."""
        return self.place.kind

    @property
    def module(self) -> str:
        """The place's module: the owner of a parameter."""
        return self.place.module

    @property
    def label(self) -> str:
        """Its name in a sentence: "head.output (activation_grad)"."""
        return f"{self.place.shown} ({self.place.kind})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFigures:
    """What a format does to a set of values at some loss scale."""

    flushed: float  # fraction of the nonzero finite values that becomes zero
    subnormal: float  # fraction with fewer bits than a normal number
    overflowed: float  # fraction that the format cannot hold
    relative_error: float  # L2, of the rounding error over the values; inf with an overflow
    zeros: float  # fraction of all values that are zero from the start (no underflow)


# -- the choice of a precision --

RunPrecision = Literal["fp16", "bf16", "tf32", "fp8", "fp32"]
RowPrecision = Literal["fp16", "bf16", "tf32", "fp32", "fp8 e4m3", "fp8 hybrid", "mxfp8"]
"""`fp8 hybrid` is E4M3 in the forward and E5M2 for gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far apart a tensor's values lie."""

    module: str
    kind: Literal["activation", "weight", "activation_grad"]  # operands of the forward, or of the backward
    log2_span: float  # log2 of the largest magnitude over the one below which a share tau of the nonzero values lies


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFacts:
    """The loss scale for an fp16 run."""

    exponent: int  # its log2
    modules_not_covered: tuple[str, ...] = ()  # modules whose gradients it does not suit
    share: float = 0.0  # of the parameters in these modules, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFacts:
    """The facts from which a precision is chosen."""

    target: Target
    own: str  # the run's own ("fp32", "tf32", "bf16", "fp16")
    pure: bool = False  # weights in the run's own precision: no autocast, no fp32 master weights
    forward: Mapping[str, float] = field(default_factory=dict)  # largest half activation of each module, without masks
    forward_flushed: float = 0.0  # share of the nonzero half activations that the target treats as zero in fp16
    scale: ScaleFacts | None = None  # None if no half gradient was seen
    fp16_error: float | None = None  # expected relative L2 error of the weight gradients, at `scale`
    bf16_error: float | None = None
    harm: str | None = None  # what was wrong in an fp16 replay and no loss scale cures, a clause
    settled: bool = False  # the steps after it were taken
    spreads: tuple[Spread, ...] = ()  # of the tensors that FP8 would hold
    modules: tuple[ModuleFacts, ...] = ()  # in the order in which they first ran
    updates: tuple[UpdateFacts, ...] = ()  # what bf16 weights would make of them; () if not examined
    precision_matters: bool = False  # the user needs more than bf16's 8 bits


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


# -- a run's own loss scaler --


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """The run's scaler before (`own`) and after (`now`) a checkpoint was loaded, and the checkpoint's (`file`)."""

    own: ScalerState
    file: ScalerState
    now: ScalerState
    asked: frozenset[str] | None = None  # GradScaler arguments that the run names; None if it passed a scaler


# -- what a loop's own code did to its gradients in one step, beside its scaler --


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of an optimizer's gradients between two moments."""

    factor: float | None  # of all gradients, 1.0 if unchanged; None if it is not one number
    bound: float | None  # magnitude to which each was clipped, if any
    most: float  # largest magnitude before, among the samples
    norm: float  # L2 norm of all of them afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """A step on gradients of scaled losses alone, and their changes before and after they were unscaled."""

    step: int
    scale: float  # the loss scale
    unscaled: bool  # a scaler has divided the gradients by it
    by_itself: bool  # the optimizer divides the gradients in its own step, or may: none of torch's, or a fused one
    knows_scale: bool  # the loop has read it, and may multiply and divide by it
    scaled_again: Source | None  # the line that scaled a loss of which a part was scaled already
    before: Change | None  # None if unknown
    after: Change | None
    clipped: float  # factor of `clip_grad_norm_`; 1.0 without one
    source: Source | None  # the line that makes the step
