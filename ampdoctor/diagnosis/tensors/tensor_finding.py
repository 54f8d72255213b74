"""A finding about a checkpoint's tensors: what the rules on tensors share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ampdoctor.diagnosis.catalogue.checkpoint_finding import checkpoint_finding
from ampdoctor.diagnosis.catalogue.rule import Rule
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, IndexSummary, TensorSummary
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity

MAX_LISTED = 20
"""Tensors that one finding lists in its evidence."""
MAX_FINDINGS = 20
"""Findings of one rule that are listed one by one; a checkpoint that is NaN everywhere would otherwise fill pages."""
FP16_MAX = 65504.0
"""fp16's largest finite number."""
SMALLEST_MASK_FILL = 1e4
"""Magnitude from which a tensor of zeros and one other magnitude is taken for an additive mask; GPT-2 uses -1e4."""
_ROLE_WORDS = {
    "weight": "weights", "buffer": "buffers", "ema": "averaged weights", "moment": "moments", "scaler": "scalers",
    "other": "tensors",
}  # fmt: skip
FP16_FLUSH_AT = 2.0**-25
"""Magnitude up to which a number becomes zero in fp16."""


def address(tensor: TensorSummary | IndexSummary) -> str:
    """A tensor's name with its group in front ("ema.fc.weight")."""
    return f"{tensor.group}.{tensor.name}" if tensor.group else tensor.name


def state_place(tensor: TensorSummary | IndexSummary) -> Where:
    """The address of a tensor of the model's state."""
    return Where(
        phase="checkpoint",
        module=tensor.module,
        op=f"state:{tensor.entry}",
        tensor=address(tensor),
        file=tensor.file or None,
    )


def listed(tensors: Sequence[TensorSummary]) -> list[str]:
    """Their names, as many as a finding's evidence lists."""
    return [address(tensor) for tensor in tensors[:MAX_LISTED]]


def is_mask(tensor: TensorSummary) -> bool:
    """Whether a tensor's values are those of an additive attention mask: zeros and one large value, or -Inf."""
    if tensor.nans or tensor.pos_infs or tensor.role == "moment":
        return False
    if tensor.zeros == 0 and tensor.role != "buffer":
        return False
    if tensor.neg_infs:
        return tensor.amax is None
    return tensor.amax is not None and tensor.amax == tensor.amin and tensor.amax >= SMALLEST_MASK_FILL


def rest_finding(
    summary: CheckpointSummary,
    rule: Rule,
    severity: Severity,
    tensors: Sequence[TensorSummary],
    are: str,
    *,
    nonfinite: bool = False,
    cause: str | None = "bad_checkpoint",
    prescription: Prescription | None = None,
) -> Iterator[Finding]:
    """One finding for all tensors beyond `MAX_FINDINGS`, which have one each."""
    rest = tensors[MAX_FINDINGS:]
    if not rest:
        return
    first, alike = rest[0], sum(t.role == rest[0].role for t in summary.tensors)
    message = (
        f"{len(rest)} more {_ROLE_WORDS[first.role]} {are}, {label(first)} first; {len(tensors)} of {alike} in all."
    )
    evidence = {"role": first.role, "tensors": len(tensors), "listed": [address(t) for t in rest[:MAX_LISTED]]}
    yield tensor_finding(
        summary,
        rule,
        severity,
        first,
        message,
        evidence,
        nonfinite=nonfinite,
        among=rest,
        cause=cause,
        prescription=prescription,
    )


def castable(summary: CheckpointSummary) -> list[list[TensorSummary]]:
    """Tensors that somebody may cast, by role."""
    roles = ("weight", "buffer", "ema")
    return [[t for t in summary.tensors if t.role == role and not is_mask(t)] for role in roles]


def tensor_finding(  # noqa: PLR0917 - the parts of a finding, in the order in which a sentence would name them
    summary: CheckpointSummary,
    rule: Rule,
    severity: Severity,
    tensor: TensorSummary,
    message: str,
    evidence: Mapping[str, Any],
    *,
    nonfinite: bool = False,
    among: Iterable[TensorSummary] = (),
    cause: str | None = "bad_checkpoint",
    prescription: Prescription | None = None,
) -> Finding:
    """A finding about `tensor`, or about all of those `among` which it is the one to show."""
    return checkpoint_finding(
        summary,
        rule,
        severity,
        message,
        evidence=evidence,
        module=tensor.module,
        op=op_of(tensor),
        born="none" if not nonfinite else "nan" if tensor.nans else "inf",
        tensor=address(tensor),
        file=tensor.file,
        also=(replace(state_place(t), op=op_of(t)) for t in among if t is not tensor),
        cause=cause,
        prescription=prescription,
    )


def op_of(tensor: TensorSummary) -> str:
    """What it is, as a finding's address says it ("state:weight", "optimizer_state:exp_avg")."""
    in_optimizer = tensor.role == "moment" or (tensor.role == "other" and tensor.entry == "step")
    return f"{'optimizer_state' if in_optimizer else 'state'}:{tensor.entry}"


def label(tensor: TensorSummary) -> str:
    """What a sentence calls it."""
    return f"{tensor.entry} of {address(tensor)}" if op_of(tensor).startswith("optimizer_state") else address(tensor)


def numbers(tensor: TensorSummary) -> dict[str, Any]:
    """Its figures as JSON values."""
    return {
        "role": tensor.role,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "examined": tensor.examined,
        "nans": tensor.nans,
        "pos_infs": tensor.pos_infs,
        "neg_infs": tensor.neg_infs,
        "amax": tensor.amax,
    }


def cast_row(tensor: TensorSummary, name: str) -> dict[str, Any]:
    """What a cast to a format would do to it, as JSON values."""
    loss = tensor.cast(name)
    row: dict[str, Any] = {"tensor": address(tensor), "dtype": tensor.dtype, "amax": tensor.amax}
    if tensor.counted < tensor.examined:
        row |= {"counted": tensor.counted, "examined": tensor.examined}
    if loss is not None:
        row |= {
            "flushed": loss.flushed,
            "subnormal": loss.subnormal,
            "overflowed": loss.overflowed,
            "relative_error": loss.relative_error,
        }
    return row


def count_of(tensors: Sequence[TensorSummary], verb: str = " hold") -> str:
    """How many they are, in words, as the subject of a sentence."""
    words = _ROLE_WORDS[tensors[0].role]
    if len(tensors) == 1:
        return f"1 {words.removesuffix('s')}{verb and verb + 's'}"
    return f"{len(tensors)} {words}{verb}"


def percent(share: float) -> str:
    """A share for a sentence."""
    return f"{100 * share:.3g} %"
