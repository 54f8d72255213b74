"""What single tensors show over the compared steps of how they are written: frozen, stepped wrongly, stuck."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ampdoctor.diagnosis.updates.frozen_parameters import frozen, frozen_finding, severity_of
from ampdoctor.diagnosis.updates.stuck_state import counting, counting_finding, owner_of, stuck, stuck_finding
from ampdoctor.diagnosis.updates.wrong_step import RATIO, far_from, made_zero, wrong_step_finding
from ampdoctor.evidence.report import Prescription
from ampdoctor.evidence.where import Where
from ampdoctor.probes.trace.writes import last_written
from ampdoctor.workflows.against_fp32.again import (
    Again,
    first_wrong_op,
    in_code,
    last_op,
    tensors_in_fp32,
    too_few,
    without_casts,
)
from ampdoctor.workflows.against_fp32.place import Place, noise
from ampdoctor.workflows.against_fp32.standing_still import made_zero as made_zero_by
from ampdoctor.workflows.against_fp32.warm_up import at_full_rate
from ampdoctor.workflows.proving import changes as change
from ampdoctor.workflows.proving.trials import first_cure

if TYPE_CHECKING:
    from ampdoctor.evidence.of_runs.trace import Comparison, ParameterBeside, StateBeside
    from ampdoctor.evidence.report import Finding
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.replay.snapshot import Snapshot
    from ampdoctor.workflows.against_fp32.moves import Kept
    from ampdoctor.workflows.against_fp32.side_by_side import Known

NO_CASTS = "do not cast to half what is added to it"


def is_quiet(compared: Sequence[Comparison], thresholds: Thresholds) -> bool:
    """Is there nothing above a note in how single tensors are written?

    Args:
        compared: The steps.
        thresholds: What counts.
    """
    steps = _moving(compared)
    still = frozen(steps)
    sick = still and severity_of(steps, still, thresholds) != "note"
    return not (sick or far_from(steps, thresholds)[1] or made_zero(steps)[1] or stuck(compared)[1])


def by_update(
    place: Place, compared: Sequence[Comparison], thresholds: Thresholds, known: frozenset[str], seen: Known
) -> tuple[Finding, ...]:
    """Returns what the compared steps show of how single tensors are written; the session is left in any state.

    Args:
        place: The run, at its start.
        compared: The steps that were held beside fp32, and in which no rule saw anything.
        thresholds: What counts.
        known: Parameters of which something is said already.
        seen: What was looked at in this run before; told where a warm-up is why something stands still.
    """
    steps = _moving(compared)
    still = tuple(p for p in frozen(steps) if p.name not in known)
    since, runs = far_from(steps, thresholds)
    far = tuple(run for run in runs if run[0].name not in known)
    when, zero = made_zero(steps)
    zero = tuple(p for p in zero if p.name not in known)
    at, states = stuck(compared)
    findings: list[Finding | None] = []
    if still and (again := Again.at(place, steps[0].step)):
        still = _at_full_rate(again, place.start, still, seen)
        findings.append(_frozen(again, steps, still, thresholds) if still else None)
    if zero and (again := Again.at(place, steps[when].step)):
        findings.append(_made_zero(again, zero))
    if far and (again := Again.at(place, steps[since].step)):
        findings.append(_stepped_wrongly(again, steps, since, far, thresholds[RATIO]))
    if states and (again := Again.at(place, compared[at].step)):
        findings.append(_stuck(again, compared, at, states))
    if counters := counting(compared):
        findings.append(counting_finding(compared, counters))
    return tuple(finding for finding in findings if finding is not None)


def _moving(compared: Sequence[Comparison]) -> list[Comparison]:
    """Returns the steps in which fp32 moves parameters: under a warm-up the first may have a learning rate of 0."""
    return [step for step in compared if any(p.meant_to_move for p in step.parameters)]


def _at_full_rate(
    again: Again, start: Snapshot, still: Sequence[ParameterBeside], seen: Known
) -> tuple[ParameterBeside, ...]:
    """Returns the parameters that stand still at the learning rate that a warm-up comes up to as well."""
    later = at_full_rate(again.session, start, again.before, again.step)
    moves = frozenset(p.name for p in later.parameters if p.moved) if later is not None else frozenset[str]()
    left = tuple(p for p in still if p.name not in moves)
    seen.warm_up = seen.warm_up or len(left) < len(still)
    return left


def _frozen(
    again: Again, steps: Sequence[Comparison], still: Sequence[ParameterBeside], thresholds: Thresholds
) -> Finding | None:
    writes = again.written()
    left_out = noise(again.session, again.before, again.step) | again.kept_elsewhere()
    still = tuple(p for p in still if p.name not in left_out)
    if not still or writes.draws:  # an optimizer that rounds stochastically moves a weight now and then
        return None
    severity = severity_of(steps, still, thresholds)
    finding = frozen_finding(steps, still, severity, last_op(writes, still[0].name))
    if severity == "note":
        return finding
    wanted = {p.name: p.meant_to_move for p in still}

    def stay(now: Kept) -> str | None:
        return too_few({name: int((now.trained[name] != 0).sum()) for name in wanted if name in now.trained}, wanted)

    return replace(finding, prescription=again.in_fp32(stay))


def _made_zero(again: Again, zero: Sequence[ParameterBeside]) -> Finding | None:
    left_out = noise(again.session, again.before, again.step) | again.kept_elsewhere()
    zero = tuple(p for p in zero if p.name not in left_out)
    wanted = {p.name: p.meant_to_move for p in zero}

    def stay(now: Kept) -> str | None:
        return too_few({name: int((now.trained[name] != 0).sum()) for name in wanted if name in now.trained}, wanted)

    found = made_zero_by(again.session, again.before, again.step, zero, again.in_fp32(stay)) if zero else None
    again.before.restore()
    return found


def _stepped_wrongly(
    again: Again, steps: Sequence[Comparison], since: int, far: Sequence[tuple[ParameterBeside, ...]], ratio: float
) -> Finding | None:
    noisy = noise(again.session, again.before, again.step)
    far = tuple(run for run in far if run[0].name not in noisy)
    if not far:
        return None
    here, there = again.written(), again.written(wide=True)
    largest = max((run[0] for run in far), key=lambda p: p.expected).name
    op = first_wrong_op(here, there, largest, ratio) or last_op(here, largest)
    meant = {run[0].name: run[0].expected_update for run in far}

    def wrong(now: Kept) -> str | None:
        for name, expected in meant.items():
            apart = float(now.trained[name].norm()) / expected if name in now.trained else 0.0
            if not 1 / ratio <= apart <= ratio:
                return f"the update of {name} is still {apart:.2g} times fp32's"
        return None

    return replace(wrong_step_finding(steps, since, far, op), prescription=again.in_fp32(wrong))


def _stuck(again: Again, compared: Sequence[Comparison], since: int, states: Sequence[StateBeside]) -> Finding | None:
    copies = again.copies()
    states = tuple(state for state in states if state.name not in copies)
    if not states:
        return None
    written = last_written(again.written().writes.get(states[0].name, ()), again.step)
    where = Where(step=again.step, phase="optimizer", op="aten.copy_") if written is None else written
    finding = stuck_finding(compared, since, states, where)
    return replace(finding, prescription=_unstuck(again, states))


def _unstuck(again: Again, states: Sequence[StateBeside]) -> Prescription | None:
    """fp32 for the modules that hold them, or for everything, or for them alone, which only the user's code can do."""
    wanted = {state.name: state.meant_to_move for state in states}
    inside = list(dict.fromkeys(owner_of(state.name) for state in states if state.kind == "buffer"))

    def stay(now: Kept) -> str | None:
        return too_few({name: int((m != 0).sum()) for (_, name), m in now.states.items() if name in wanted}, wanted)

    def attempts() -> Iterator[Prescription]:
        if inside and all(inside):
            said = f"keep {', '.join(inside)} in fp32"
            plan = Prescription(kind="fp32_modules", value=inside, status="not_run", detail=said)
            yield again.tried(plan, change.fp32_modules(inside), stay)
            plan = in_code(f"{said}, and {NO_CASTS}")
            yield again.tried(plan, without_casts(change.fp32_modules(inside)), stay)
        if all(state.kind == "counter" for state in states):
            yield again.in_fp32(stay)  # what an optimizer counts with is of its parameters' format
        said = f"keep {states[0].name}{' and the others' if len(states) > 1 else ''} in fp32"
        for casts in (True, False):
            plan = in_code(said if casts else f"{said}, and {NO_CASTS}")
            yield again.tried(plan, tensors_in_fp32(frozenset(wanted), casts=casts), stay)
        if not any(state.kind in ("counter", "own") for state in states):
            yield again.in_fp32(stay)

    cure = first_cure(attempts())
    if cure is not None and cure.kind == "code" and cure.verified:
        return replace(cure, status="intervention")
    return cure
