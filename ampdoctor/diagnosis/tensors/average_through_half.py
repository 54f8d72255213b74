"""AMP114: an averaged copy is infinite where the model's own tensor is finite and beyond fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ampdoctor.diagnosis.catalogue.rule import SCANNED, register
from ampdoctor.diagnosis.tensors.beyond_fp16 import FP16_OVERFLOW_AT
from ampdoctor.diagnosis.tensors.tensor_finding import (
    FP16_MAX,
    MAX_FINDINGS,
    address,
    label,
    numbers,
    rest_finding,
    tensor_finding,
)
from ampdoctor.evidence.checkpoint_stats import CheckpointSummary, TensorSummary
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.thresholds import Thresholds

RULE = register(
    "AMP114",
    "average-through-half",
    "An averaged copy was cast to fp16 and is infinite",
    worst="error",
    commands=(*SCANNED, "bisect-nan", "run"),
)


def cast_averages(summary: CheckpointSummary) -> dict[str, tuple[TensorSummary, TensorSummary]]:
    """Returns the averaged copies that went through fp16, each with the model's tensor, by the copy's address.

    They hold Inf and no NaN, and the model's tensor of the same name and shape is finite and beyond fp16: an average of
    finite numbers stays below the largest of them, and is never Inf in the range of fp32 and bf16.
    """
    averages = [t for t in summary.tensors if t.role == "ema" and t.infs and not t.nans]
    if not averages:
        return {}
    own = {_bare(t.name): t for t in summary.tensors if t.role in {"weight", "buffer"}}
    pairs = ((t, _twin(t, own)) for t in averages)
    return {
        address(t): (t, twin)
        for t, twin in pairs
        if twin is not None and not twin.nonfinite and twin.amax is not None and twin.amax >= FP16_OVERFLOW_AT
    }


def _twin(average: TensorSummary, own: Mapping[str, TensorSummary]) -> TensorSummary | None:
    """The model's tensor of an averaged copy: the name is the same, or is so without a prefix (`ema.`, `module.`)."""
    rest = average.name
    while rest:
        twin = own.get(_bare(rest))
        if twin is not None and twin.shape == average.shape:
            return twin
        rest = rest.partition(".")[2]
    return None


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace(".", "")  # the average of Stable Diffusion has no dots


@RULE.judges(CheckpointSummary)
def _through_half(summary: CheckpointSummary, _: Thresholds) -> Iterator[Finding]:
    pairs = list(cast_averages(summary).values())
    for average, twin in pairs[:MAX_FINDINGS]:
        message = (
            f"{label(average)}, an averaged copy, holds {average.infs} Inf, and {label(twin)} of the model is finite "
            f"and reaches {twin.amax:.6g}, beyond fp16's largest number, 65504: the copy was cast to fp16 and back. "
            f"Copy it from the model, and validate a copy of the average, not the average itself."
        )
        evidence = {**numbers(average), "model": address(twin), "model_amax": twin.amax, "limit": FP16_MAX}
        yield tensor_finding(summary, RULE, "error", average, message, evidence, nonfinite=True)
    averages = [average for average, _ in pairs]
    yield from rest_finding(summary, RULE, "error", averages, "went through fp16", nonfinite=True)
