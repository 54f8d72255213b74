"""Misuse of a scaler that its calls alone show: for a loop that runs once, where no comparison with fp32 can decide.

A step may scale its losses and unscale its gradients in its own code, and is well then (`scaler_misuse` compares). It
needs the scale for that: what breaks the protocol without having asked for the scale is misuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ampdoctor.diagnosis.replay.causes import MISUSE_ADVICE
from ampdoctor.diagnosis.replay.scaler_misuse import MISUSE_RATIO, RULE, stepped_again_finding, stepped_past_finding
from ampdoctor.evidence.location import Source, Where
from ampdoctor.evidence.of_runs.handling import Change, Handling
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.trace import StepEvent


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
    if event.past_scaler:
        return stepped_past_finding(step, source, event.scale)
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
    evidence = {
        "scale": event.scale,
        "scales": list(event.scales),
        "edited": event.edited,
        "still_scaled": event.still_scaled,
        "misscaled": event.misscaled,
        "clipped": None if event.clipped is None else list(event.clipped),
    }
    return _finding(step, op, said, source, evidence)


def _finding(step: int, op: str, said: str, source: Source | None, evidence: dict[str, Any]) -> Finding:
    advice = MISUSE_ADVICE[op]
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="scaler_misuse",
        where=Where(step=step, phase="optimizer", op=op, source=source),
        message=f"step {step}: {said}",
        evidence=evidence,
        help=f"{advice[0].upper()}{advice[1:]}.",
    )


def _shortened(event: StepEvent) -> float:
    """By which factor clipping scaled gradients leaves them shorter than clipping unscaled ones to the same norm."""
    before, most = event.clipped or (0.0, 0.0)
    if not (math.isfinite(before) and event.scale and most > 0):
        return 1.0
    return min(before / most, event.scale)


_SAME = 1e-3
"""Relative difference up to which a factor is the inverse of the scale: a world size or a count of micro-batches that
is no power of two differs by far more, and float32 arithmetic by far less."""
_LOW = 16.0
"""Scales below are those of a run in which nothing is scaled, and are easily met by a world size."""
_SAME_NORM, _OTHER_FACTOR = 1e-4, 1e-3
"""Relative differences of two steps' norms, and of their factors. Norms that agree to 1e-4 although what the gradients
were multiplied by differs ten times as much were made equal: by no factor that is a constant, or a count."""
_OWN_BOUND, _SCALED_BOUND = 0.05, 1e-3
"""Bounds, in units of the scale, below which they were not meant for scaled gradients. Norms are cut to 0.1 and more:
what is below 0.05 after the division by the scale was meant without it. A loop that has asked for its scale may have
multiplied a small bound by it: a thousandth is left to it."""


class Cuts:
    """The steps of an optimizer whose gradients were multiplied while they were scaled."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []  # factor, norm afterwards, scale

    def add(self, factor: float, norm: float, scale: float) -> tuple[float, ...]:
        """Note one; returns the scales of those before that had another factor and came to the same norm."""
        same = tuple(
            at
            for other, there, at in self._steps
            if abs(there - norm) <= _SAME_NORM * norm and abs(other - factor) > _OTHER_FACTOR * factor
        )
        self._steps = [*self._steps[-63:], (factor, norm, scale)]
        return same


def misuse_by_hand(at: Handling, cuts: Cuts) -> Finding | None:
    """The finding for a step whose numbers show that the loop's own code has mishandled the scale; None without one.

    Args:
        at: The step.
        cuts: Of its optimizer; this step is added.
    """
    if at.scale < _LOW:
        return None
    found = _scaled_twice(at) or _used_scaled(at) or _divided_twice(at) or _cut_scaled(at, cuts)
    if found is None:
        return None
    op, said = found
    evidence = {
        "scale": at.scale,
        "before_unscaling": None if at.before is None else _of(at.before),
        "afterwards": None if at.after is None else _of(at.after),
    }
    line = at.scaled_again if op == "GradScaler.scale" else at.source
    return _finding(at.step, op, said, line, evidence)


def _scaled_twice(at: Handling) -> tuple[str, str] | None:
    if at.scaled_again is None or not (at.unscaled or at.by_itself):
        return None
    known = at.after is not None and (at.before is not None or at.by_itself)
    if _divisions(at) or (at.knows_scale and not known):
        return None
    said = f"a loss of which a part was scaled already is scaled once more, by {at.scale:g}, and unscaled once"
    return "GradScaler.scale", said


def _used_scaled(at: Handling) -> tuple[str, str] | None:
    if at.unscaled or at.by_itself or at.after is None or at.after.factor != 1.0:
        return None
    return "optimizer.step", f"the step uses gradients that are still scaled by {at.scale:g}"


def _divided_twice(at: Handling) -> tuple[str, str] | None:
    if at.after is None or at.after.norm >= at.scale**-0.5:  # what is of usual length was not divided once too often
        return None
    if at.unscaled and _divisions(at) and at.scaled_again is None:
        said = f"the gradients are divided by {at.scale:g} twice: by the scaler and by the loop's own code"
    elif not at.unscaled and not at.by_itself and _is_inverse(at.after, at.scale**2, at.clipped):
        said = f"the loop's own code divides the gradients by {at.scale:g} twice"
    else:
        return None
    return "unscale", f"{said}; what reaches the optimizer has norm {at.after.norm:.3g}"


def _cut_scaled(at: Handling, cuts: Cuts) -> tuple[str, str] | None:
    done, most = at.before, at.scale * (_SCALED_BOUND if at.knows_scale else _OWN_BOUND)
    if done is None or not at.unscaled:
        return None
    if done.bound is not None and done.most / done.bound > MISUSE_RATIO.default and done.bound < most:
        said = f"gradients of magnitudes up to {done.most:.4g} were cut to {done.bound:.4g}"
    elif done.factor is not None and 0 < done.factor < 1 / MISUSE_RATIO.default and not _divisions(at):
        same = cuts.add(done.factor, done.norm, at.scale)
        if not same or (done.norm >= most and all(scale == at.scale for scale in same)):
            return None
        said = f"gradients were shortened to norm {done.norm:.4g}, in this step as in others,"
    else:
        return None
    return "gradient clipping", f"{said} while they were still scaled by {at.scale:g}"


def _divisions(at: Handling) -> int:
    """How often the loop's own code has divided by the scale."""
    return sum(change is not None and _is_inverse(change, at.scale, at.clipped) for change in (at.before, at.after))


def _is_inverse(change: Change, scale: float, clipped: float) -> bool:
    """Whether gradients were divided by this, and perhaps clipped besides."""
    factor = change.factor
    return factor is not None and any(abs(factor * scale / other - 1.0) <= _SAME for other in (1.0, clipped))


def _of(change: Change) -> dict[str, float | None]:
    return {"factor": change.factor, "bound": change.bound, "most": change.most, "norm": change.norm}
