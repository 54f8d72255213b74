"""What a replay leaves behind: an outcome for each step, and the births of a step looked at closely."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.evidence.where import Source, Where

Origin = Literal["op", "constant", "data", "param", "buffer", "optimizer_state", "grad"]
"""How a non-finite value came into the step: computed, written down as a constant, or brought along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers of one tensor.

    Attributes:
        name: Its name, where it has one ("weight").
        dtype: "float16", ...
        shape: Its sizes.
        amax: Largest finite magnitude, 0.0 where there is none.
        nans: NaN elements.
        infs: Infinite elements.
        zeros: Elements that are exactly zero.
    """

    name: str | None = None
    dtype: str
    shape: tuple[int, ...]
    amax: float
    nans: int
    infs: int
    zeros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The op of a birth, run again in float64 and in float32 on the same inputs.

    Attributes:
        finite: Every element that was non-finite is finite in float64.
        amax: Largest finite float64 magnitude among those elements, 0.0 where there is none.
        limit: Largest finite number of the output's format.
        finite32: Every one of them is finite in float32 as well: without it no fp32 module cures the op. None where
            the op has no float32 kernel.
        amax32: Largest finite float32 magnitude among those elements, 0.0 where there is none.
        overflow: Where `amax` does not say it: the op is finite in its own format once its inputs are brought down to
            at most 1, so something overflows, a partial result inside it (the squares of a layer norm) or a result
            beyond float64 (exp(1000)). None where that was not tried.
    """

    finite: bool
    amax: float
    limit: float
    finite32: bool | None = None
    amax32: float = 0.0
    overflow: bool | None = None


LOST = ("flushed_epsilon", "flushed", "rounded_to_one")
"""`Operand.made_by` where a narrow format is what made it: the op gives another number in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The input that takes an op out of its domain, and what made it so.

    Attributes:
        made_by: How it came about:

            - "flushed_epsilon": an op or a cast whose constant is too small for the format;
            - "flushed": an op whose result is not zero in float64 from the same inputs;
            - "rounded_to_one": an op whose result is not 1 in float64 from the same inputs;
            - "computed": an op that gives the same value in float64;
            - "constant": a value that the user's code wrote down;
            - "data", "param:NAME", "buffer:NAME", "optimizer_state:NAME", "grad:NAME": it came with the step;
            - "gradient": the backward computed it;
            - "masked_row": a whole row of infinities; "infinity": infinities of both signs, or times zero;
            - "number": a Python number (a factor, a learning rate) that is not finite, and that no tensor gave;
            - "empty_input": an input without elements.
        op: The op that made it ("aten.add"); None for what was there before the step.
        module: The module that ran this op; None likewise.
        source: The user's line that ran it.
        dtype: The format in which it was made.
        here: Its value.
        float64: Its value had the op that lost it been computed in float64; None where that is unknown.
        fraction: Share of the elements of the op's result that were lost; 0.0 where none was.
        amax: Largest float64 magnitude among those elements; of elements rounded to one, the smallest.
    """

    made_by: str
    op: str | None = None
    module: str | None = None
    source: Source | None = None
    dtype: str = ""
    here: float | None = None
    float64: float | None = None
    fraction: float = 0.0
    amax: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """An op on the way of a birth's values, or a sink that they reach.

    Attributes:
        order: Position among the ops of the step; of a sink that of the op that wrote it.
        where: Its address; the op of a sink is the sink's name ("loss", "grad:fc.weight").
        dtype: Of the result, "" where there is no tensor (a number, an exception).
        shape: Of the result.
        input_amax: Largest finite magnitude among the inputs; before a birth among those that the step made. None
            where it is not known.
        amax: Largest finite magnitude of the result; None where it is not known.
        nans: NaN elements of the result.
        infs: Infinite elements of the result.
    """

    order: int
    where: Where
    dtype: str = ""
    shape: tuple[int, ...] = ()
    input_amax: float | None = None
    amax: float | None = None
    nans: int = 0
    infs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a birth came about, and how it came to harm.

    Attributes:
        before: Finite ops that fed it, the nearest last; each made the largest input of the next.
        carriers: Ops between it and its first harm that carry its values: of each call of a module the first one that
            does more than move them, where there is one.
        harms: The first sink of each kind that it reached, in the order of the ops.
        omitted: Ops between it and its first harm that carry its values, make something, and are not among `carriers`.
    """

    before: tuple[Passage, ...] = ()
    carriers: tuple[Passage, ...] = ()
    harms: tuple[Passage, ...] = ()
    omitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """A non-finite value made from finite inputs.

    Attributes:
        order: Position among the ops of the step; earlier is smaller, -1 for what was there before the step.
        where: Its address.
        origin: Computed, a constant, or brought along by the batch or the state.
        kernel: The ATen kernel below the user-level op ("aten.addmm").
        inputs: The op's inputs.
        outputs: The op's outputs.
        recomputed: The op in float64; None where it cannot be run there.
        operand: For an op out of its domain, what took it there; None where that is not known.
        harms: Names of the sinks that its values reached ("loss", "grad:fc.weight").
        departs: Largest difference, relative to the value in float32, of a finite result made from this birth's
            values; 0.0 where none was seen to depart (inf -> tanh -> 1), up to 1.0 (inf -> rsqrt -> 0) and beyond.
        way: From the finite ops that fed it to the sinks.
    """

    order: int
    where: Where
    origin: Origin
    kernel: str
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    recomputed: Recomputation | None = None
    operand: Operand | None = None
    harms: tuple[str, ...] = ()
    departs: float = 0.0
    way: Way = field(default_factory=Way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """An op of a backward whose result is zero where it is not in float64 from the same inputs.

    Attributes:
        order: Position among the ops of the step.
        where: Its address.
        fraction: Share of the elements nonzero in float64 that are zero.
        amax: Largest magnitude of the result in float64.
    """

    order: int
    where: Where
    fraction: float
    amax: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step, op by op.

    Attributes:
        step: The step.
        ops: Number of ops seen.
        births: In the order of the ops.
        flushes: In the order of the ops.
        unattributed: Sinks whose non-finite values were not seen to be made (outside autograd and aten).
    """

    step: int
    ops: int
    births: tuple[Birth, ...]
    flushes: tuple[Flush, ...] = ()
    unattributed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One call that the step made on its scaler or an optimizer.

    Attributes:
        kind: "scale", "unscale", "step" (the scaler's), "update", "optimizer_step", or "grad": gradients of a scaled
            loss that were asked for with their graph, and so for another loss.
        optimizer: Name of the optimizer concerned, "" where none is.
        scale: The loss scale at that moment; None where no scaler is enabled.
        edited: Gradients that something changed in place since the backward wrote them (clipping does).
        unscaled: This optimizer's gradients had been unscaled in this step (true without an enabled scaler).
        misscaled: Gradients with a part that is not in the scale in which they are taken: never scaled, or scaled by
            another scale, but unscaled now (unscale), or scaled, but added after the unscaling (optimizer_step).
        scales: Scales of the losses whose gradients the optimizer now holds, 1.0 for those that were not scaled or are
            unscaled by now (unscale, optimizer_step).
        still_scaled: Gradients that are as backwards of scaled losses wrote them, though no scaler makes the step
            (optimizer_step).
        clipped: Norm before, and largest norm after, a `clip_grad_norm_` of gradients that were still scaled (unscale).
        knows_scale: The loop has asked a scaler for its scale before: it may scale and unscale in its own code.
    """

    kind: Literal["scale", "unscale", "step", "update", "optimizer_step", "grad"]
    optimizer: str = ""
    scale: float | None = None
    edited: int = 0
    unscaled: bool = True
    misscaled: int = 0
    scales: tuple[float, ...] = ()
    still_scaled: int = 0
    clipped: tuple[float, float] | None = None
    knows_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How one replayed step ended.

    Attributes:
        step: The step.
        loss: The loss as the user's step returned it; None where it returned none.
        scale_before: Loss scale during the step; None where no scaler is enabled.
        scale_after: Loss scale after `update()`.
        optimizer_steps: How often an optimizer's `step` ran.
        skipped: An enabled scaler's `step` was called and no optimizer stepped; without an optimizer: none would have.
        events: The calls made on scaler and optimizers, in order.
        raised: Type and message of what the user's code ended the step with ("AssertionError: the loss is NaN"); None
            where it came to its end.
    """

    step: int
    loss: float | None
    scale_before: float | None
    scale_after: float | None
    optimizer_steps: int
    skipped: bool
    events: tuple[StepEvent, ...] = ()
    raised: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How near a finite tensor in a reduced format came to that format's limit.

    Attributes:
        step: The step.
        module: The module that made the tensor, or whose parameter's gradient it is.
        kind: "output", "output_grad" or "grad".
        format: "fp16" or "bf16".
        amax: Its largest magnitude, scaled by the loss scale where it is a gradient; above 0.
        limit: Largest finite number of the format.
    """

    step: int
    module: str
    kind: str
    format: str
    amax: float
    limit: float

    @property
    def binades(self) -> float:
        """Doublings that are left before it overflows."""
        return math.log2(self.limit / self.amax)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """What the cheap check saw in one step.

    Attributes:
        sinks: Names of harmed values ("loss", "grad:fc.weight", "param:...", "buffer:...", "optimizer_state:..."), and
            "raised" where the user's code ended the step with an exception.
        outputs: Names of modules whose outputs were non-finite, in the order of execution.
        output_grads: Names of modules whose output gradients were non-finite, in the order of the backward.
        fingerprint: Hash of the loss, every checked output and every gradient: equal for bit-identical steps.
    """

    sinks: tuple[str, ...]
    outputs: tuple[str, ...]
    output_grads: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUpdate:
    """How a module's half-precision tensors moved in one step, here and in fp32.

    Attributes:
        module: Name of the module that owns the tensors.
        tensors: Their names.
        moved: Elements that move in fp32.
        stalled: Those of them that did not move here.
        size: Norm of fp32's update.
        lost: Norm of the difference between both updates over `size`.
        trained: An optimizer holds the tensors; False for a copy that something else moves (an EMA).
    """

    module: str
    tensors: tuple[str, ...]
    moved: int
    stalled: int
    size: float
    lost: float
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step beside the same step in fp32, from the same state, batch and random state.

    Attributes:
        step: The step.
        loss: Here.
        reference_loss: In fp32.
        gradient_error: Relative L2 error of all gradients together, as the optimizer got them.
        gradient_ratio: Their norm over fp32's; 1 is right.
        gradient_norm: Norm of fp32's gradients.
        zeroed: Share of the gradient elements that are nonzero in fp32 and zero here.
        zeroed_share: Share of the squared gradient error that those elements make up.
        updates: By module, half-precision tensors only.
        events: What the step did to scaler and optimizers.
    """

    step: int
    loss: float | None
    reference_loss: float | None
    gradient_error: float
    gradient_ratio: float
    zeroed: float
    zeroed_share: float
    gradient_norm: float = 1.0
    updates: tuple[ModuleUpdate, ...] = ()
    events: tuple[StepEvent, ...] = ()
