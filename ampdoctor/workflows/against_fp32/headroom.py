"""The tightest headroom of a healthy run, as a check of its report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampdoctor.evidence.report import Check

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Headroom, StepOutcome
    from ampdoctor.workflows.against_fp32.side_by_side import Replayed
    from ampdoctor.workflows.opening.request import ReplayRequest

NAME = "tightest headroom"
_GRADIENTS_ONLY = "looks at no layer's output until a step fails"


def headroom_check(
    tightest: Headroom | None, outcomes: Sequence[StepOutcome], seen: Sequence[Replayed], request: ReplayRequest
) -> Iterator[Check]:
    """Yields one check in words and numbers; none if no step was replayed.

    Args:
        tightest: The tightest headroom of steps without harm or skip; None if no tensor had a reduced format.
        outcomes: All steps' outcomes: a gradient carries the loss scale of its step.
        seen: What the probe saw in these steps.
        request: The request: `--strategy bisect` does not look at the layers' outputs until a step fails.
    """
    layers = request.strategy != "bisect" and not request.until_sick
    option = "--until-sick" if request.until_sick else "--strategy bisect"
    if tightest is None:
        if outcomes:
            yield Check(name=NAME, result=_unknown(outcomes, seen, None if layers else option))
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
        f"and {tightest.format} ends at {tightest.limit:.5g}{'' if layers else f'; {option} {_GRADIENTS_ONLY}'}",
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


def _unknown(outcomes: Sequence[StepOutcome], seen: Sequence[Replayed], option: str | None) -> str:
    known = outcomes[len(outcomes) - len(seen) :]  # of a run until it is sick the last ones
    if all(outcome.skipped or _harmed(outcome, step) for outcome, step in zip(known, seen, strict=True)):
        return "not measured: each step was skipped or met something non-finite"
    if option is not None:
        other = " (--strategy trace does)" if option == "--strategy bisect" else ""
        return f"not measured: {option} looks at no layer until a step fails{other}"
    return "no tensor in a half-precision format was looked at"


def _harmed(outcome: StepOutcome, step: Replayed) -> bool:
    """Is the loss or a gradient non-finite? An infinity in an output does not count: it may be a mask."""
    return outcome.raised is not None or not all(
        math.isfinite(one.value) for one in step.observed if one.kind not in ("output", "output_grad")
    )
