"""Looks at a recorded step, in place: runs it again from its calls on the live model, and puts everything back."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import AmpdoctorError, FactoryError
from ampdoctor.evidence.report import ErrorNote, Finding, Report, Skipped
from ampdoctor.loop.raised import describe
from ampdoctor.replay.recorded.running import run_of
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.open_replay import open_replay
from ampdoctor.workflows.opening.request import Policy, ReplayRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.loop.recorded.program import Program
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
        failed: The step could not be run again here.
        seconds: How long it took.
    """

    report: Report | None
    backoffs: int = 0
    uncovered: tuple[str, ...] = ()
    failed: bool = False
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
    began, failed = time.monotonic(), None
    if not program.calls_models:
        unseen = Report(command="run", target={}, verdict="inconclusive", skipped=tuple(_not_replayed(program, ())))
        return Look(report=unseen, failed=True)
    request = ReplayRequest(
        factory=_once(program), policy=policy, device=device, thresholds=thresholds, steps=1, compare_steps=0
    )
    real = {id(p): p.grad for p in program.model.parameters() if p.grad is not None}
    try:
        with at_its_begin(program), _without_warnings():
            with open_replay(request) as replay:
                session = replay.session()
                try:
                    uncovered, backoffs = _first_run(session, program, real, settles=settles)
                finally:
                    session.close()
            if backoffs is not None:
                return Look(report=None, backoffs=backoffs, seconds=time.monotonic() - began)
            report = bisect_nan(replace(request, factory=_once(program)))
    except Exception as error:  # noqa: BLE001 - there may be no room here for a second run
        said = str(error) if isinstance(error, AmpdoctorError) else describe(error)
        failed = ErrorNote(what="the recorded step", kind="not_replayed", message=said)
        report, uncovered = Report(command="run", target={}, verdict="sick", complete=False, errors=(failed,)), ()
    if not report.findings and not report.errors:
        report = replace(report, verdict="not_reproduced", complete=False, errors=(_finite_again(program, uncovered),))
    left_out = (*_not_replayed(program, uncovered), *report.skipped)
    findings = tuple(_unproved(finding, uncovered) for finding in report.findings) if uncovered else report.findings
    report = replace(report, command="run", findings=findings, skipped=left_out)
    return Look(report=report, uncovered=uncovered, failed=failed is not None, seconds=time.monotonic() - began)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside, this thread's warnings are not shown: the step has given them when it ran.

    The filters are left alone: whoever changes them has every warning shown once more.
    """
    shown, here = warnings.showwarning, threading.get_ident()

    def of_others(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != here:
            shown(*args, **kwargs)

    warnings.showwarning = of_others
    try:
        yield
    finally:
        warnings.showwarning = shown


@contextmanager
def at_its_begin(program: Program) -> Iterator[None]:
    """Inside, buffers, gradients, scaler and optimizer are as when the step began; afterwards as they were.

    The versions of weights and buffers are put back with their values: a graph that the loop has yet to differentiate
    (a GAN's generator, at its critic's step) has saved some of them, and its backward compares versions. What the loop
    has hung behind its optimizer (an average of the weights, a log) is not run.
    """
    with ExitStack() as stack:
        for tensor in (*program.model.parameters(), *program.model.buffers()):
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor))  # noqa: SLF001 - torch has no other way to write unseen
        with _put_back(program):
            yield


@contextmanager
def _put_back(program: Program) -> Iterator[None]:
    named = dict(program.model.named_buffers())
    after = [(named[name], named[name].clone()) for name in program.buffers]
    gradients = [(p, p.grad) for p in program.model.parameters()]
    with torch.no_grad():
        for name, value in program.buffers.items():
            named[name].copy_(value)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with _fresh_scaler(program.scaler), _alone(program.optimizer):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in after:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _fresh_scaler(scaler: Any) -> Iterator[None]:
    """Inside, the scaler has not been asked for anything in this step."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        yield
        return
    scaler._per_optimizer_states = type(states)(states.default_factory)  # noqa: SLF001 - torch has no other way
    try:
        yield
    finally:
        scaler._per_optimizer_states = states  # noqa: SLF001


@contextmanager
def _alone(optimizer: Any) -> Iterator[None]:
    """Inside, nothing hangs behind the optimizer's steps, and no scaler has sent it anything."""
    if optimizer is None:
        yield
        return
    own: dict[str, Any] = vars(optimizer)
    sent: dict[str, Any] = {
        name: own.pop(name) for name in ("grad_scale", "found_inf") if name in own
    }  # to a fused one, by a scaler
    moments = {parameter: dict(one) for parameter, one in optimizer.state.items()}
    behind = own.get("_optimizer_step_post_hooks")
    if behind is not None:
        own["_optimizer_step_post_hooks"] = type(behind)()
    try:
        yield
    finally:
        if behind is not None:
            own["_optimizer_step_post_hooks"] = behind
        own.update(sent)
        for parameter, one in moments.items():  # held all along, so that putting them back takes no memory
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = one


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


def _finite_again(program: Program, uncovered: Sequence[str]) -> ErrorNote:
    """The step was not finite, and is when it is run again: something else than its calls made it so."""
    edited = [name for name in program.edited if name in uncovered]
    said = (
        f"step {program.step} was not finite in the loop, and is finite when it is run again from its recorded calls: "
    )
    if edited:
        said += (
            f"the gradients of {_listed(edited)} were changed between the backward and the step, by the loop's own "
            "code or a hook"
        )
    else:
        written = " (code that writes to a gradient's .data)" if uncovered else ""
        said += f"what was not recorded made it so{written}, its kernels are not deterministic, or the hardware erred"
    return ErrorNote(what=f"step {program.step}", kind="not_reproduced", message=said)


def _unproved(finding: Finding, uncovered: Sequence[str]) -> Finding:
    """Nothing that a replay shows is a proof where its gradients are not those of the loop."""
    made = finding.prescription
    if made is None or made.status != "verified":
        return finding
    reason = f"the replay's gradient of {uncovered[0]} is not the loop's: what it shows is no proof"
    return replace(finding, prescription=replace(made, status="not_run", reason=reason))


def _not_replayed(program: Program, uncovered: Sequence[str]) -> list[Skipped]:
    found = [Skipped(what="part of the step", reason=reason, kind="not_replayed") for reason in program.unexplained]
    if uncovered:
        reason = f"the recorded calls do not explain the gradient of {_listed(uncovered)}: nothing is proved of it"
        found.append(Skipped(what="part of the step", reason=reason, kind="not_replayed"))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def not_looked_at(program: Program, what: str, why: str) -> Look:
    """Returns the look that was not made at a sick step, and says why."""
    said = f"step {program.step} was sick ({what}), and was not run again: {why}"
    note = ErrorNote(what=f"step {program.step}", kind="not_replayed", message=said)
    return Look(report=Report(command="run", target={}, verdict="sick", complete=False, errors=(note,)), failed=True)
