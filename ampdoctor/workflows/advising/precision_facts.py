"""What a range profile says about the choice of a precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ampdoctor.evidence.of_runs.precision import PrecisionFacts, ScaleFacts, Spread
from ampdoctor.numerics import FORMATS, FloatFormat
from ampdoctor.scaling.choice import COMPOUNDING
from ampdoctor.workflows.advising.advice import MASK_LIKE

if TYPE_CHECKING:
    from ampdoctor.evidence.targets import Target
    from ampdoctor.ranges.profile import RangeProfile
    from ampdoctor.scaling.choice import ScaleChoice

FP8_FLUSHED = 1e-2
"""Share of a tensor's nonzero elements that FP8 may lose: ten times the aim of a loss scale, because FP8's recipes keep
sums and master weights wide and lose the smallest of each tensor by design (Transformer Engine's default is HYBRID,
and this share gives HYBRID for the measured gradients: 23 binades)."""


def precision_facts(
    profile: RangeProfile,
    target: Target,
    *,
    choice: ScaleChoice | None,
    pure: bool = False,
    harm: str | None = None,
    settled: bool = False,
    precision_matters: bool = False,
    flushed: float = FP8_FLUSHED,
) -> PrecisionFacts:
    """Derive from a profile the facts that `diagnosis.precision_advice.advise_precision` needs.

    Args:
        profile: The measured ranges.
        target: The hardware.
        choice: The loss scale chosen for the profile; None if no half gradient was seen.
        pure: The run keeps its weights in its compute format: no autocast, no fp32 master weights.
        harm: What went wrong in an fp16 replay and no loss scale cures, a clause; None if nothing or without a replay.
        settled: The scaler did not skip the steps after that replay's harm.
        precision_matters: The user needs more than bf16's 8 bits.
        flushed: Share of a tensor's nonzero elements that FP8 may lose, 0 to 1.
    """
    forward: dict[str, float] = {}
    for index in profile.of_kind("activation"):
        module, amax = profile.sites[index].module, profile.histograms[index].amax
        if amax is not None and amax < MASK_LIKE:
            forward[module] = max(amax, forward.get(module, 0.0))
    scale = fp16 = bf16 = None
    if choice is not None:
        gradients = profile.merged("weight_grad", choice.fp32_modules)
        fp16 = COMPOUNDING * gradients.relative_error("fp16", profile.factor("weight_grad", 2.0**choice.exponent))
        bf16 = COMPOUNDING * gradients.relative_error("bf16", profile.factor("weight_grad", 1.0))
        scale = ScaleFacts(exponent=choice.exponent, unserved=choice.unserved, share=choice.share)
    return PrecisionFacts(
        target=target,
        own=profile.run.precision,
        pure=pure,
        forward=forward,
        forward_flushed=profile.merged("activation").flushed(fp16_of(target)),
        scale=scale,
        fp16_error=fp16,
        bf16_error=bf16,
        harm=harm,
        settled=settled,
        spreads=tuple(_spreads(profile, flushed)),
        modules=profile.modules,
        updates=profile.updates,
        precision_matters=precision_matters,
    )


def fp16_of(target: Target) -> FloatFormat:
    """Returns the fp16 of a target's forward: without subnormals if the target flushes them.

    The threshold is then the upper end of a bin that also holds the smallest normal number itself. If many values are
    exactly that number, they count as flushed.
    """
    fp16 = FORMATS["fp16"]
    if not target.flushes_subnormals:
        return fp16
    least = 2.0**target.fp16_flush
    return replace(fp16, min_normal=least, min_subnormal=least, flush_at=math.nextafter(least, 0.0))


def _spreads(profile: RangeProfile, flushed: float) -> Iterator[Spread]:
    """Yields the spread of each half tensor that a matrix product reads or makes."""
    kinds: tuple[Literal["activation", "weight", "activation_grad"], ...] = ("activation", "weight", "activation_grad")
    for kind in kinds:
        for index in profile.of_kind(kind):
            top, low = profile.histograms[index].amax, profile.histograms[index].quantile(flushed)
            if top is not None and low is not None and top < MASK_LIKE:
                binades = math.log2(top) - math.log2(low)
                yield Spread(module=profile.sites[index].module, kind=kind, binades=binades)
