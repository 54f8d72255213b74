"""Did a run that says a half format compute in one? If not, its replay says nothing of what that format does to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.report import NOT_IN_HALF, Skipped
from ampdoctor.probes.measures.half_ops import HalfOps, Region
from ampdoctor.probes.ops.source import as_source

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Headroom
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.replay.training_run import TrainingRun


def nothing_in_half(
    session: Session, tightest: Headroom | None, start: Snapshot | None, fresh: Callable[[], Session]
) -> Skipped | None:
    """What was left out of a run that says fp16 or bf16 and computes in another format, and why; None for any other.

    A run in which the cheap look saw the format has no step replayed for it. Where autocast was on as it is on a GPU
    and has found nothing to cast, nothing is left out: there it finds nothing either.

    Args:
        session: The run, in any state.
        tightest: What the cheap look saw in a half format in steps without harm; None where it saw nothing.
        start: The state before step 0, with its batches ahead; None where only a fresh run leads there.
        fresh: Makes another session from the factory.
    """
    said = session.precision.compute
    if not session.precision.reduced or (tightest is not None and tightest.format == said):
        return None
    looked = HalfOps()
    if start is not None:
        start.restore()
        _look(session, looked)
    else:
        other = fresh()
        try:
            _look(other, looked)
        finally:
            other.close()
    why = None if session.precision.dtype in looked.formats else _why(looked, session)
    return None if why is None else Skipped(what=NOT_IN_HALF, reason=why, kind="not_in_half")


def _look(session: Session, looked: HalfOps) -> None:
    with suppress(AmpdoctorError), session.watched(looked):  # it ran before: what ends it now is no news
        if session.has_step(0):
            session.attempt(0)


def _why(looked: HalfOps, session: Session) -> str | None:
    computed = _named(next(iter(looked.formats), torch.float32))
    decides = _decides(looked, session)
    meant = f'where that is meant, say so: TrainingRun(precision="{computed}")'
    return None if decides is None else f"step 0 computes in {computed}: {decides}; {meant}"


def _decides(looked: HalfOps, session: Session) -> str | None:
    """What keeps the step from computing in the format that the run says; None where that is as on a GPU."""
    regions = [region for region in looked.around if region.autocast]
    if regions and regions[-1].enabled:
        last = regions[-1]
        if not (looked.formats and last.unnamed and last.dtype is not session.precision.dtype):
            return None
        own = f"autocast's own there is {_named(last.dtype)}"
        return f"autocast{_places([last])} names no dtype, and {own} (name dtype={session.precision.dtype})"
    if looked.formats:
        return None  # the model itself is in the other format
    if regions:
        return f"autocast{_places(regions[-1:])} is switched off there"
    stand_ins = [region for region in looked.around if region.line is not None]
    if stand_ins:
        return f"nullcontext(){_places(stand_ins)} stands there, and no autocast"
    if not session.precision.autocast:
        return "with autocast=False the factory itself gives model and batches their dtype, and they have float32"
    return f"{_function(session.run)} enters no autocast"


def _named(dtype: torch.dtype | None) -> str:
    """The name that `TrainingRun(precision=...)` takes."""
    return {None: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")


def _places(regions: Sequence[Region]) -> str:
    """Where these contexts were made or entered: " at train.py:12"."""
    lines = [as_source(region.line) for region in regions]
    named = dict.fromkeys(f"{source.file}:{source.line}" for source in lines if source is not None)
    return f" at {' and '.join(named)}" if named else ""


def _function(run: TrainingRun) -> str:
    """The user's step, or where there is none their loss, with its place."""
    what, function = ("the step", run.step) if run.step is not None else ("the loss", run.loss)
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    source = None if code is None else as_source((code.co_filename, code.co_firstlineno))
    return what if source is None else f"{what} at {source.file}:{source.line}"
