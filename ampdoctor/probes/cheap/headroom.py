"""How far the tensors of a healthy step stay below the largest number of their format."""

from __future__ import annotations

import math

import torch

from ampdoctor.evidence.of_runs.trace import Headroom
from ampdoctor.numerics.formats import FORMATS

FAR = 8.0
"""Binades below its format's end from which on an output is no longer kept step by step: nobody asks where it heads."""
_REDUCED = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Tightest:
    """The smallest headroom among what a step's extremes show.

    Counted are outputs of leaf modules and of the root, the gradients that arrive at them, and the gradients of
    parameters whose module computes in a reduced format: autocast casts those to float32 only after they were made.
    -inf and the format's lowest number are masks that someone wrote down: of such a tensor only the upper end counts,
    which then is that of the values beside the mask.

    Args:
        step: The step.

    Attributes:
        found: The tightest so far; None before the first.
        near: The largest output of each module that came within `FAR` of its format's end.
    """

    def __init__(self, step: int) -> None:
        self.found: Headroom | None = None
        self.near: dict[str, Headroom] = {}
        self._step = step
        self._reduced: dict[str, str] = {}

    def note(self, kind: str, name: str, dtype: torch.dtype, low: float, high: float) -> None:
        """A tensor was seen; the outputs of a step before its gradients.

        Args:
            kind: "output", "output_grad", "grad"; anything else is no tensor that a format computes.
            name: The module; the parameter where it is a "grad".
            dtype: The tensor's own.
            low: Its smallest element.
            high: Its largest.
        """
        if kind == "output" and dtype in _REDUCED:
            self._reduced[name] = _REDUCED[dtype]
        module = name.rpartition(".")[0] if kind == "grad" else name
        if kind not in ("output", "output_grad", "grad") or not math.isfinite(high):
            return
        format_name = _REDUCED.get(dtype) or (self._reduced.get(module) if kind == "grad" else None)
        if format_name is None:
            return
        limit = FORMATS[format_name].max
        amax = abs(high) if low <= -limit else max(abs(low), abs(high))
        if not 0.0 < amax <= limit:  # beyond it lies only a sum of several gradients, made in float32
            return
        share = amax / limit
        tighter = self.found is None or share > self.found.amax / self.found.limit
        known = self.near.get(module)
        nearer = kind == "output" and share >= 2.0**-FAR and (known is None or share > known.amax / known.limit)
        if not (tighter or nearer):
            return
        headroom = Headroom(step=self._step, module=module, kind=kind, format=format_name, amax=amax, limit=limit)
        if tighter:
            self.found = headroom
        if nearer:
            self.near[module] = headroom
