"""What a range profile says to the choice of a precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.evidence.precision import PrecisionFacts, ScaleFacts, Spread
from ampdoctor.numerics import FORMATS, FloatFormat
from ampdoctor.scaling.choice import COMPOUNDING, choose_scale
from ampdoctor.workflows.advising import MASK_LIKE

if TYPE_CHECKING:
    from ampdoctor.evidence.modules import ModuleFacts, UpdateFacts
    from ampdoctor.evidence.targets import Target
    from ampdoctor.scaling.choice import ScaleChoice
    from ampdoctor.scaling.measured import Measured

FP8_FLUSHED = 1e-2
"""Share of a tensor's nonzero elements that FP8 may lose: ten times what a loss scale aims at, as FP8's recipes keep
sums and master weights wide and lose the smallest of each tensor by design (Transformer Engine's default is HYBRID,
which this share gives on the gradients that were measured: 23 binades)."""


def precision_facts(
    measured: Measured,
    target: Target,
    *,
    choice: ScaleChoice | None = None,
    modules: Sequence[ModuleFacts] = (),
    updates: Sequence[UpdateFacts] = (),
    pure: bool = False,
    precision_matters: bool = False,
    flushed: float = FP8_FLUSHED,
) -> PrecisionFacts:
    """Read off a profile what `diagnosis.precision_advice.advise_precision` asks.

    Args:
        measured: The profile.
        target: The hardware.
        choice: The loss scale that was chosen for the profile; None: it is chosen here.
        modules: From `probes.module_facts`.
        updates: From `probes.updates`.
        pure: The run keeps its weights in its compute format.
        precision_matters: The user needs more than bf16's 8 bits.
        flushed: Share of a tensor's nonzero elements that FP8 may lose, 0 to 1.
    """
    chosen = choice if choice is not None else choose_scale(measured)
    forward: dict[str, float] = {}
    for m in measured.sites:
        amax = m.histogram.amax
        if m.site.kind == "activation" and m.site.half and amax is not None and amax < MASK_LIKE:
            forward[m.site.module] = max(amax, forward.get(m.site.module, 0.0))
    fp16 = bf16 = None
    if chosen is not None:
        gradients = measured.merged("weight_grad", chosen.fp32_modules)
        scale = measured.factor("weight_grad", 2.0**chosen.exponent)
        fp16 = COMPOUNDING * gradients.relative_error("fp16", scale)
        bf16 = COMPOUNDING * gradients.relative_error("bf16", measured.factor("weight_grad", 1.0))
    return PrecisionFacts(
        target=target,
        own=measured.profile.precision,
        pure=pure,
        forward=forward,
        forward_flushed=measured.merged("activation").flushed(fp16_of(target)),
        scale=None
        if chosen is None
        else ScaleFacts(exponent=chosen.exponent, unserved=chosen.unserved, share=chosen.share),
        fp16_error=fp16,
        bf16_error=bf16,
        spreads=tuple(_spreads(measured, flushed)),
        modules=tuple(modules),
        updates=tuple(updates),
        precision_matters=precision_matters,
    )


def fp16_of(target: Target) -> FloatFormat:
    """The fp16 of a target's forward: without subnormals where it flushes them.

    The threshold then lies at the upper end of a bin, which holds the smallest normal number itself as well: where many
    values are exactly that, they count as flushed.
    """
    fp16 = FORMATS["fp16"]
    if not target.flushes_subnormals:
        return fp16
    least = 2.0**target.fp16_flush
    return replace(fp16, min_normal=least, min_subnormal=least, flush_at=math.nextafter(least, 0.0))


def _spreads(measured: Measured, flushed: float) -> Iterator[Spread]:
    """Of each half tensor that a matrix product reads or makes."""
    for m in measured.sites:
        kind = m.site.kind
        if kind == "weight_grad" or not m.site.half:
            continue
        top, low = m.histogram.amax, m.histogram.quantile(flushed)
        if top is not None and low is not None and top < MASK_LIKE:
            yield Spread(module=m.site.module, kind=kind, binades=math.log2(top) - math.log2(low))
