"""The tightest headroom of a healthy run, as a check of its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampdoctor.evidence.report import Check

if TYPE_CHECKING:
    from ampdoctor.evidence.trace import Headroom, StepOutcome

NAME = "tightest headroom"


def headroom_check(tightest: Headroom | None, outcomes: Sequence[StepOutcome]) -> Iterator[Check]:
    """One check in words and numbers; none where no step was replayed.

    Args:
        tightest: Of the steps that were neither harmed nor skipped; None where no tensor had a reduced format.
        outcomes: Of all steps: a gradient carries the loss scale of its step.
    """
    if tightest is None:
        if outcomes:
            yield Check(name=NAME, result="no tensor in a half-precision format was looked at")
        return
    scale = next((o.scale_before for o in outcomes if o.step == tightest.step), None)
    gradient = tightest.kind != "output"
    module = f"module {tightest.module}" if tightest.module else "the root module"
    what = {
        "output": f"the output of {module}",
        "output_grad": f"the gradient that arrives at the output of {module}",
        "grad": f"a parameter's gradient in {module}",
    }[tightest.kind]
    scaled = f", scaled by {scale:g}," if gradient and scale not in (None, 1.0) else ""
    yield Check(
        name=NAME,
        result=f"{tightest.binades:.1f} binades: {what}{scaled} reaches {tightest.amax:.4g} in step {tightest.step}, "
        f"and {tightest.format} ends at {tightest.limit:.5g}",
        headroom={
            "binades": tightest.binades,
            "module": tightest.module,
            "phase": "backward" if gradient else "forward",
            "tensor": tightest.kind,
            "format": tightest.format,
            "amax": tightest.amax,
            "limit": tightest.limit,
            "loss_scale": scale if gradient else None,
            "step": tightest.step,
        },
    )
