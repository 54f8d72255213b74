"""Looks at a recorded step, in place: runs it again from its calls on the live model, and puts everything back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ampdoctor.errors import AmpdoctorError, FactoryError
from ampdoctor.evidence.report import ErrorNote, Report, Skipped
from ampdoctor.replay.recorded.running import run_of
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.open_replay import open_replay
from ampdoctor.workflows.opening.request import Policy, ReplayRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.loop.program import Program
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.training_run import TrainingRun

AGREE = 1e-3
"""Relative difference of a gradient and its replay up to which they are one: kernels that add in no fixed order (the
backward of attention) stay below it in Megatron's rerun state machine, whose tolerance this is."""
MOST_BACKOFFS = 40
"""Halvings from any scale that occurs down to one below 1: a GradScaler begins at 2^16, and at most 2^24 is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of a step.

    Attributes:
        report: The diagnosis; None where the step is health, a scaler that settles.
        backoffs: How often the scaler has to back off until the step is taken, where it settles.
        uncovered: Parameters whose gradient the calls do not explain.
        seconds: How long it took.
    """

    report: Report | None
    backoffs: int = 0
    uncovered: tuple[str, ...] = ()
    seconds: float = 0.0


def look(program: Program, *, policy: Policy, device: str, thresholds: Thresholds, settles: bool) -> Look:
    """Look at a step whose weights are still as they were.

    Args:
        program: The step.
        policy: "cuda" where the CPU stands in for a GPU, else "native".
        device: Where it runs.
        thresholds: As of the command.
        settles: A scaler has skipped it: it is health if the scaler backs off to where it is taken.

    Returns:
        What was seen; the model, its optimizer, scaler, gradients and the random state are as before.
    """
    began = time.monotonic()
    request = ReplayRequest(
        factory=_once(program), policy=policy, device=device, thresholds=thresholds, steps=1, compare_steps=0
    )
    real = {id(p): p.grad for p in program.model.parameters() if p.grad is not None}
    try:
        with at_its_begin(program):
            with open_replay(request) as replay:
                session = replay.session()
                try:
                    uncovered, backoffs = _first_run(session, program, real, settles=settles)
                finally:
                    session.close()
            if backoffs is not None:
                return Look(report=None, backoffs=backoffs, seconds=time.monotonic() - began)
            report = bisect_nan(replace(request, factory=_once(program)))
    except AmpdoctorError as error:
        note = ErrorNote(what="the recorded step", kind="not_replayed", message=str(error))
        report, uncovered = Report(command="run", target={}, verdict="sick", complete=False, errors=(note,)), ()
    left_out = (*_not_replayed(program, uncovered), *report.skipped)
    report = replace(report, command="run", skipped=left_out)
    return Look(report=report, uncovered=uncovered, seconds=time.monotonic() - began)


@contextmanager
def at_its_begin(program: Program) -> Iterator[None]:
    """Inside, buffers, gradients and scaler are as when the step began; afterwards as they were.

    What the loop has hung behind its optimizer (an average of the weights, a log) is not run.
    """
    named = dict(program.model.named_buffers())
    after = [(named[name], named[name].clone()) for name in program.buffers]
    gradients = [(p, p.grad) for p in program.model.parameters()]
    states = getattr(program.scaler, "_per_optimizer_states", None)
    with torch.no_grad():
        for name, value in program.buffers.items():
            named[name].copy_(value)
    for parameter, _ in gradients:
        parameter.grad = None
    if states is not None:
        program.scaler._per_optimizer_states = type(states)(states.default_factory)  # noqa: SLF001 - torch has no other way to begin a step
    behind = getattr(program.optimizer, "_optimizer_step_post_hooks", None)
    if behind is not None:
        program.optimizer._optimizer_step_post_hooks = type(behind)()  # type: ignore[union-attr]  # noqa: SLF001
    try:
        yield
    finally:
        if behind is not None:
            program.optimizer._optimizer_step_post_hooks = behind  # type: ignore[union-attr]  # noqa: SLF001
        with torch.no_grad():
            for buffer, value in after:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if states is not None:
            program.scaler._per_optimizer_states = states  # noqa: SLF001


def _once(program: Program) -> Callable[[], TrainingRun]:
    """The live model can be had once at a time: a second run of the same parts is refused."""
    made: list[None] = []

    def recorded_step() -> TrainingRun:
        if made:
            raise FactoryError("a step that is looked at in place cannot be run beside itself: replay its bundle")
        made.append(None)
        return run_of(program)

    return recorded_step


def _first_run(
    session: Session, program: Program, real: Mapping[int, torch.Tensor], *, settles: bool
) -> tuple[tuple[str, ...], int | None]:
    """Run the step once: what its calls do not explain, and after how many back-offs it is taken, if it is."""
    session.has_step(0)
    start = session.snapshot()
    try:
        outcome = session.attempt(0)
        uncovered = _uncovered(session, program, real)
        if not settles:
            return uncovered, None
        for backoffs in range(1, MOST_BACKOFFS):
            scale = session.events.scale()
            if not outcome.skipped or scale is None or scale < 1.0:
                break
            outcome = session.attempt(0)
            if not outcome.skipped and not outcome.loses_updates:
                return uncovered, backoffs
        return uncovered, None
    finally:
        start.restore()


def _uncovered(session: Session, program: Program, real: Mapping[int, torch.Tensor]) -> tuple[str, ...]:
    """The parameters of the program's optimizer whose gradient is another than that of the loop."""
    if program.optimizer is None:
        return ()
    names = session.parameter_names()
    held = [p for group in program.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return tuple(names.get(id(p), "?") for p in held if not _agree(real.get(id(p)), p.grad))


def _agree(here: torch.Tensor | None, there: torch.Tensor | None) -> bool:
    if here is None or there is None:
        present = here if there is None else there
        return present is None or not bool(present.count_nonzero())
    if here.shape != there.shape:
        return False
    here, there = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (here, there))
    finite = here.isfinite()
    if not torch.equal(finite, there.isfinite()):
        return False
    mine, other = (torch.where(finite, t, 0).to(torch.float32) for t in (here, there))
    return bool((mine - other).norm() <= AGREE * other.norm())


def _not_replayed(program: Program, uncovered: Sequence[str]) -> list[Skipped]:
    found = [Skipped(what="part of the step", reason=reason, kind="not_replayed") for reason in program.unexplained]
    if uncovered:
        some = ", ".join(uncovered[:4]) + (f" and {len(uncovered) - 4} more" if len(uncovered) > 4 else "")
        reason = f"the recorded calls do not explain the gradient of {some}: nothing is proved of it"
        found.append(Skipped(what="part of the step", reason=reason, kind="not_replayed"))
    return found
