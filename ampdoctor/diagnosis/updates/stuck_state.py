"""AMP508: a buffer, an average or a step counter stands still, and in fp32 it moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.ranges.starved_parameters import common_module
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.diagnosis.updates.course import COINS, NAMED, goes_one_way, lasting, named, within
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding
from ampdoctor.evidence.trace import Comparison, StateBeside

RULE = register(
    "AMP508",
    "stuck-state",
    "A buffer, an average or a counter stands still, and in fp32 it moves",
    worst="error",
    commands=REPLAYED,
)

ENDS = {"float16": 2048.0, "bfloat16": 256.0}
"""From here on a number of this format plus 1 is the number."""
_OPTIMIZER = "optimizer:"


def stuck(compared: Sequence[Comparison]) -> tuple[int, tuple[StateBeside, ...]]:
    """Returns since which of the steps states stand still, as an index, and each as it is in the first of them.

    fp32 moves them one way. Of an optimizer's state only what counts: a moment may be at rest.

    Args:
        compared: The steps.
    """
    since, runs = lasting([step.states for step in compared], lambda state: not state.moved, _is_stuck)
    return since, tuple(run[0] for run in runs.values())


def counting(compared: Sequence[Comparison]) -> tuple[StateBeside, ...]:
    """Returns the counters that go up by one here and in fp32, and will stand still; as they are in the last step.

    Args:
        compared: The steps.
    """
    _, runs = lasting([step.states for step in compared], lambda state: bool(state.moved), _by_one)
    return tuple(run[-1] for run in runs.values())


def _is_stuck(run: Sequence[StateBeside]) -> bool:
    counts = run[0].looked_at == 1 and len({state.course for state in run}) == 1
    return counts or (run[0].kind != "counter" and goes_one_way(run, COINS))


def _by_one(run: Sequence[StateBeside]) -> bool:
    values = [state.value for state in run]
    if run[0].looked_at > 1:
        return False
    upwards = all(after == before + 1 for before, after in itertools.pairwise(values))
    return upwards and values[-1].is_integer() and values[-1] < ENDS[run[-1].dtype]


def owner_of(name: str) -> str:
    """Returns the module that a state belongs to; of an optimizer's that of the parameter.

    Args:
        name: Of the state.
    """
    path = name.removeprefix(_OPTIMIZER)
    return path.rpartition(".")[0].rpartition(".")[0] if name.startswith(_OPTIMIZER) else path.rpartition(".")[0]


def stuck_finding(compared: Sequence[Comparison], since: int, states: Sequence[StateBeside], where: Where) -> Finding:
    """The finding for states that stand still: one, as they share a cause.

    Args:
        compared: All compared steps.
        since: Index of the first in which they do.
        states: As they are in it.
        where: What writes them.
    """
    names, step = [state.name for state in states], compared[since].step
    inside = [owner_of(state.name) for state in states if state.kind != "own"]
    module, common = (inside[0] if inside else ""), common_module([f"{path}." for path in inside])
    stand = "stands" if len(names) == 1 else "stand"
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="optimizer_precision",
        where=replace(where, step=step, module=module, tensor=names[0] if len(names) == 1 else None),
        message=f"step {step}: {named(names, common)} in {states[0].dtype} {stand} still {within(compared, since)}, "
        f"and in fp32 {'it moves' if len(names) == 1 else 'they move'} one way: what is added is too small beside it",
        evidence={
            "tensors": names[:NAMED],
            "tensors_count": len(names),
            "steps": [step.step for step in compared[since:]],
            "dtype": states[0].dtype,
            "largest_value": max(state.value for state in states),
            "largest_move_in_half_units": max(abs(move) for state in states for move in state.course),
        },
        help=HELP["optimizer_precision"],
    )


def counting_finding(compared: Sequence[Comparison], states: Sequence[StateBeside]) -> Finding:
    """The note for counters that will stand still: a projection.

    Args:
        compared: All compared steps.
        states: The counters, as they are in the last step.
    """
    names = [state.name for state in states]
    most = max(states, key=lambda state: state.value / ENDS[state.dtype])
    end, last = ENDS[most.dtype], compared[-1].step
    at = last + int(end - most.value)
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="note",
        cause="optimizer_precision",
        where=Where(step=last, phase="optimizer", module=owner_of(most.name), tensor=most.name),
        message=f"{named(names, '')} {'counts' if len(names) == 1 else 'count'} steps in {most.dtype}: {most.value:g} "
        f"before step {last}, and at {end:g} it stands still, from step {at} on if it goes on so",
        evidence={
            "tensors": names[:NAMED],
            "tensors_count": len(names),
            "steps": [step.step for step in compared],
            "stands_still_from_step": at,
        },
        help=HELP["optimizer_precision"],
    )
