"""Forwards that are finite but wrong: ops that amplify rounding, and stale copies of weights in autocast's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.replay.forward import (
    ADVICE,
    CLEARLY_NEARER,
    OldCopies,
    departing_in_forward,
    forward_precision_finding,
    stale_casts_finding,
    together,
)
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Prescription
from ampdoctor.probes.forward_fp32 import WideForwardProbe
from ampdoctor.probes.op_overrides import address_at
from ampdoctor.probes.user_code import as_source
from ampdoctor.probes.written_state import OldCast, OldCastsProbe
from ampdoctor.workflows import changes as change
from ampdoctor.workflows.changes import fresh_casts
from ampdoctor.workflows.prescribe import intervene_at
from ampdoctor.workflows.rerun_step import StepRerun
from ampdoctor.workflows.trials import SHOWN

if TYPE_CHECKING:
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.trace import Amplified, Comparison, ParameterVsFp32
    from ampdoctor.probes.op_overrides import UserLine
    from ampdoctor.probes.ops import Probe
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.prescribe import Way
    from ampdoctor.workflows.trials import Trials


# -- ops that amplify the rounding of another --

MOST = 3
"""Maximum number of places that are tried; each costs a few replays, and the first is the source of the others."""


def seen_in_forward(again: StepRerun, thresholds: Thresholds) -> tuple[Amplified, ...]:
    """Replay a step beside fp32, op by op; returns the ops with wrong results."""
    probe = WideForwardProbe()
    again.run(probe)
    return departing_in_forward(probe.amplified, thresholds)


def wrong_in_forward(
    comparison: Comparison, seen: Sequence[Amplified], far: Sequence[ParameterVsFp32], trying: Callable[..., Trials]
) -> Finding | None:
    """Returns the finding for the first op that, in fp32, brings the gradients of `far` nearer; None if none does."""
    for one in seen[:MOST]:
        trials = trying(tensors=[p.name for p in far], together=together(far) / CLEARLY_NEARER)
        tried: list[Prescription] = []
        for cure in cures(one, trials):
            if cure.status in SHOWN:
                found = forward_precision_finding(comparison, one, far)
                return replace(found, prescription=replace(cure, alternatives=tuple(tried)))
            tried.append(cure)
    return None


def cures(one: Amplified, trials: Trials) -> Iterator[Prescription]:
    """Try fp32 for the module that rounds, for the op, for its line, and for the lines up to the op that suffers."""
    if one.source.module:
        module = one.source.module
        yield trials.attempt("fp32_modules", [module], change.fp32_modules([module]), f"run {module} in fp32")
    source = address_at(one.source)
    if source is None:
        return
    others = [address for where in (*one.beside, one.where) if (address := address_at(where)) is not None]
    ways: list[Way] = [("fp32", [source]), ("line_fp32", [source])]
    ways += [("line_fp32", [source, *others])] if any(other.source != source.source for other in others) else []
    yield intervene_at(ways, trials)
    yield trials.attempt("code", value := _in_between(one, source), _right(one), value, stands_in=True)


def _in_between(one: Amplified, source: UserLine) -> str:
    """Returns what to write in a half model, where the result must become half again."""
    line = f"{source.source.file}:{source.source.line}"
    return f"{line}: compute from {one.source.op} to {one.where.op} in float32, and only then cast to {one.dtype}"


def _right(one: Amplified) -> change.Change:
    """Returns a change: the op that suffers returns what it would in fp32, in its own format."""

    def changed(session: Session) -> AbstractContextManager[Any]:
        return session.watched(WideForwardProbe([one.where]))

    return changed


# -- stale copies of weights: a replay in which autocast makes its copies anew at each use --

NO_REFERENCE = "fp32 cannot run this step, so there is nothing that a step with new copies would have to agree with"


def stale_casts(
    again: StepRerun, old: OldCopies, comparison: Comparison, trials: Trials, thresholds: Thresholds
) -> Finding | None:
    """Returns the finding that gradients are those of `old` copies, or None."""
    anew = again.gradients(fp32=True)
    again.run(anew, change=fresh_casts)
    if not math.isfinite(error := anew.distance.relative):
        return None
    finding = partial(stale_casts_finding, again.step, comparison.gradient_error, error, old, thresholds=thresholds)
    return finding(trials.attempt("code", ADVICE, fresh_casts, ADVICE, stands_in=True)) if finding() else None


def stale_casts_without_fp32(again: StepRerun, thresholds: Thresholds) -> Finding | None:
    """Like `stale_casts`, for a step that cannot run in fp32: beside the gradients of new copies."""
    old = old_copies(again)
    if old is None:
        return None
    own = again.gradients(change=fresh_casts)
    again.run(own)
    if not math.isfinite(error := own.distance.relative):
        return None
    cure = Prescription(kind="code", value=ADVICE, status="not_run", detail=ADVICE, reason=NO_REFERENCE)
    return stale_casts_finding(again.step, error, None, old, cure, thresholds=thresholds)


def stalest_without_fp32(again: StepRerun, steps: int, thresholds: Thresholds) -> Finding | None:
    """Returns the finding for the first step whose stale copies matter, else the first note."""
    note: Finding | None = None
    session = again.session
    for step in range(again.step, again.step + steps):
        found = stale_casts_without_fp32(again, thresholds)
        if found is not None and found.severity != "note":
            return found
        note = note or found
        again.run()
        again = StepRerun(session, session.snapshot(), step + 1)
    return note


def old_copies(again: StepRerun, *beside: Probe) -> OldCopies | None:
    """Runs the step, with other probes `beside`; returns the old copies that its forwards used."""
    probe = OldCastsProbe()
    again.run(probe, *beside)
    return _described(probe.found, again.step) if probe.found else None


def _described(found: Sequence[OldCast], step: int) -> OldCopies:
    first = found[0]
    use, write = first.use, first.written
    source = as_source(use.line)
    if write is None:
        writer, where = "weights are replaced (`.data = ...`)", Where(step=step, phase="loss", op="autocast")
    elif write.phase == "optimizer" and not write.after_backward:
        writer, where = "an optimizer steps", Where(step=step, phase="forward", op="autocast")
    else:
        at = as_source(write.line)
        by = f"{write.op} at {at.file}:{at.line}" if at else write.op
        writer, where = f"weights are written ({by})", Where(step=step, phase="loss", op="autocast", source=at)
    return OldCopies(
        where=where,
        writer=writer,
        weight=first.weight,
        weights=len(found),
        used_at=f"{source.file}:{source.line}" if source else use.module,
    )
