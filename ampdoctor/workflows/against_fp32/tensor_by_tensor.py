"""What the total does not show: parameters that get nothing, though in fp32 they would; and single updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.ranges.starved_parameters import common_module, shown_in, starved, starved_finding
from ampdoctor.probes.altering.intervene import address_at
from ampdoctor.workflows.against_fp32.place import Place, noise, traced
from ampdoctor.workflows.against_fp32.single_updates import by_update
from ampdoctor.workflows.proving import changes as change
from ampdoctor.workflows.proving.interventions import intervene_at
from ampdoctor.workflows.proving.prescribing import underflow_cures
from ampdoctor.workflows.proving.trials import Trials, first_cure

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison, Flush, ParameterBeside, Trace
    from ampdoctor.evidence.report import Finding, Prescription
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.evidence.where import Where
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.against_fp32.side_by_side import Known

_MOSTLY = 0.9
"""Share of an op's result that it flushes where a whole gradient dies."""


def by_tensor(place: Place, compared: Sequence[Comparison], thresholds: Thresholds, seen: Known) -> tuple[Finding, ...]:
    """Returns what the compared steps show of single parameters; the session is left in any state.

    Args:
        place: The run, at its start.
        compared: The steps that were held beside fp32, and in which no rule saw anything.
        thresholds: What counts.
        seen: What was looked at in this run before; told where a warm-up is why something stands still.
    """
    hungry = starved(compared, thresholds)
    fed = _starving(place, shown_in(compared, hungry), hungry) if hungry else ()
    known = frozenset(parameter.name for parameter in hungry)
    return (*fed, *by_update(place.anew(), compared, thresholds, known, seen))


def _starving(place: Place, compared: Sequence[Comparison], hungry: Sequence[ParameterBeside]) -> tuple[Finding, ...]:
    """Returns the finding for what is starved and is no noise."""
    if not place.comes_to(compared[0].step):
        return ()
    session, step = place.session, compared[0].step
    before = session.snapshot()
    noisy = noise(session, before, step)
    hungry = tuple(parameter for parameter in hungry if parameter.name not in noisy)
    return (_fed(place, before, compared, hungry),) if hungry else ()


def _fed(place: Place, before: Snapshot, compared: Sequence[Comparison], hungry: Sequence[ParameterBeside]) -> Finding:
    """Returns the finding for parameters that get nothing, with what feeds them."""
    session, step = place.session, compared[0].step
    trace = traced(session, before, step, flushes=True)
    saturated = _saturated(trace, hungry)
    finding = starved_finding(compared, hungry, None if saturated else _dies_at(trace.flushes, hungry), saturated)
    trials = Trials(session, before, step, place.steps, tensors=[parameter.name for parameter in hungry])
    return replace(finding, prescription=_cure(trials, session, finding, hungry))


def _dies_at(flushes: Sequence[Flush], found: Sequence[ParameterBeside]) -> Flush | None:
    """Returns the first op of the backward that loses nearly all, in the module of what is starved if there is one."""
    whole = [flush for flush in flushes if flush.fraction >= _MOSTLY]
    module = common_module([parameter.name for parameter in found])
    within = [f for f in whole if module and (f.where.module == module or f.where.module.startswith(f"{module}."))]
    return next(iter(within or whole), None)


def _saturated(trace: Trace, found: Sequence[ParameterBeside]) -> Where | None:
    """Returns the op whose derivative is zero from what the forward left, in float64 too; None where one flushes.

    A sigmoid that rounds to 1 has no derivative left. It is the op behind most of the parameters.
    """
    names = {parameter.name for parameter in found}
    behind = Counter(died for died in trace.died if died.parameter in names)
    orders = Counter(died.order for died in behind)
    flushed = {flush.order for flush in trace.flushes}
    for order, _ in orders.most_common(1):
        if order not in flushed:
            return next(died.where for died in behind if died.order == order)
    return None


def _cure(trials: Trials, session: Session, finding: Finding, found: Sequence[ParameterBeside]) -> Prescription | None:
    """A loss scale; where the forward has rounded into saturation, fp32 for the module; else another format."""
    modules = list(dict.fromkeys([finding.where.module, common_module([p.name for p in found])]))

    def attempts() -> Iterator[Prescription]:
        yield from underflow_cures(trials, session, scales=True)
        for module in modules:
            if module:
                yield trials.attempt("fp32_modules", [module], change.fp32_modules([module]), f"run {module} in fp32")
        address = address_at(finding.where) if finding.cause == "forward_precision" else None
        if address is not None:
            yield intervene_at([("line_fp32", [address])], trials)
        yield from underflow_cures(trials, session, scales=False)

    return first_cure(attempts())
