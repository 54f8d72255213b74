"""The results of a replay: an outcome for each step, and the births of a step that was traced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.evidence.location import Source, Where

StateKind = Literal["buffer", "counter", "own"]
"""Where a state lies: in the model, in an optimizer, or in the run's own code."""
Origin = Literal["op", "constant", "data", "param", "buffer", "optimizer_state", "grad"]
"""How a non-finite value came into the step: computed, written down as a constant, or brought along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers of one tensor.

    Attributes:
        name: Its name, if it has one ("weight").
        dtype: "float16", ...
        shape: Its sizes.
        amax: Largest finite magnitude, 0.0 without one.
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
        amax: Largest finite float64 magnitude among those elements, 0.0 without one.
        limit: Largest finite number of the output's format.
        finite32: True if every one of them is also finite in float32; otherwise no fp32 module cures the op. None if
            the op has no float32 kernel.
        amax32: Largest finite float32 magnitude among those elements, 0.0 without one.
        overflow: For cases that `amax` does not show: True if the op is finite in its own format after its inputs are
            reduced to at most 1, so that something overflows: a partial result inside it (the squares of a layer norm),
            or a result beyond float64 (exp(1000)). None if that was not tried.
        returns: The op is not finite in its own format when it runs again on the same inputs. False for a kernel that
            shows memory which it has not written, or whose threads race. None if that was not tried.
    """

    finite: bool
    amax: float
    limit: float
    finite32: bool | None = None
    amax32: float = 0.0
    overflow: bool | None = None
    returns: bool | None = None


LOST = ("flushed_epsilon", "flushed", "rounded_to_one")
"""Values of `Operand.made_by` that a narrow format causes: the op gives another number in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The input that takes an op out of its domain, and the cause of its value.

    Attributes:
        made_by: How the value came about:

            - "flushed_epsilon": an op or a cast whose constant is too small for the format;
            - "flushed": an op whose result is not zero in float64 from the same inputs;
            - "rounded_to_one": an op whose result is not 1 in float64 from the same inputs;
            - "computed": an op that gives the same value in float64;
            - "constant": a value that the user's code wrote down;
            - "data", "param:NAME", "buffer:NAME", "optimizer_state:NAME", "grad:NAME": it came with the step;
            - "gradient": the backward computed it;
            - "masked_row": a whole row of infinities; "infinity": infinities of both signs, or times zero;
            - "added_up": infinities that mask, in a sum; "masked_target": the class to be learned is masked;
            - "number": a Python number (a factor, a learning rate) that is not finite, and that no tensor gave;
            - "empty_input": an input without elements;
            - "unwritten": memory that no op has written (`torch.empty`);
            - "unseen": memory that an op left finite, and that code wrote behind torch's back;
            - "any": an operator that torch does not have itself is not finite for any input that was tried.
        op: The op that made it ("aten.add"); None for a value from before the step.
        module: The module that ran this op; None for a value from before the step.
        source: The user's line that ran it.
        dtype: The format in which it was made.
        here: Its value.
        float64: The value that it would have had if its op had computed in float64; None if unknown.
        fraction: Share of the elements of the op's result that were lost; 0.0 if none was.
        amax: Largest float64 magnitude among those elements; for elements rounded to one, the smallest.
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
        order: Position among the ops of the step; for a sink, that of the op that wrote it.
        where: Its address; the op of a sink is the sink's name ("loss", "grad:fc.weight").
        dtype: Dtype of the result, "" without a tensor (a number, an exception).
        shape: Shape of the result.
        input_amax: Largest finite magnitude among the inputs; before a birth, among those that the step made. None if
            unknown.
        amax: Largest finite magnitude of the result; None if unknown.
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
    """How a birth came about, and how it did harm.

    Attributes:
        before: Finite ops that fed it, the nearest last; each made the largest input of the next.
        carriers: Ops between it and its first harm that carry its values: for each call of a module, the first op that
            does more than move them, if there is one.
        harms: The first sink of each kind that it reached, in the order of the ops.
        omitted: Number of other ops between it and its first harm that carry its values and make something.
    """

    before: tuple[Passage, ...] = ()
    carriers: tuple[Passage, ...] = ()
    harms: tuple[Passage, ...] = ()
    omitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """A non-finite value made from finite inputs.

    Attributes:
        order: Position among the ops of the step; -1 for a value from before the step.
        where: Its address.
        origin: Computed, a constant, or brought in by the batch or the state.
        kernel: The ATen kernel below the user-level op ("aten.addmm").
        inputs: The op's inputs.
        outputs: The op's outputs.
        recomputed: The op in float64; None if it cannot be run there.
        operand: The input that took the op out of its domain; None for other births, or if unknown.
        harms: Names of the sinks that its values reached ("loss", "grad:fc.weight").
        departs: Largest difference, relative to the value in float32, of a finite result made from this birth's
            values; 0.0 if none departs (inf -> tanh -> 1), up to 1.0 (inf -> rsqrt -> 0) and beyond.
        way: From the finite ops that fed it to the sinks.
        after_backward: In the phase "optimizer": run by the user's own code after the backward, outside every optimizer
            (an EMA, a projection of the weights).
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
    after_backward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """An op of a backward whose result is zero although it is not in float64 from the same inputs.

    Attributes:
        order: Position among the ops of the step.
        where: Its address.
        fraction: Share of the elements that are nonzero in float64 and zero here.
        amax: Largest magnitude of the result in float64.
    """

    order: int
    where: Where
    fraction: float
    amax: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A parameter that got a gradient of zeros, and the op of the backward that made zeros of something.

    Attributes:
        parameter: Its name.
        order: Position of the op among the ops of the step.
        where: Its address.
    """

    parameter: str
    order: int
    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Amplified:
    """An op of the forward that makes a large error of a small one, or makes one by itself.

    Attributes:
        order: Position among the ops of the step.
        where: Its address.
        error: Relative L2 error of its result against the forward in fp32.
        before: Largest relative L2 error among its inputs.
        source: Address of the op whose own rounding most of the error came from.
        dtype: Format of that op's result ("bfloat16").
        rounding: Relative L2 error that the op adds there.
        beside: Addresses of further ops whose rounding is part of it.
    """

    order: int
    where: Where
    error: float
    before: float
    source: Where
    dtype: str
    rounding: float
    beside: tuple[Where, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Something of a trace that is not known, because looking for it failed.

    Attributes:
        what: What is not known ("what made the operand").
        op: The op at which it was looked for ("aten.transpose_").
        reason: Type and message of the exception.
    """

    what: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step, op by op.

    Attributes:
        step: The step.
        ops: Number of recorded ops.
        births: In the order of the ops.
        flushes: In the order of the ops.
        died: Where gradients that are zero throughout became so; looked for together with flushes.
        unattributed: Sinks whose non-finite values no recorded op made (outside autograd and aten).
        left_out: What could not be looked at.
    """

    step: int
    ops: int
    births: tuple[Birth, ...]
    flushes: tuple[Flush, ...] = ()
    died: tuple[Died, ...] = ()
    unattributed: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One call that the step made on its scaler or an optimizer.

    Attributes:
        kind: "scale", "unscale", "step" (the scaler's), "update", "optimizer_step", or "grad": gradients of a scaled
            loss that were requested with their graph, and therefore for another loss.
        optimizer: Name of the optimizer, "" without one.
        scale: The loss scale at that moment; None if no scaler is enabled.
        edited: Number of gradients that were changed in place after the backward wrote them (clipping does).
        unscaled: This optimizer's gradients had been unscaled in this step (true without an enabled scaler).
        misscaled: Number of gradients with a part in another scale than assumed: never scaled, or scaled by another
            scale, but unscaled now (unscale); or scaled, but added after the unscaling (optimizer_step).
        scales: Scales of the losses whose gradients the optimizer now holds, 1.0 for those that were not scaled or have
            been unscaled (unscale, optimizer_step).
        still_scaled: Number of gradients that are still as backwards of scaled losses wrote them, though no scaler
            makes the step (optimizer_step).
        clipped: Norm before, and largest norm after, a `clip_grad_norm_` of gradients that were still scaled (unscale).
        twice: The loss scale, where a part of what is scaled went through a scaler before, in this step (scale).
        knows_scale: The loop has asked a scaler for its scale before: it may scale and unscale in its own code.
        casts_kept: Autocast was on, and keeps the casts of weights that it has made (optimizer_step).
        again: The optimizer had used these very gradients already, and no backward came in between (optimizer_step).
        held_back: The scaler had skipped the update that used them first (optimizer_step that is made again).
        past_scaler: A scaler has unscaled the gradients at the loop's own call, does not make the step, and the loop
            has not asked for a number that would tell it of an overflow (optimizer_step).
        source: The line that makes the call, where it is known (optimizer_step).
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
    twice: float | None = None
    knows_scale: bool = False
    casts_kept: bool = False
    again: bool = False
    held_back: bool = False
    past_scaler: bool = False
    source: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How one replayed step ended.

    Attributes:
        step: The step.
        loss: The loss that the user's step returned; None if it returned none.
        scale_before: Loss scale during the step; None if no scaler is enabled.
        scale_after: Loss scale after `update()`.
        optimizer_steps: Number of runs of an optimizer's `step`.
        skipped: An enabled scaler's `step` was called and no optimizer stepped; without an optimizer: none would have.
        events: The calls on scaler and optimizers, in order.
        raised: Type and message of the exception with which the user's code ended the step ("AssertionError: the loss
            is NaN"); None if it came to its end.
    """

    step: int
    loss: float | None
    scale_before: float | None
    scale_after: float | None
    optimizer_steps: int
    skipped: bool
    events: tuple[StepEvent, ...] = ()
    raised: str | None = None

    @property
    def updates_skipped(self) -> tuple[StepEvent, ...]:
        """The calls of a scaler's `step` that did not step their optimizer: a step may make several updates."""
        return tuple(self.events[at] for at in self._asked() if not self._takes(at))

    @property
    def guarded(self) -> bool:
        """Made updates, each through a scaler: gradients that are not finite have gone nowhere.

        A scaler's `step` steps its optimizer only where all of that optimizer's gradients are finite. Others may be
        left behind: a generator's backward goes through the discriminator, which has stepped before.
        """
        return 0 < sum(map(self._takes, self._asked())) == self.optimizer_steps

    @property
    def passes_over(self) -> bool:
        """Skipped some of its updates and made others, each through a scaler."""
        return self.guarded and bool(self.updates_skipped)

    @property
    def loses_updates(self) -> bool:
        """Skipped all of its updates, or some of them: it is not the step that was meant."""
        return self.skipped or self.passes_over

    def harms(self, sinks: Sequence[str]) -> bool:
        """Whether one of these non-finite values was used, or skipped; gradients that are left behind do no harm.

        Args:
            sinks: Names of what the cheap check saw, as in `Sightings`.
        """
        left = self.guarded and not self.updates_skipped and self.raised is None
        return bool(sinks) and not (left and all(sink.startswith("grad:") for sink in sinks))

    def _asked(self) -> list[int]:
        return [at for at, event in enumerate(self.events) if event.kind == "step"]

    def _takes(self, at: int) -> bool:
        """Is this call of a scaler's `step` one that steps its optimizer? It does so inside."""
        name = self.events[at].optimizer
        inside = itertools.takewhile(lambda event: event.kind in ("unscale", "optimizer_step"), self.events[at + 1 :])
        return any(event.kind == "optimizer_step" and event.optimizer == name for event in inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How close a finite tensor in a reduced format came to that format's limit.

    Attributes:
        step: The step.
        module: The module that made the tensor, or whose parameter's gradient it is.
        kind: "output", "output_grad" or "grad".
        format: "fp16" or "bf16".
        amax: Its largest magnitude, above 0; for a gradient, scaled by the loss scale.
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
        """Number of doublings before it overflows."""
        return math.log2(self.limit / self.amax)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """What the cheap check saw in one step.

    Attributes:
        sinks: Names of harmed values ("loss", "grad:fc.weight", "param:...", "buffer:...", "optimizer_state:..."), and
            "raised" if the user's code ended the step with an exception.
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
    """How a module's half-precision tensors moved in one step, in the run and in fp32.

    Attributes:
        module: Name of the module that owns the tensors.
        tensors: Their names.
        moved: Number of elements that move in fp32.
        stalled: Number of them that did not move in the run.
        size: Norm of fp32's update.
        lost: Norm of the difference between both updates, over `size`.
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
class ParameterBeside:
    """What a parameter that an optimizer holds got in a step, and how it moved, beside the same step in fp32.

    Attributes:
        name: Its name.
        gradient: Norm of the gradient that the optimizer got.
        expected: Norm of fp32's.
        error: Norm of their difference.
        flushed_error: Norm of fp32's elements where the run's are zero.
        nonzero: Number of elements of fp32's gradient that are not zero.
        flushed: Number of them that are zero in the run.
        looked_at: Number of elements whose moves were looked at.
        moved: Number of them that moved in the run.
        meant_to_move: Number of them that moved in fp32.
        stalled: Number of those that did not move in the run.
        beneath: Number of those whose move in fp32 is less than half a unit in the last place of the weight's format.
        update: Norm of the run's update, over the elements that were looked at.
        expected_update: Norm of fp32's, likewise.
        rounding: Norm of what rounding to the weight's format may do to either: half a unit in the last place of each.
        course: fp32's move of some elements, in half units in the last place, where none moves in the run.
    """

    name: str
    gradient: float
    expected: float
    error: float
    flushed_error: float
    nonzero: int
    flushed: int
    looked_at: int
    moved: int
    meant_to_move: int
    stalled: int
    beneath: int
    update: float
    expected_update: float
    rounding: float = 0.0
    course: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBeside:
    """How something that no optimizer trains and that is kept in a half format moved in a step, beside fp32.

    Attributes:
        name: "norm.running_var"; a tensor of optimizer state is "optimizer:PARAMETER.KEY", one that the run's own code
            keeps is named as it is there ("EMA.module.out.weight").
        kind: "buffer" (or a parameter without an optimizer), "counter" (optimizer state of one element) or "own".
        dtype: "float16" or "bfloat16".
        looked_at: Number of elements whose moves were looked at.
        moved: Number of them that moved in the run.
        meant_to_move: Number of them that moved in fp32 by more than fp32's own rounding.
        value: The largest magnitude among them, before the step.
        course: fp32's move of some elements, in half units in the last place.
    """

    name: str
    kind: StateKind
    dtype: str
    looked_at: int
    moved: int
    meant_to_move: int
    value: float
    course: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step beside the same step in fp32, from the same state, batch and random state.

    Attributes:
        step: The step.
        loss: Loss in the run.
        reference_loss: Loss in fp32.
        gradient_error: Relative L2 error of all gradients together, as the optimizer got them.
        gradient_ratio: Their norm over fp32's; 1 is right.
        gradient_norm: Norm of fp32's gradients.
        zeroed: Share of the gradient elements that are nonzero in fp32 and zero in the run.
        zeroed_share: Share of those elements in the squared gradient error.
        updates: By module, half-precision tensors only.
        parameters: Those that an optimizer holds and that have a gradient in fp32.
        states: What is kept in half beside them.
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
    parameters: tuple[ParameterBeside, ...] = ()
    states: tuple[StateBeside, ...] = ()
    events: tuple[StepEvent, ...] = ()
