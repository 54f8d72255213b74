"""AMP901: the same step does not come back bit by bit."""

from __future__ import annotations

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding

RULE = register(
    "AMP901",
    "nondeterministic-replay",
    "The same step does not come back bit by bit",
    worst="warning",
    commands=REPLAYED,
)


def nondeterministic_finding(step: int, what: str, first: float, second: float) -> Finding:
    """The same step gave other bits.

    Args:
        step: The step.
        what: The first thing that differed.
        first: Its largest value (the loss itself) when first seen.
        second: The same in the replay.
    """
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="warning",
        where=Where(step=step, phase="forward"),
        message=f"step {step} does not come back bit by bit from the same state and random state: the first "
        f"difference is the {what or 'loss'}, {first:.9g} and then {second:.9g}",
        evidence={"differs": what or "loss", "first": first, "second": second},
        help="Seed every generator in the factory, and keep counters and files of the loop inside it.",
    )
