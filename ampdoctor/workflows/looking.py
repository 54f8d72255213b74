"""Looks at a recorded step, in place: runs it again from its calls on the live model, and puts everything back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic  # a script may put another in its place
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.errors import AmpdoctorError, FactoryError
from ampdoctor.evidence.codec import to_plain
from ampdoctor.evidence.report import ErrorNote, Finding, Report, Skipped
from ampdoctor.evidence.report.target import Kept
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.process_state import are_several, unwarned
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.precision import policy_in_force
from ampdoctor.replay.bundles.model import Made
from ampdoctor.replay.bundles.write import Written, write_bundle
from ampdoctor.replay.recorded_step import lies_in_parts, on_its_own, run_of
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.open_replay import open_replay
from ampdoctor.workflows.opening.request import Policy, ReplayRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.hooks.program import Leading, Program
    from ampdoctor.live.log.facts import Place
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.training_run import TrainingRun
    from ampdoctor.workflows.opening.watch_request import WatchRequest

AGREE = 1e-3
"""Relative difference of a gradient and its replay up to which they are one: kernels that add in no fixed order (the
backward of attention) stay below it in Megatron's rerun state machine, whose tolerance this is."""
MOST_BACKOFFS = 40
"""Halvings from any scale that occurs down to one below 1: a GradScaler begins at 2^16, and at most 2^24 is usual."""
IN_PARTS = (
    "the parameters lie in parts on several processes ({parts}), and one alone cannot run the model without the others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was seen of a step.

    Attributes:
        report: The diagnosis; None where the step is health, a scaler that settles.
        backoffs: How often the scaler has to back off until the step is taken, where it settles.
        uncovered: Parameters whose gradient the calls do not explain.
        failed: The step could not be run again here.
        elsewhere: It is finite here: another process made it what it is, or what came after the gradients' reduction.
        seconds: How long it took.
    """

    report: Report | None
    backoffs: int = 0
    uncovered: tuple[str, ...] = ()
    failed: bool = False
    elsewhere: bool = False
    seconds: float = 0.0

    @property
    def shows_error(self) -> bool:
        """An error was found, and not only that the step is sick."""
        return self.report is not None and any(finding.severity == "error" for finding in self.report.findings)

    def telling(self, *, raised: BaseException | None = None, advice: str = "") -> Look:
        """Returns the look with what is known of the step besides.

        Args:
            raised: What the loop has raised, which takes the place of what the replay did.
            advice: What more steps than this one have shown: it makes each finding an error.
        """
        if self.report is None:
            return self
        findings = self.report.findings
        if raised is not None:
            said = {"raised": describe(raised)}
            findings = tuple(
                replace(one, evidence={**one.evidence, **said}) if "raised" in one.evidence else one for one in findings
            )
        if advice:
            findings = tuple(replace(one, severity="error", help=f"{advice} {one.help}") for one in findings)
        verdict = "sick" if advice and findings else self.report.verdict
        return replace(self, report=replace(self.report, findings=findings, verdict=verdict))


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
    began, failed, unsaid = monotonic(), None, tuple[str, ...]()
    if not program.calls_models:
        unseen = Report(command="run", target={}, verdict="inconclusive", skipped=tuple(_not_replayed(program, ())))
        return Look(report=unseen, failed=True)
    request = ReplayRequest(
        factory=_once(program), policy=policy, device=device, thresholds=thresholds, steps=1, compare_steps=0
    )
    real = {id(p): p.grad for p in program.model.parameters() if p.grad is not None}
    try:
        with unwarned(), on_its_own(program.model) as unsaid, at_its_begin(program):
            with open_replay(request) as replay:
                session = replay.session()
                try:
                    uncovered, backoffs = _first_run(session, program, real, settles=settles)
                finally:
                    session.close()
            if backoffs is not None:
                return Look(report=None, backoffs=backoffs, elsewhere=backoffs == 0, seconds=monotonic() - began)
            report = bisect_nan(replace(request, factory=_once(program)))
    except Exception as error:  # noqa: BLE001 - there may be no room here for a second run
        said = str(error) if isinstance(error, AmpdoctorError) else describe(error)
        failed = ErrorNote(what="the recorded step", kind="not_replayed", message=said)
        report, uncovered = Report(command="run", target={}, verdict="sick", complete=False, errors=(failed,)), ()
    elsewhere = not report.findings and not report.errors and are_several()
    if not report.findings and not report.errors:
        note = _finite_here(program, real) if elsewhere else _finite_again(program, uncovered)
        report = replace(report, verdict="not_reproduced", complete=False, errors=(note,))
    left_out = (*_not_replayed(program, uncovered, unsaid), *report.skipped)
    findings = tuple(_unproved(finding, uncovered) for finding in report.findings) if uncovered else report.findings
    report = replace(report, command="run", findings=findings, skipped=left_out)
    seconds = monotonic() - began
    return Look(report=report, uncovered=uncovered, failed=failed is not None, elsewhere=elsewhere, seconds=seconds)


def not_looked_at(program: Program, what: str, why: str) -> Look:
    """What is known of a sick step that is not run again, and why it is not."""
    said = f"step {program.step} was sick ({what}), and was not run again: {why}"
    note = ErrorNote(what=f"step {program.step}", kind="not_replayed", message=said)
    return Look(report=Report(command="run", target={}, verdict="sick", complete=False, errors=(note,)), failed=True)


def all_gradients_nan(model: torch.nn.Module) -> bool:
    """Does each gradient of a model hold a NaN, as behind a loss that is NaN? False where it has none."""
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with unseen():
        return bool(held) and all(bool(gradient.isnan().any()) for gradient in held)


def bundled(
    program: Program,
    report: Report,
    request: WatchRequest,
    place: Place,
    say: Callable[[str], None],
    *,
    made: Made,
    log: Sequence[str],
    leading: Leading | None,
) -> Written | None:
    """Keep a sick step where a watch was asked to; None where it could not be written.

    Args:
        program: The step.
        report: Its diagnosis.
        request: Of the watch.
        place: Of this process among the others.
        say: Told what the bundle lacks.
        made: How the model was made.
        log: The last lines of the log.
        leading: The updates that lead up to the step.
    """
    rank = place.rank
    folder = Path(request.health) / (f"bundle-{program.step}" + (f".rank{rank}" if rank else ""))
    write = partial(
        write_bundle,
        made=made,
        rank=rank,
        world=place.world,
        policy="cuda" if policy_in_force() == "cuda" else None,
        leading=leading,
        diagnosis=to_plain(report),
        log=log,
        max_bytes=request.bundle_max,
    )
    return kept_bundle(lambda: write(folder, program), program, say)


def kept_bundle(write: Callable[[], Written], program: Program, say: Callable[[str], None]) -> Written | None:
    """Keep a sick step, and say what its bundle lacks; None where it could not be written.

    Args:
        write: Writes the bundle.
        program: The step.
        say: Told what is missing.
    """
    try:
        with unwarned():
            written = write()
    except Exception as error:  # noqa: BLE001 - the diagnosis stands without it
        why = str(error) if isinstance(error, AmpdoctorError) else describe(error)
        say(f"no bundle of step {program.step} was kept: {why}")
        return None
    if not written.replays:
        say(f"the bundle of step {program.step} holds what cannot be written down, and is no replay")
    parts = lies_in_parts(program.model)
    if parts is not None and len(written.left_out) > 1:
        say(f"the bundle of step {program.step} lacks what lies in parts ({parts}), parameters among it")
    for sentence in () if parts is not None else written.left_out:
        say(f"the bundle of step {program.step}: {sentence}")
    return written


def kept_of(health: Path, bundle: Written | None) -> Kept:
    """What is kept of a sick step.

    Args:
        health: The folder of the run's log, as the user knows it.
        bundle: The step's bundle, if one was written.
    """
    kept = Kept(health=str(health))
    if bundle is not None and bundle.replays:
        kept["bundle"] = str(health / bundle.folder.name)
        if bundle.code is not None:
            kept["model"] = bundle.code
        if bundle.from_checkpoint:
            kept["from_checkpoint"] = True
    return kept


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
    """Run the step once: what its calls do not explain, and after how many back-offs it is taken, if it is.

    After none, where a scaler of several processes has skipped what is finite on this one.
    """
    session.has_step(0)
    start = session.snapshot()
    try:
        outcome = session.attempt(0)
        uncovered = _uncovered(session, program, real)
        if not settles:
            return uncovered, None
        if are_several() and not outcome.skipped and _is_finite(program, outcome.loss):
            return uncovered, 0
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


def _is_finite(program: Program, loss: float | None) -> bool:
    """Whether the loss and the gradients of a step that was run again are."""
    gradients = (p.grad for p in program.model.parameters() if p.grad is not None)
    return (loss is None or math.isfinite(loss)) and all(bool(g.isfinite().all()) for g in gradients)


def _uncovered(session: Session, program: Program, real: Mapping[int, torch.Tensor]) -> tuple[str, ...]:
    """The parameters of the program's optimizer whose gradient is another than that of the loop."""
    if program.optimizer is None:
        return ()
    names = session.parameter_names()
    held = [p for group in program.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return tuple(names.get(id(p), "?") for p in held if not _agree(real.get(id(p)), p.grad))


def _agree(here: torch.Tensor | None, there: torch.Tensor | None) -> bool:
    """Whether the loop's gradient and the replay's are one.

    Where several processes share a step the loop's is the mean over all of them, in which only what is not finite can
    be told of this one: what is not finite in the replay's is not in the loop's.
    """
    if here is None or there is None:
        present = here if there is None else there
        return present is None or not bool(present.count_nonzero())
    if here.shape != there.shape:
        return False
    here, there = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (here, there))
    finite = here.isfinite()
    if are_several():
        return not bool((finite & ~there.isfinite()).any())
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


def finite_here(step: int) -> str:
    """What is said of a step of several processes that is finite on this one."""
    return (
        f"step {step} is finite here: the loss and the gradients of this rank's own calls are. What made it sick is "
        "another rank, or what changes gradients after they are reduced"
    )


def _finite_here(program: Program, real: Mapping[int, torch.Tensor]) -> ErrorNote:
    named = program.model.named_parameters()
    sick = {name for name, p in named if (found := real.get(id(p))) is not None and not bool(found.isfinite().all())}
    edited = [name for name in program.edited if name in sick]
    said = finite_here(program.step)
    if edited:
        said += f"; the loop's own code, or a hook, has changed the gradients of {_listed(edited)} before the step"
    return ErrorNote(what=f"step {program.step}", kind="finite_here", message=said)


def _unproved(finding: Finding, uncovered: Sequence[str]) -> Finding:
    """Nothing that a replay shows is a proof where its gradients are not those of the loop."""
    made = finding.prescription
    if made is None or made.status != "verified":
        return finding
    reason = f"the replay's gradient of {uncovered[0]} is not the loop's: what it shows is no proof"
    return replace(finding, prescription=replace(made, status="not_run", reason=reason))


def _not_replayed(program: Program, uncovered: Sequence[str], unsaid: Sequence[str] = ()) -> list[Skipped]:
    reasons = (*program.unexplained, *unsaid)
    found = [Skipped(what="part of the step", reason=reason, kind="not_replayed") for reason in reasons]
    if uncovered:
        reason = f"the recorded calls do not explain the gradient of {_listed(uncovered)}: nothing is proved of it"
        found.append(Skipped(what="part of the step", reason=reason, kind="not_replayed"))
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def trained_on(run: Mapping[str, Any]) -> str | None:
    """The device type of the training behind a replay; None where none was made."""
    device = run.get("device")
    if device is None:
        return None
    return "cuda" if run.get("policy") == "cuda" else str(device).partition(":")[0]


def device_of(program: Program) -> str:
    """Where the model of a step is."""
    first = next(program.model.parameters(), None)
    return "cpu" if first is None else str(first.device)
