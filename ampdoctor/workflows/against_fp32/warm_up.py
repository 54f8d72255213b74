"""A learning rate that is still coming up: does what stands still at it move at the rate that it comes up to?

In a model that is bf16 throughout, the first steps of nearly every warm-up move nothing, and no harm comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import AmpdoctorError
from ampdoctor.probes.cheap.gradients import DistanceProbe
from ampdoctor.workflows.against_fp32.moves import kept, moved
from ampdoctor.workflows.against_fp32.side_by_side import compared, stepped

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ampdoctor.evidence.of_runs.trace import Comparison
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.snapshot import Snapshot

Rates = Mapping[tuple[str, int], float]
"""A learning rate for each group, by optimizer and position."""

RISING = 0.99
"""Share of a group's full rate below which it is still coming up; a decay begins nearer to it."""


def at_full_rate(session: Session, start: Snapshot, before: Snapshot, step: int) -> Comparison | None:
    """Replay a step and its twin in fp32 with the learning rates that a warm-up brings them to.

    A group's full rate is what torch's schedulers note down (`initial_lr`), else what it had before the first step: a
    loop that sets the rate by hand begins with the optimizer's own.

    Args:
        session: The session; it is left at the start of the step.
        start: The state before step 0.
        before: The state before the step.
        step: The step.

    Returns:
        The step beside fp32; None where the rates are not below their full ones, or it cannot be run so.
    """
    start.restore()
    full = _full(session)
    before.restore()
    used: dict[tuple[str, int], float] = {}
    values = kept(session)
    try:
        with session.reference(), _held_at(session, full, used):
            wide, reference = stepped(session, step)
            there = moved(session, values)
        before.restore()
        if not any(rate < RISING * full[group] for group, rate in used.items()):
            return None
        beside = DistanceProbe(wide.gradients, wide.times)
        with _held_at(session, full, {}), session.watched(beside):
            outcome = session.step(step)
        here = moved(session, values)
        return compared(session, step, (outcome, reference), beside.distances, (values, here, there))
    except AmpdoctorError:
        return None
    finally:
        before.restore()


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
    """Inside, each group steps with its full rate; `used` is told the rate that it would have had."""
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
