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
    """The op of an origin, run again in float64 and in float32 on the same inputs.

    `finite` says that every element that was non-finite is finite in float64, `finite32` the same for float32: if not,
    no fp32 module cures the op. `amax` and `amax32` are the largest finite magnitudes among those elements, 0.0 without
    one.

    `overflow` is for cases that `amax` does not show: the op is finite in its own format after its inputs are reduced
    to at most 1, so that something overflows: a partial result inside it (the squares of a layer norm), or a result
    beyond float64 (exp(1000)). `returns` says that the op is again not finite in its own format on the same inputs: it
    is False for a kernel that shows memory which it has not written, or whose threads race.
    """

    finite: bool
    amax: float
    limit: float  # largest finite number of the output's format
    finite32: bool | None = None  # None without a float32 kernel
    amax32: float = 0.0
    overflow: bool | None = None  # None if not tried
    returns: bool | None = None  # None if not tried


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
            - "unseen": memory that an op left finite, and that was then written without a torch op;
            - "any": an operator that torch does not have itself is not finite for any input that was tried.
        op, module, source: The op that made it ("aten.add"), its module and the user's line; None before the step.
        dtype: The format in which it was made.
        here: Its value.
        float64: The value that it would have had if its op had computed in float64; None if unknown.
        fraction: Share of the elements of the op's result that were lost.
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
class PathOp:
    """An op on the path from an origin's inputs to its harm, or a target (harmed value) that the origin's values reach.

    `order` is the position among the ops of the step; for a target, that of the op that wrote it. The op in `where` of
    a target is the target's name ("loss", "grad:fc.weight"). `input_amax` is the largest finite magnitude among the
    inputs; before an origin, among those that the step made.
    """

    order: int
    where: Where
    dtype: str = ""  # of the result; "" without a tensor
    shape: tuple[int, ...] = ()
    input_amax: float | None = None
    amax: float | None = None  # largest finite magnitude of the result
    nans: int = 0  # of the result
    infs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagationPath:
    """How an origin came about, and what it harmed.

    `before` are finite ops that fed it, the nearest last; each made the largest input of the next. `carriers` are ops
    between it and its first harm that carry its values: for each call of a module, the first op that does more than
    move them. `affected` are the first affected of each kind that it reached, in the order of the ops. `omitted` is the
    number of other ops between it and its first harm that carry its values and make something.
    """

    before: tuple[PathOp, ...] = ()
    carriers: tuple[PathOp, ...] = ()
    affected: tuple[PathOp, ...] = ()
    omitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOrigin:
    """A non-finite value made from finite inputs.

    `departs` is the largest difference, relative to the value in float32, of a finite result made from this origin's
    values; 0.0 if none departs (inf -> tanh -> 1), up to 1.0 (inf -> rsqrt -> 0) and beyond. `after_backward` marks, in
    the phase "optimizer", an op of the user's own code after the backward and outside every optimizer (an EMA, a
    projection of the weights).
    """

    order: int  # among the ops of the step; -1 before the step
    where: Where
    came_from: Origin
    kernel: str  # ATen kernel below the user-level op ("aten.addmm")
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    recomputed: Recomputation | None = None  # None if it cannot run in float64
    operand: Operand | None = None  # that took the op out of its domain
    affected: tuple[str, ...] = ()  # names of the values that it has made non-finite
    departs: float = 0.0
    way: PropagationPath = field(default_factory=PropagationPath)
    after_backward: bool = False


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
    """An op of the forward that turns a small error into a large one, or makes one itself.

    Errors are relative L2 errors against the forward in fp32.
    """

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
    """How one replayed step ended.

    `skipped` means: an enabled scaler's `step` was called and no optimizer stepped; without an optimizer: none would
    have.
    """

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
        """Whether it made updates, each through a scaler, so that no gradient that is not finite was used.

        A scaler's `step` steps its optimizer only if all gradients of that optimizer are finite. Others may be left
        behind: a generator's backward goes through the discriminator, which has stepped before.
        """
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
        """Whether one of these non-finite values (names as in `NonFiniteReport`) was used, or skipped.

        Gradients that are left behind do no harm.
        """
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
    """The results of the cheap check of one step.

    `affected` are names of harmed values ("loss", "grad:fc.weight", "param:...", "buffer:...", "optimizer_state:..."),
    and "raised" if the user's code ended the step with an exception. `fingerprint` is a hash of the loss, every checked
    output and every gradient: equal for bit-identical steps.
    """

    affected: tuple[str, ...]
    outputs: tuple[str, ...]  # modules with non-finite outputs, in the order of execution
    output_grads: tuple[str, ...]  # modules with non-finite output gradients, as the backward ran
    fingerprint: str


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
    """A trained parameter's gradient and move in one step, compared with the same step in fp32.

    `looked_at` counts the elements whose moves were compared; `update` and `expected_update` are norms over these.
    `below_half_ulp` counts elements whose move in fp32 is less than half a unit in the last place of the weight's
    format. `rounding` is the norm of what rounding to the weight's format may do to either update: half a unit in the
    last place of each. `course` is fp32's move of some elements, in half units in the last place, if none moves in the
    run.
    """

    name: str
    gradient: float  # norm of the gradient that the optimizer got
    expected: float  # norm of fp32's
    error: float  # norm of their difference
    flushed_error: float  # norm of fp32's elements where the run's are zero
    nonzero: int  # nonzero elements of fp32's gradient
    flushed: int  # those that are zero in the run
    looked_at: int
    moved: int  # elements that moved in the run
    meant_to_move: int  # elements that moved in fp32
    stalled: int  # those that did not move in the run
    below_half_ulp: int
    update: float
    expected_update: float
    rounding: float = 0.0
    course: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVsFp32:
    """How a state in a half format that no optimizer trains moved in a step, compared with fp32.

    `name` is "norm.running_var", for optimizer state "optimizer:PARAMETER.KEY", for state of the run's own code its
    name there ("EMA.module.out.weight"). `kind` is "buffer" also for a parameter without an optimizer; "counter" is
    optimizer state of one element. `meant_to_move` counts elements that moved in fp32 by more than fp32's own rounding,
    `value` is the largest magnitude among them before the step. `course` is fp32's move of some elements, in half units
    in the last place.
    """

    name: str
    kind: StateKind
    dtype: str  # "float16" or "bfloat16"
    looked_at: int  # elements whose moves were compared
    moved: int  # elements that moved in the run
    meant_to_move: int
    value: float
    course: tuple[float, ...]


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
