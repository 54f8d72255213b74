"""What the reports for people say of a run over its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ampdoctor.evidence.report_health import CurveName, HealthRun, ScalerHistory
from ampdoctor.evidence.report_scaler import ScalerArguments
from ampdoctor.reports.words import words

_ENDINGS = {
    "running": "still running",
    "ended": "ended",
    "cut_off": "cut off: the log has no last line and no longer grows",
    "unknown": "",
}
_FEW = 8
"""Marks of one kind that are told; of more, the last."""


def title(run: HealthRun) -> str:
    """Returns a run's name, with its log and its optimizer where these say more."""
    optimizer = f", {_optimizer(run.optimizer)}" if run.optimizer else ""
    return f"run {run.name}{optimizer} ({run.source})" if run.name != run.source else f"run {run.name}{optimizer}"


def _optimizer(name: str) -> str:
    """A name that says what it is, as that of the first one that a watch meets, is said once."""
    return name if name.startswith("optimizer") else f"optimizer {name}"


def run_line(run: HealthRun) -> str:
    """Returns the run in a line: how far it came, how it ended, and its loss."""
    last = f"steps {run.first_step:,} to {run.last_step:,}"
    logged = f" ({words.count(run.steps, 'step')} logged)" if run.steps != run.last_step - run.first_step + 1 else ""
    loss = _of(run, "loss")
    parts = [
        f"{last}{logged}",
        f"{run.precision}" if run.precision else "",
        f"loss {_number(loss[0])} to {_number(loss[1])}" if loss is not None else "",
        _ENDINGS[run.ending] + (f" with exit code {run.exit_code}" if run.exit_code else ""),
        f"{words.count(run.lost, 'line')} lost" if run.lost else "",
    ]
    return ", ".join(part for part in parts if part)


def facts(run: HealthRun) -> Iterator[tuple[str, str]]:
    """Yields what else is told of a run: a label and a sentence."""
    if run.skipped:
        share = f" ({words.percent(run.skip_share)})" if run.skip_share is not None else ""
        yield "skipped", f"{words.count(run.skipped, 'step')}{share}"
    sick = _nonfinite(run, "loss")
    if sick:
        yield "not finite", f"the loss of {words.count(sick, 'step')}"
    for scaler in run.scalers:
        label = f"scaler {scaler.scaler}".strip()
        yield label, scale_line(scaler)
        yield "", settings_line(scaler)
    if run.checkpoints:
        yield "checkpoints", _told(f"{mark.path} (step {mark.step:,}, {mark.health})" for mark in run.checkpoints)
    for look in run.looks[-_FEW:]:
        yield "looked at", f"step {look.step:,}: {look.says or look.verdict}"
    if run.actions:
        yield (
            "done",
            _told(
                f"{mark.action} at step {mark.step:,}{f': {mark.reason}' if mark.reason else ''}"
                for mark in run.actions
            ),
        )


def commands(run: HealthRun) -> Sequence[str]:
    """Returns what replays the steps that were kept; a command is copied whole."""
    return [look.command for look in run.looks[-_FEW:] if look.command is not None]


def scale_line(scaler: ScalerHistory) -> str:
    """Returns what became of a loss scale."""
    scales = [scale for _, scale in scaler.path.points]
    if not scales:
        moved = "loss scale not in the log"
    elif len(set(scales)) == 1:
        moved = f"loss scale {words.binary(scales[0])} all along"
    else:
        moved = (
            f"loss scale {words.binary(scales[0])} at first, {words.binary(min(scales))} at least, "
            f"{words.binary(max(scales))} at most, {words.binary(scales[-1])} in the end"
        )
    return f"{moved}; {words.count(scaler.growths, 'growth')}, {words.count(scaler.backoffs, 'backoff')}"


def settings_line(scaler: ScalerHistory) -> str:
    """Returns a scaler's settings, and what others would have come to."""
    now = _arguments(scaler.arguments) if scaler.arguments is not None else "settings not in the log"
    if scaler.growth_tracker is not None:
        now += f"; {words.count(scaler.growth_tracker, 'step')} since the scale last changed"
    if scaler.recommended is None:
        return now
    skipped = f" ({words.count(scaler.would_be.skipped, 'step')} skipped)" if scaler.would_be is not None else ""
    return f"{now}; recommended: {_arguments(scaler.recommended)}{skipped}"


def _arguments(arguments: ScalerArguments) -> str:
    return (
        f"init_scale={words.setting(arguments.init_scale)}, growth_factor={words.setting(arguments.growth_factor)}, "
        f"backoff_factor={words.setting(arguments.backoff_factor)}, growth_interval={arguments.growth_interval}"
    )


def _of(run: HealthRun, name: CurveName) -> tuple[float, float] | None:
    """Returns the first and the last median of a curve; None where it has none."""
    values = [value for curve in run.curves if curve.name == name for value in curve.middle if value is not None]
    return (values[0], values[-1]) if values else None


def _nonfinite(run: HealthRun, name: CurveName) -> int:
    return sum(sum(curve.nonfinite or ()) for curve in run.curves if curve.name == name)


def _told(marks: Iterable[str]) -> str:
    there = list(marks)
    before = f"{len(there) - _FEW} before, " if len(there) > _FEW else ""
    return before + ", ".join(there[-_FEW:])


def _number(value: float) -> str:
    return f"{value:.4g}"
