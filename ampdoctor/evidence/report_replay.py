"""The sections of a replay's report: the search for the first bad step, its proof, refused calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ampdoctor.evidence.json_records import UNWRITTEN, Count
from ampdoctor.evidence.location import Phase, Source

NodeRole = Literal["before", "origin", "carrier", "affected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathNode:
    """One op on the way.

    Attributes:
        order: Position among the ops of the step; -1 for what was there before it.
        phase, module: As in where.
        type: Class of the module, empty for code outside the model.
        op: As in where; of a harm the name of the target.
        role: before: finite, and the largest input of the next node. carrier: one op of a call of a module
            through which the values pass. harm: the first target of its kind.
        dtype: Of the result.
        shape: Size of each dimension of the result.
        input_amax: Largest finite magnitude among the inputs; of before-nodes among those that the step made.
            None where it is not known.
        output_amax: Largest finite magnitude of the result; None where it is not known.
        nan: NaN elements of the result.
        inf: Infinite elements of the result.
        limit: Largest finite number of the output's format.
        source: The user's line that ran the op.
    """

    order: int
    phase: Phase
    module: str
    type: str
    op: str
    role: NodeRole
    dtype: str
    shape: tuple[Count, ...]
    input_amax: float | None
    output_amax: float | None
    nan: Count
    inf: Count
    limit: float | None
    source: Source | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSection:
    """The way from an origin to its harm.

    Attributes:
        fingerprint: Of the finding whose origin this is.
        step: The step of the origin.
        nodes: In the order of the ops: what fed the origin, the origin, what carries its values to the first
            harm, the first target of each kind.
        affected: Everything that the origin's values harm, in the order in which it was seen.
        omitted: Ops between the origin and its first harm that carry its values and have no node.
    """

    fingerprint: str
    step: Count
    nodes: tuple[PathNode, ...]
    affected: tuple[str, ...]
    omitted: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """How one replayed step ended.

    Attributes:
        loss: The loss, unscaled.
        scale: The loss scale; None without a scaler.
        gradient_norm: L2 norm of all gradients as the optimizer got them; None where they were not looked at or
            it did not step.
        skipped: Whether the scaler skipped the step.
        finite: Nothing that harms training was non-finite, in a skipped step either.
    """

    loss: float | None
    scale: float | None
    gradient_norm: float | None
    skipped: bool
    finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStep:
    """One step, replayed in three ways.

    Attributes:
        step: Which step.
        without: Without the change.
        with_: With it.
        fp32: In the fp32 reference.
    """

    step: Count
    without: StepFigures | None
    with_: StepFigures | None
    fp32: StepFigures | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSection:
    """The same steps without and with a change, beside fp32.

    Attributes:
        fingerprint: Of the finding that the change answers; empty where it answers none.
        kind: As prescription.kind.
        value: As prescription.value.
        status: As prescription.status.
        steps: In order, from up to three before the first with the change on; None where a step was not
            replayed so.
        omitted: Replayed steps between the first and the last of these that are not shown.
    """

    fingerprint: str
    kind: str
    value: Any
    status: str
    steps: tuple[ProofStep, ...]
    omitted: Count


# -- a GradScaler refuses a call although the order of calls is right --

FINITE_CHECK = "finite loss, gradients, parameters, buffers and optimizer state"
"""The name of the check whether every value of the replayed steps is finite."""
NOT_COMPARED = "comparison with fp32"
"""What a replay has left out if its steps are not held against fp32."""
FP32_CHECK = "gradients and updates agree with fp32"
"""The check of a replay's steps beside the same steps in fp32."""
HALF_WEIGHTS = (
    "make the trained weights in fp32 (no model.half(); from_pretrained(..., dtype=torch.float32)) and leave half to "
    "autocast; pure half needs no GradScaler"
)
WITHOUT_GRADIENTS = "give scaler.step an optimizer whose parameters got gradients in this step"
NOT_THE_ORDER = (HALF_WEIGHTS, WITHOUT_GRADIENTS)
"""Changes for a misuse (AMP407) for which the recipe's order of calls would mislead."""


# -- replayed steps without a change, with it, and in fp32 --


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep(StepFigures):
    """How one replayed step ended, in the numbers that people compare.

    Attributes:
        step: The step.
    """

    step: int = field(metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The same steps three times, as far as they were replayed.

    Attributes:
        without: The run as it is.
        changed: The run with the change.
        fp32: The reference.
    """

    without: tuple[ReplayedStep, ...] = ()
    changed: tuple[ReplayedStep, ...] = ()
    fp32: tuple[ReplayedStep, ...] = ()
