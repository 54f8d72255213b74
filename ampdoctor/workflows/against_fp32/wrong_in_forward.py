"""Finds the op of a forward that makes a large error of another's rounding, and proves that it is the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampdoctor.diagnosis.replay.forward_precision import (
    BETTER,
    departing_in_forward,
    forward_precision_finding,
    together,
)
from ampdoctor.probes.altering.intervene import address_at
from ampdoctor.probes.trace.wide_forward import WideForwardProbe
from ampdoctor.workflows.proving import changes as change
from ampdoctor.workflows.proving.interventions import intervene_at
from ampdoctor.workflows.proving.trials import SHOWN

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Amplified, Comparison, ParameterBeside
    from ampdoctor.evidence.report import Finding, Prescription
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.probes.altering.intervene import Address
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.proving.interventions import Way
    from ampdoctor.workflows.proving.trials import Trials

MOST = 3
"""Places that are tried at most; each costs a few replays, and the first is where the others come from."""


def seen_in_forward(session: Session, before: Snapshot, step: int, thresholds: Thresholds) -> tuple[Amplified, ...]:
    """Replay a step with its forward beside fp32, op by op; returns the ops whose results are wrong.

    Args:
        session: The session; it is left after the step.
        before: The state before the step.
        step: The step.
        thresholds: How far is far (AMP208).
    """
    probe = WideForwardProbe()
    before.restore()
    with session.watched(probe):
        session.step(step)
    return departing_in_forward(probe.amplified, thresholds)


def wrong_in_forward(
    comparison: Comparison,
    seen: Sequence[Amplified],
    far: Sequence[ParameterBeside],
    trying: Callable[..., Trials],
) -> Finding | None:
    """Returns the finding for the first op that explains why gradients are far from fp32's; None if none does.

    It has to be shown: computed in fp32 there, and only there, they come nearer by `BETTER`.

    Args:
        comparison: The step beside fp32.
        seen: Ops whose results are wrong.
        far: The parameters whose gradients are far from fp32's.
        trying: Makes trials of the step.
    """
    for one in seen[:MOST]:
        trials = trying(tensors=[p.name for p in far], together=together(far) / BETTER)
        tried: list[Prescription] = []
        for cure in cures(one, trials):
            if cure.status in SHOWN:
                found = forward_precision_finding(comparison, one, far)
                return replace(found, prescription=replace(cure, alternatives=tuple(tried)))
            tried.append(cure)
    return None


def cures(one: Amplified, trials: Trials) -> Iterator[Prescription]:
    """Tries fp32 for the module whose rounding is behind it, for the op, its line, the one that suffers, and up to it.

    Args:
        one: The op whose result is wrong.
        trials: The trials of its step.
    """
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


def _in_between(one: Amplified, source: Address) -> str:
    """Returns what to write where the model is half throughout, so that what follows has to get half again."""
    line = f"{source.source.file}:{source.source.line}"
    return f"{line}: compute from {one.source.op} to {one.where.op} in float32, and only then cast to {one.dtype}"


def _right(one: Amplified) -> change.Change:
    """Returns a change: the op that suffers returns what it would in fp32, in its own format."""

    def changed(session: Session) -> AbstractContextManager[Any]:
        return session.watched(WideForwardProbe([one.where]))

    return changed
