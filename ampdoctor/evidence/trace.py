"""The results of a replay: an outcome for each step, and the origins (first non-finite values) of a traced step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ampdoctor.evidence.location import Source, Where

StateKind = Literal["buffer", "counter", "own"]
"""Where a state is kept: in the model, in an optimizer, or in the run's own code."""
Origin = Literal["op", "constant", "data", "param", "buffer", "optimizer_state", "grad"]
"""How a non-finite value entered the step: computed, written as a constant, or brought in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers of one tensor; `amax` is the largest finite magnitude, 0.0 without one."""

    name: str | None = None  # "weight", if it has one
    dtype: str  # "float16"
    shape: tuple[int, ...]
    amax: float
    nans: int
    infs: int
    zeros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The op of an origin, run again in float64 and in float32 on the same inputs, and over its non-finite elements."""

    finite: bool  # all are finite in float64
    amax: float  # largest finite magnitude in float64; 0.0 without one
    limit: float  # largest finite number of the output's format
    finite32: bool | None = None  # the same in float32: if not, no fp32 module cures the op; None without a kernel
    amax32: float = 0.0
    overflow: bool | None = None  # finite in its own format once its inputs are at most 1; None if not tried
    returns: bool | None = None  # not finite again on the same inputs: no unwritten memory, no race; None if not tried


LOST = ("flushed_epsilon", "flushed", "rounded_to_one")
"""Values of `Operand.made_by` that a narrow format causes: the op gives another number in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The input that takes an op out of its domain, and the cause of its value (`made_by`).

    - "flushed_epsilon": an op or a cast whose constant is too small for the format;
    - "flushed", "rounded_to_one": an op whose result is not zero, or not 1, in float64 from the same inputs;
    - "computed": an op that gives the same value in float64; "constant": a value that the user's code wrote down;
    - "data", "param:NAME", "buffer:NAME", "optimizer_state:NAME", "grad:NAME": it came with the step;
    - "gradient": the backward computed it; "number": a Python number that is not finite, and that no tensor gave;
    - "masked_row": a whole row of infinities; "infinity": infinities of both signs, or times zero;
    - "added_up": infinities that mask, in a sum; "masked_target": the class to be learned is masked;
    - "empty_input": an input without elements; "unwritten": memory that no op has written (`torch.empty`);
    - "unseen": memory that an op left finite, and that was then written without a torch op;
    - "any": an operator that torch does not have itself is not finite for any input that was tried.
    """

    made_by: str
    op: str | None = None  # that made it ("aten.add"); None before the step
    module: str | None = None
    source: Source | None = None
    dtype: str = ""  # in which it was made
    here: float | None = None  # its value
    float64: float | None = None  # the value if its op had computed in float64; None if unknown
    fraction: float = 0.0  # of the elements of the op's result: lost
    amax: float = 0.0  # largest float64 magnitude among those; of elements rounded to one, the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class PathOp:
    """An op on the path from an origin's inputs to its harm, or a target (harmed value) that they reach."""

    order: int  # among the ops of the step; of a target, of the op that wrote it
    where: Where  # the op of a target is its name ("loss", "grad:fc.weight")
    dtype: str = ""  # of the result; "" without a tensor
    shape: tuple[int, ...] = ()
    input_amax: float | None = None  # largest finite magnitude of the inputs; before an origin, of those the step made
    amax: float | None = None  # largest finite magnitude of the result
    nans: int = 0  # of the result
    infs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagationPath:
    """How an origin came about, and what it harmed."""

    before: tuple[PathOp, ...] = ()  # finite ops that fed it, the nearest last: each made the next one's largest input
    carriers: tuple[PathOp, ...] = ()  # up to its first harm: the first op of each module call that computes
    affected: tuple[PathOp, ...] = ()  # the first of each kind that it reached, in the order of the ops
    omitted: int = 0  # other ops up to its first harm that carry its values


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOrigin:
    """A non-finite value made from finite inputs."""

    order: int  # among the ops of the step; -1 before the step
    where: Where
    came_from: Origin
    kernel: str  # ATen kernel below the user-level op ("aten.addmm")
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    recomputed: Recomputation | None = None  # None if it cannot run in float64
    operand: Operand | None = None  # that took the op out of its domain
    affected: tuple[str, ...] = ()  # names of the values that it has made non-finite
    index: tuple[int, ...] = ()  # of the first such value in a tensor of the batch; () where it is not known
    departs: float = 0.0  # largest relative difference from float32 of a finite result made from its values
    way: PropagationPath = field(default_factory=PropagationPath)
    after_backward: bool = False  # of the user's own code, outside every optimizer (an EMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """An op of a backward whose result is zero although it is not in float64 from the same inputs."""

    order: int  # among the ops of the step
    where: Where
    fraction: float  # of the elements: nonzero in float64, zero here
    amax: float  # of the result in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """A parameter that got a gradient of zeros, and the op of the backward where the zeros arose."""

    parameter: str
    order: int  # of the op in the step
    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Amplified:
    """An op of the forward that turns a small relative L2 error, against fp32, into a large one, or makes one."""

    order: int
    where: Where
    error: float  # of its result
    before: float  # largest among its inputs
    source: Where  # the op whose own rounding caused most of the error
    dtype: str  # of that op's result ("bfloat16")
    rounding: float  # error that this op adds
    beside: tuple[Where, ...] = ()  # further ops whose rounding is part of it


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Something of a trace that is not known, because looking for it failed."""

    what: str  # what is not known ("what made the operand")
    op: str  # where the search failed ("aten.transpose_")
    reason: str  # type and message of the exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step, op by op; origins and flushes are in the order of the ops."""

    step: int
    ops: int  # number of recorded ops
    origins: tuple[NonFiniteOrigin, ...]
    flushes: tuple[Flush, ...] = ()
    died: tuple[Died, ...] = ()  # where all-zero gradients arose
    unattributed: tuple[str, ...] = ()  # non-finite values that no recorded op made
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One call that the step made on its scaler or an optimizer; most fields are for the kinds in brackets.

    Attributes:
        kind: "step" is the scaler's; "grad": gradients of a scaled loss that were requested with their graph, and
            therefore for another loss.
        scale: The loss scale at that moment; None if no scaler is enabled.
        edited: Number of gradients that were changed in place after the backward wrote them (clipping does).
        unscaled: This optimizer's gradients had been unscaled in this step (true without an enabled scaler).
        misscaled: Number of gradients with a part in another scale than assumed: never scaled, or scaled by another
            scale, but unscaled now [unscale]; or scaled, but added after the unscaling [optimizer_step].
        scales: Scales of the losses whose gradients the optimizer now holds, 1.0 for those that were not scaled or have
            been unscaled [unscale, optimizer_step].
        clipped: Norm before, and largest norm after, a `clip_grad_norm_` of gradients that were still scaled [unscale].
        twice: The loss scale, if a part of the scaled value already went through a scaler in this step [scale].
        casts_kept: Autocast was on, and keeps the casts of weights that it has made [optimizer_step].
        again: The optimizer had used these same gradients already, with no backward in between [optimizer_step].
        held_back: The scaler had skipped the update that used them first [optimizer_step that is made again].
        past_scaler: A scaler has unscaled the gradients at the loop's own call and does not make the step, and the loop
            has not read a number that shows an overflow [optimizer_step].
        source: The line that makes the call, if known [optimizer_step].
    """

    kind: Literal["scale", "unscale", "step", "update", "optimizer_step", "grad"]
    optimizer: str = ""
    scale: float | None = None
    edited: int = 0
    unscaled: bool = True
    misscaled: int = 0
    scales: tuple[float, ...] = ()
    clipped: tuple[float, float] | None = None
    twice: float | None = None
    casts_kept: bool = False
    again: bool = False
    held_back: bool = False
    past_scaler: bool = False
    source: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How one replayed step ended; `skipped`: an enabled scaler let no optimizer step."""

    step: int
    loss: float | None  # None if the user's step returned none
    scale_before: float | None  # None without an enabled scaler
    scale_after: float | None  # after `update()`
    optimizer_steps: int  # runs of an optimizer's `step`
    skipped: bool
    events: tuple[StepEvent, ...] = ()  # in order
    raised: str | None = None  # the user code's exception ("AssertionError: ...")

    @property
    def updates_skipped(self) -> tuple[StepEvent, ...]:
        """The calls of a scaler's `step` that did not step their optimizer: a step may make several updates."""
        return tuple(self.events[at] for at in self._asked() if not self._takes(at))

    @property
    def guarded(self) -> bool:
        """Whether it made updates, each through a scaler, so that no gradient that is not finite was used."""
        return 0 < sum(map(self._takes, self._asked())) == self.optimizer_steps

    @property
    def passes_over(self) -> bool:
        """Whether it skipped some of its updates and made others, each through a scaler."""
        return self.guarded and bool(self.updates_skipped)

    @property
    def loses_updates(self) -> bool:
        """Whether it skipped all of its updates, or some of them: it is not the step that was meant."""
        return self.skipped or self.passes_over

    def is_harmed_by(self, affected: Sequence[str]) -> bool:
        """Whether one of these non-finite values was used, or skipped; gradients that are left behind do no harm."""
        left = self.guarded and not self.updates_skipped and self.raised is None
        return bool(affected) and not (left and all(target.startswith("grad:") for target in affected))

    def _asked(self) -> list[int]:
        return [at for at, event in enumerate(self.events) if event.kind == "step"]

    def _takes(self, at: int) -> bool:
        """Whether this call of a scaler's `step` steps its optimizer, which happens inside the call."""
        name = self.events[at].optimizer
        inside = itertools.takewhile(lambda event: event.kind in ("unscale", "optimizer_step"), self.events[at + 1 :])
        return any(event.kind == "optimizer_step" and event.optimizer == name for event in inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """How close a finite tensor in a reduced format came to that format's limit."""

    step: int
    module: str  # that made the tensor, or owns the gradient's parameter
    kind: str  # "output", "output_grad" or "grad"
    format: str  # "fp16" or "bf16"
    amax: float  # above 0; of a gradient, with the loss scale
    limit: float  # largest finite number of the format

    @property
    def log2(self) -> float:
        """Number of doublings before it overflows."""
        return math.log2(self.limit / self.amax)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteReport:
    """The results of the cheap check of one step."""

    affected: tuple[str, ...]  # "loss", "grad:fc.weight", "param:...", "optimizer_state:...", "raised"
    outputs: tuple[str, ...]  # modules with non-finite outputs, in the order of execution
    output_grads: tuple[str, ...]  # modules with non-finite output gradients, as the backward ran


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUpdate:
    """How a module's half-precision tensors moved in one step, in the run and in fp32."""

    module: str
    tensors: tuple[str, ...]
    moved: int  # elements that move in fp32
    stalled: int  # those that did not move in the run
    size: float  # norm of fp32's update
    lost: float  # norm of the difference between both updates, over `size`
    trained: bool  # an optimizer holds them; False for e.g. an EMA


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterVsFp32:
    """A trained parameter's gradient and move in one step, compared with the same step in fp32."""

    name: str
    gradient: float  # norm of the gradient that the optimizer got
    expected: float  # norm of fp32's
    error: float  # norm of their difference
    flushed_error: float  # norm of fp32's elements where the run's are zero
    nonzero: int  # nonzero elements of fp32's gradient
    flushed: int  # those that are zero in the run
    looked_at: int  # elements whose moves were compared
    moved: int  # elements that moved in the run
    meant_to_move: int  # elements that moved in fp32
    stalled: int  # those that did not move in the run
    below_half_ulp: int  # elements whose move in fp32 is less than half a unit in the last place of the weight's format
    update: float  # norm of the run's moves
    expected_update: float
    rounding: float = 0.0  # norm of what rounding to the weight's format may do to either update
    course: tuple[float, ...] = ()  # fp32's move of some elements, in half units in the last place, if none moves


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVsFp32:
    """How a state in a half format that no optimizer trains moved in a step, compared with fp32."""

    name: str  # "norm.running_var", "optimizer:PARAMETER.KEY", "EMA.module.out.weight"
    kind: StateKind  # "buffer" also for a parameter without an optimizer
    dtype: str  # "float16" or "bfloat16"
    looked_at: int  # elements whose moves were compared
    moved: int  # elements that moved in the run
    meant_to_move: int  # elements that moved in fp32 by more than fp32's own rounding
    value: float  # the largest magnitude among them before the step
    course: tuple[float, ...]  # fp32's move of some elements, in half units in the last place


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step beside the same step in fp32, from the same state, batch and random state."""

    step: int
    loss: float | None  # in the run
    reference_loss: float | None
    gradient_error: float  # relative L2 error of all gradients as the optimizer got them
    gradient_ratio: float  # their norm over fp32's; 1 is right
    zeroed: float  # share of gradient elements: nonzero in fp32, zero in the run
    zeroed_share: float  # their share in the squared gradient error
    gradient_norm: float = 1.0  # of fp32's gradients
    updates: tuple[ModuleUpdate, ...] = ()  # half-precision tensors only
    parameters: tuple[ParameterVsFp32, ...] = ()  # trained ones with a gradient in fp32
    states: tuple[StateVsFp32, ...] = ()  # other states in a half format
    events: tuple[StepEvent, ...] = ()
