"""Updates that are lost or wrong in finite numbers: of all parameters, and tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from ampdoctor.diagnosis.replay.gradients import common_module, shown_in, starved, starved_finding
from ampdoctor.diagnosis.replay.nonfinite import is_absorbed, origin_finding
from ampdoctor.diagnosis.replay.updates import (
    WRONG_RATIO,
    Stagnation,
    far_from,
    frozen,
    frozen_finding,
    made_zero,
    owner_of,
    rounded_away,
    severity_of_frozen,
    stagnation_finding,
    stuck,
    stuck_finding,
    unmoved,
    wrong_step_finding,
)
from ampdoctor.errors import AmpdoctorError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.evidence.trace import Comparison, Flush, ParameterVsFp32, StateVsFp32, Trace
from ampdoctor.probes.op_overrides import address_at
from ampdoctor.probes.written_state import last_written
from ampdoctor.replay.session import Session
from ampdoctor.replay.snapshot import Snapshot
from ampdoctor.workflows import changes as change
from ampdoctor.workflows.prescribe import intervene_at, underflow_cures
from ampdoctor.workflows.rerun_step import (
    ReplayPosition,
    StepRerun,
    Wrong,
    first_wrong_op,
    in_code,
    last_op,
    tensors_in_fp32,
    too_few,
    without_casts,
)
from ampdoctor.workflows.step_beside_fp32 import Fp32Step, Known, StateCopy
from ampdoctor.workflows.trials import Trials, first_cure

# -- changes that make tensors move again that stand still in half --


def standing_still(again: StepRerun, comparison: Comparison, stagnation: Stagnation) -> Finding | None:
    """Returns the finding for what stands still; None where rounding loses nothing (stochastic, compensated)."""
    names = {name for update in stagnation.updates for name in update.tensors}
    if again.written().draws or names <= again.kept_elsewhere():
        return None
    still = unmoved(comparison)
    if not still or rounded_away(still):
        return replace(stagnation_finding(again.step, stagnation), prescription=stagnation_cure(again, stagnation))
    cure = stagnation_cure(again, stagnation, with_casts=True)
    found = stagnation_finding(again.step, stagnation)
    return zeroed_by_an_op(again, still, cure) or replace(found, prescription=cure)


def zeroed_by_an_op(again: StepRerun, still: Sequence[ParameterVsFp32], cure: Prescription) -> Finding | None:
    """Returns the finding for an overflow that makes updates zero (a trust ratio over infinity); None without one."""
    origins = [origin for origin in again.traced().origins if is_absorbed(origin)]
    if not origins:
        return None
    found = origin_finding(origins[0], prescription=cure, others=origins[1:])
    names = ", ".join(p.name for p in still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    stand = "stands" if len(still) == 1 else "stand"
    evidence = {**found.evidence, "stands_still": [p.name for p in still[:16]], "stands_still_count": len(still)}
    return replace(
        found, message=f"{found.message}; the update is zero by it: {names} {stand} still", evidence=evidence
    )


def stagnation_cure(again: StepRerun, stagnation: Stagnation, *, with_casts: bool = False) -> Prescription:
    """Try fp32 for what is trained, then for everything; `with_casts`: then without casts in the user's code."""
    names = [name for update in stagnation.updates for name in update.tensors]
    wanted = {"": sum(update.moved for update in stagnation.updates)}

    def stay(now: StateCopy) -> str | None:
        return too_few({name: int((now.half[name] != 0).sum()) for name in names}, wanted)

    if change.mostly_frozen(again.session):
        alone = again.tried(in_code(change.TRAINED_IN_FP32), change.trained_in_fp32, stay)
        if alone.verified:
            return replace(alone, status="intervention")
    plan = Prescription(kind="dtype", value="float32", status="not_run", detail="keep fp32 master weights")
    wide = change.compute_dtype("fp32")
    cure = again.tried(plan, wide, stay)
    if cure.verified or not with_casts:
        return cure
    advice = f"{cure.detail}, and take the casts to half out of the code that updates it"
    code = again.tried(in_code(advice), without_casts(wide), stay)
    return replace(code, status="intervention", alternatives=(cure,)) if code.verified else cure


# -- learning rates that still rise: does what stands still move at the full rate? --
# In a model that is bf16 throughout, the first steps of nearly every warm-up move nothing, which does no harm.

Rates = Mapping[tuple[str, int], float]
"""A learning rate for each group, by optimizer and position."""

RISING = 0.99
"""Share of a group's full rate below which it still rises; a decay begins nearer to it."""


def at_full_rate(again: StepRerun, start: Snapshot) -> Comparison | None:
    """Replay a step beside fp32 with the rates that a warm-up rises to; None where they are reached already."""
    start.restore()
    full = _full(again.session)
    used: dict[tuple[str, int], float] = {}
    again.before.restore()
    try:
        wide = Fp32Step.run(again.session, again.step, change=lambda session: _held_at(session, full, used))
        if not any(rate < RISING * full[group] for group, rate in used.items()):
            return None
        return wide.compared(again.session, again.run(wide.probe, change=lambda session: _held_at(session, full, {})))
    except AmpdoctorError:
        return None


def _full(session: Session) -> Rates:
    return {
        (name, at): max(_number(group.get("initial_lr")), _number(group.get("lr")))
        for name, optimizer in session.optimizers.items()
        for at, group in enumerate(optimizer.param_groups)
    }


def _number(rate: Any) -> float:
    return float(rate) if rate is not None else 0.0


@contextmanager
def _held_at(session: Session, full: Rates, used: dict[tuple[str, int], float]) -> Iterator[None]:
    """Inside, each group steps with its full rate; `used` receives the rate that it would have had."""
    with ExitStack() as stack:
        for name, optimizer in session.optimizers.items():

            def raise_rates(optimizer: Optimizer, _args: Any, _kwargs: Any, name: str = name) -> None:
                for at, group in enumerate(optimizer.param_groups):
                    rate = _number(group.get("lr"))
                    used.setdefault((name, at), rate)
                    if rate < full.get((name, at), 0.0):
                        group["lr"] = full[name, at]

            stack.callback(optimizer.register_step_pre_hook(raise_rates).remove)
        yield


# -- how single tensors are written: frozen, stepped wrongly, stuck --

NO_CASTS = "do not cast to half what is added to it"


def by_update(
    place: ReplayPosition, compared: Sequence[Comparison], thresholds: Thresholds, known: frozenset[str], seen: Known
) -> tuple[Finding, ...]:
    """Returns findings on how single tensors are written in the compared steps; those in `known` are told already."""
    steps = [step for step in compared if any(p.meant_to_move for p in step.parameters)]
    still = tuple(p for p in frozen(steps) if p.name not in known)
    since, runs = far_from(steps, thresholds)
    far = tuple(run for run in runs if run[0].name not in known)
    when, zero = made_zero(steps)
    zero = tuple(p for p in zero if p.name not in known)
    at, states = stuck(compared)
    findings: list[Finding | None] = []
    if still and (again := place.to(steps[0].step)):
        still = _at_full_rate(again, place.start, still, seen)
        findings.append(_frozen(again, steps, still, thresholds) if still else None)
    if zero and (again := place.to(steps[when].step)):
        findings.append(_made_zero(again, zero))
    if far and (again := place.to(steps[since].step)):
        findings.append(_stepped_wrongly(again, steps, since, far, thresholds[WRONG_RATIO]))
    if states and (again := place.to(compared[at].step)):
        findings.append(_stuck(again, compared, at, states))
    return tuple(finding for finding in findings if finding is not None)


def _at_full_rate(
    again: StepRerun, start: Snapshot, still: Sequence[ParameterVsFp32], seen: Known
) -> tuple[ParameterVsFp32, ...]:
    later = at_full_rate(again, start)
    moves = frozenset(p.name for p in later.parameters if p.moved) if later is not None else frozenset[str]()
    left = tuple(p for p in still if p.name not in moves)
    seen.warm_up = seen.warm_up or len(left) < len(still)
    return left


def _frozen(
    again: StepRerun, steps: Sequence[Comparison], still: Sequence[ParameterVsFp32], thresholds: Thresholds
) -> Finding | None:
    writes = again.written()
    left_out = again.noise() | again.kept_elsewhere()
    still = tuple(p for p in still if p.name not in left_out)
    if not still or writes.draws:  # an optimizer that rounds stochastically moves a weight now and then
        return None
    severity = severity_of_frozen(steps, still, thresholds)
    finding = frozen_finding(steps, still, severity, last_op(writes, still[0].name))
    if severity == "note":
        return finding
    return replace(finding, prescription=again.in_fp32(_stay(still)))


def _made_zero(again: StepRerun, zero: Sequence[ParameterVsFp32]) -> Finding | None:
    left_out = again.noise() | again.kept_elsewhere()
    zero = tuple(p for p in zero if p.name not in left_out)
    return zeroed_by_an_op(again, zero, again.in_fp32(_stay(zero))) if zero else None


def _stay(parameters: Sequence[ParameterVsFp32]) -> Wrong:
    wanted = {p.name: p.meant_to_move for p in parameters}
    return lambda now: too_few(
        {name: int((now.trained[name] != 0).sum()) for name in wanted if name in now.trained}, wanted
    )


def _stepped_wrongly(
    again: StepRerun, steps: Sequence[Comparison], since: int, far: Sequence[tuple[ParameterVsFp32, ...]], ratio: float
) -> Finding | None:
    noisy = again.noise()
    far = tuple(run for run in far if run[0].name not in noisy)
    if not far:
        return None
    here, there = again.written(), again.written(fp32=True)
    largest = max((run[0] for run in far), key=lambda p: p.expected).name
    op = first_wrong_op(here, there, largest, ratio) or last_op(here, largest)
    meant = {run[0].name: run[0].expected_update for run in far}

    def wrong(now: StateCopy) -> str | None:
        for name, expected in meant.items():
            apart = float(now.trained[name].norm()) / expected if name in now.trained else 0.0
            if not 1 / ratio <= apart <= ratio:
                return f"the update of {name} is still {apart:.2g} times fp32's"
        return None

    return replace(wrong_step_finding(steps, since, far, op), prescription=again.in_fp32(wrong))


def _stuck(
    again: StepRerun, compared: Sequence[Comparison], since: int, states: Sequence[StateVsFp32]
) -> Finding | None:
    copies = again.copies()
    states = tuple(state for state in states if state.name not in copies)
    if not states:
        return None
    written = last_written(again.written().writes.get(states[0].name, ()), again.step)
    where = Where(step=again.step, phase="optimizer", op="aten.copy_") if written is None else written
    finding = stuck_finding(compared, since, states, where)
    return replace(finding, prescription=_unstuck(again, states))


def _unstuck(again: StepRerun, states: Sequence[StateVsFp32]) -> Prescription | None:
    """Try fp32 for the modules that hold the states, for everything, or for the states alone in the user's code."""
    wanted = {state.name: state.meant_to_move for state in states}
    inside = list(dict.fromkeys(owner_of(state.name) for state in states if state.kind == "buffer"))

    def stay(now: StateCopy) -> str | None:
        return too_few({name: int((m != 0).sum()) for (_, name), m in now.states.items() if name in wanted}, wanted)

    def attempts() -> Iterator[Prescription]:
        if inside and all(inside):
            said = f"keep {', '.join(inside)} in fp32"
            plan = Prescription(kind="fp32_modules", value=inside, status="not_run", detail=said)
            yield again.tried(plan, change.fp32_modules(inside), stay)
            plan = in_code(f"{said}, and {NO_CASTS}")
            yield again.tried(plan, without_casts(change.fp32_modules(inside)), stay)
        if all(state.kind == "counter" for state in states):
            yield again.in_fp32(stay)  # an optimizer's counters have its parameters' format
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


# -- what the total does not show: parameters that get no gradient, though in fp32 they do; and single updates --

_MOSTLY = 0.9
"""Share of an op's result that it flushes where a whole gradient is lost."""


def by_tensor(
    place: ReplayPosition, compared: Sequence[Comparison], thresholds: Thresholds, seen: Known
) -> tuple[Finding, ...]:
    """Returns findings on single parameters in the compared steps, in which no rule fired."""
    zero_gradient_names = starved(compared, thresholds)
    fed = _starving(place, shown_in(compared, zero_gradient_names), zero_gradient_names) if zero_gradient_names else ()
    known = frozenset(parameter.name for parameter in zero_gradient_names)
    return (*fed, *by_update(place, compared, thresholds, known, seen))


def _starving(
    place: ReplayPosition, compared: Sequence[Comparison], zero_gradient_names: Sequence[ParameterVsFp32]
) -> tuple[Finding, ...]:
    again = place.to(compared[0].step)
    if again is None:
        return ()
    noisy = again.noise()
    zero_gradient_names = tuple(parameter for parameter in zero_gradient_names if parameter.name not in noisy)
    if not zero_gradient_names:
        return ()
    trace = again.traced(flushes=True)
    saturated = _saturated(trace, zero_gradient_names)
    finding = starved_finding(
        compared, zero_gradient_names, None if saturated else _dies_at(trace.flushes, zero_gradient_names), saturated
    )
    names = [parameter.name for parameter in zero_gradient_names]
    trials = again.trials(place.steps, tensors=names)
    return (replace(finding, prescription=_cure(trials, again.session, finding, zero_gradient_names)),)


def _dies_at(flushes: Sequence[Flush], found: Sequence[ParameterVsFp32]) -> Flush | None:
    """Returns the first op of the backward that loses nearly all, in the parameters' common module if there is one."""
    whole = [flush for flush in flushes if flush.fraction >= _MOSTLY]
    module = common_module([parameter.name for parameter in found])
    within = [f for f in whole if module and (f.where.module == module or f.where.module.startswith(f"{module}."))]
    return next(iter(within or whole), None)


def _saturated(trace: Trace, found: Sequence[ParameterVsFp32]) -> Where | None:
    """Returns the op whose derivative is zero because the forward rounded (a sigmoid of 1); None where one flushes."""
    names = {parameter.name for parameter in found}
    behind = Counter(died for died in trace.died if died.parameter in names)
    orders = Counter(died.order for died in behind)
    flushed = {flush.order for flush in trace.flushes}
    for order, _ in orders.most_common(1):
        if order not in flushed:
            return next(died.where for died in behind if died.order == order)
    return None


def _cure(trials: Trials, session: Session, finding: Finding, found: Sequence[ParameterVsFp32]) -> Prescription | None:
    """Try a loss scale; then fp32 for the module, and for the line where the forward saturates; then another format."""
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
