"""Which tensors a rule is about, over the compared steps; and how a finding names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ampdoctor.evidence.trace import Comparison, ParameterBeside, StateBeside

SHOWN = 3
"""Steps in a row, up to the last one that was compared, in which something has to be so."""
STRAIGHT = 0.75
"""Share of what fp32's moves of a tensor would add up to if none went back: steps of a mean at rest go to and fro and
leave 0.58 of it after three, 1 / sqrt(n) in the long run. Measured where something stands still: 0.79 to 1."""
COINS = 5
"""Signs beside the first that have to be the same where only few elements say so: a coin does that once in 32."""
NAMED = 16
"""Tensors that the evidence names."""
Beside = TypeVar("Beside", ParameterBeside, StateBeside)


def lasting(
    steps: Sequence[Sequence[Beside]],
    holds: Callable[[Beside], bool],
    shows: Callable[[Sequence[Beside]], bool] = lambda _: True,
    least: int = SHOWN,
) -> tuple[int, Mapping[str, tuple[Beside, ...]]]:
    """Returns since when something holds of tensors in each step, as an index, and what these are in each of them.

    Only those for which it begins first: they share a cause, and what begins later may follow from it.

    Args:
        steps: What was seen of tensors, step by step.
        holds: What is asked of a tensor in a step.
        shows: What is asked of it in all of them together.
        least: In how many steps.
    """
    runs: dict[str, list[Beside]] = {beside.name: [] for beside in steps[-1]} if steps else {}
    going = set(runs)
    for step in reversed(steps):
        going &= {beside.name for beside in step if holds(beside)}
        for beside in step:
            if beside.name in going:
                runs[beside.name].append(beside)
    found = {name: tuple(run[::-1]) for name, run in runs.items() if len(run) >= least and shows(run[::-1])}
    longest = max(map(len, found.values()), default=0)
    return len(steps) - longest, {name: run for name, run in found.items() if len(run) == longest}


def goes_one_way(run: Sequence[Beside], coins: int = 0) -> bool:
    """Do fp32's moves of a tensor that stays add up, rather than go to and fro?

    Args:
        run: The tensor in several steps.
        coins: So many signs beside the first have to be the same, for what may be at rest.
    """
    elements = zip(*(beside.course for beside in run), strict=True)
    moving = [of for of in elements if any(of)]
    if moving and all(move == of[0] for of in moving for move in of):
        return True  # a counter
    if not moving or len(moving) * (len(run) - 1) < coins:
        return False
    whole = math.fsum(abs(move) for of in moving for move in of)
    return math.fsum(abs(math.fsum(of)) for of in moving) >= STRAIGHT * whole


def named(names: Sequence[str], module: str) -> str:
    """The tensors in words.

    Args:
        names: Their names.
        module: What holds them all.
    """
    return names[0] if len(names) == 1 else f"{len(names)} tensors of {module or 'the run'} ({names[0]}, ...)"


def within(run: Sequence[Comparison], since: int) -> str:
    """In which steps, in words.

    Args:
        run: The compared steps.
        since: Index of the first.
    """
    steps = len(run) - since
    return f"in all {steps} steps that were compared" if not since else f"in the last {steps} of {len(run)} steps"
