"""What a run that goes on until a step is not finite leaves out, and what is known of it where it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ampdoctor.evidence.report import ErrorNote, Skipped

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import StepOutcome
    from ampdoctor.workflows.opening.open_replay import OpenReplay

LAST = 8
"""Steps at the end that are held beside fp32, unless another number is asked for."""


def only_looked_at(steps: int, compared: int) -> Iterator[Skipped]:
    """Yields what of the steps was not held beside fp32, where some were not.

    Args:
        steps: Steps that stayed finite.
        compared: How many of them, the last ones, were to be compared.
    """
    if compared < steps:
        held = f"the last {compared} were held beside fp32" if compared else "none was held beside fp32 (--no-compare)"
        reason = f"--until-sick looks at each of the {steps} steps for NaN and Inf alone; {held}"
        yield Skipped(what="comparison of every step with fp32", reason=reason)


def elsewhere(device: str) -> Skipped:
    """Returns what a run that stays finite here may still do.

    Args:
        device: Where it was replayed.
    """
    reason = f"one process ran it on this machine's {device}: a failure that hangs on either may not come back here"
    return Skipped(what="other hardware and other numbers of ranks", reason=reason)


def interrupted(replay: OpenReplay, outcomes: Sequence[StepOutcome], fired: int | None) -> ErrorNote:
    """Returns what is known where Ctrl-C ends the search.

    Args:
        replay: The open replay.
        outcomes: The steps that have run.
        fired: The step that was being looked at more closely, as something in it was not finite; None else.
    """
    well = len(outcomes) if fired is None else fired
    known = (
        f"steps 0 to {well - 1} were replayed and stayed finite{_globally(replay, well)}" if well else "no step ended"
    )
    skips = sum(outcome.skipped for outcome in outcomes[:well])
    known += f", but for {skips} that the scaler skipped" if skips else ""
    at = "" if fired is None else f"; step {fired} is not finite, and was being looked into"
    return ErrorNote(what="steps", kind="interrupted", message=f"interrupted by Ctrl-C: {known}{at}")


def _globally(replay: OpenReplay, steps: int) -> str:
    step = replay.global_step
    return "" if step is None else f" (the training's {step} to {step + steps - 1})"
