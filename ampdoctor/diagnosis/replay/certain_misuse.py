"""Misuse of a scaler that its calls alone show: for a loop that runs once, where no comparison with fp32 can decide.

A step may scale its losses and unscale its gradients in its own code, and is well then (`scaler_misuse` compares). It
needs the scale for that: what breaks the protocol without having asked for the scale is misuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampdoctor.diagnosis.replay.causes import MISUSE_ADVICE
from ampdoctor.diagnosis.replay.scaler_misuse import MISUSE_RATIO, RULE, stepped_again_finding
from ampdoctor.evidence.of_runs.trace import StepEvent
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.where import Source, Where


def certain_misuse(events: Sequence[StepEvent], step: int, source: Source | None) -> Finding | None:
    """The finding for a call that uses, clips or mixes gradients while they are scaled; None where that is not certain.

    Args:
        events: The step's calls so far; the last one is judged.
        step: The step.
        source: The line of the loop that makes the call.
    """
    event = events[-1]
    if event.again and event.scale is not None:
        return stepped_again_finding(step, source, held_back=event.held_back)
    late = any(earlier.kind == "unscale" and earlier.optimizer == event.optimizer for earlier in events[:-1])
    if event.knows_scale or event.scale is None or (late and event.kind == "unscale"):  # torch refuses the second
        return None
    scale = f"{event.scale:g}"
    held = " and ".join(f"{other:g}" for other in event.scales if other != 1.0)
    others = [f"{other:g}" for other in event.scales if other not in (1.0, event.scale)]
    if event.kind == "optimizer_step" and event.still_scaled and not event.unscaled:
        op = "optimizer.step"
        said = f"the step uses {event.still_scaled} gradients that are still scaled by {held}"
    elif event.kind == "optimizer_step" and event.misscaled and late:
        op = "scaler.unscale_"
        said = f"{event.misscaled} gradients went on to collect gradients scaled by {held} after scaler.unscale_"
    elif event.kind == "optimizer_step":
        return None
    elif event.misscaled and others:
        op = "scaler.step"
        said = f"{event.misscaled} gradients are divided by {scale}, but were scaled by {' and '.join(others)}"
    elif event.misscaled:
        op = "backward"
        said = (
            f"{event.misscaled} gradients are in part those of a loss that was not scaled by {scale}, "
            "and are divided by it"
        )
    elif event.clipped is not None and _shortened(event) > MISUSE_RATIO.default:
        op = "clip_grad_norm_"
        said = (
            f"gradients were clipped from norm {event.clipped[0]:.4g} to {event.clipped[1]:.4g} while they were still "
            f"scaled by {scale}"
        )
    else:
        return None
    advice = MISUSE_ADVICE[op]
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=step, phase="optimizer", op=op, source=source),
        message=f"step {step}: {said}",
        evidence={
            "scale": event.scale,
            "scales": list(event.scales),
            "edited": event.edited,
            "still_scaled": event.still_scaled,
            "misscaled": event.misscaled,
            "clipped": None if event.clipped is None else list(event.clipped),
        },
        help=f"{advice[0].upper()}{advice[1:]}.",
    )


def _shortened(event: StepEvent) -> float:
    """By which factor clipping scaled gradients leaves them shorter than clipping unscaled ones to the same norm."""
    before, most = event.clipped or (0.0, 0.0)
    if not (math.isfinite(before) and event.scale and most > 0):
        return 1.0
    return min(before / most, event.scale)
