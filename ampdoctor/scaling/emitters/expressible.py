"""What becomes of settings in a framework that cannot take all of them."""

from __future__ import annotations

import math
from dataclasses import replace

from ampdoctor.evidence.frameworks import Framework
from ampdoctor.scaling.settings import ScalerSettings


def expressible(settings: ScalerSettings, framework: Framework) -> ScalerSettings:
    """The settings as the framework would run them, its own floor included.

    Args:
        settings: What is wanted.
        framework: Whose scaler.
    """
    fixed = replace(settings, growth_factor=2.0, backoff_factor=0.5)
    if framework == "deepspeed":
        least = max(1, int(settings.min_scale or 1))
        power = max(math.floor(math.log2(settings.scale)), math.ceil(math.log2(least)))
        return replace(fixed, scale=2.0**power, min_scale=float(least))
    if framework == "megatron":
        return replace(fixed, min_scale=settings.min_scale or min(1.0, settings.scale))
    if framework == "fairseq":
        return replace(fixed, scale=float(max(1, int(settings.scale))), hysteresis=1)
    return replace(settings, hysteresis=1)
