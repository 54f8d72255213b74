"""Diagnoses a sick step of a training that is watched: its recorded calls run again, or its last update examined."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic  # a script may put another in its place
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.loaded_state import seen_beside, state_finding
from ampdoctor.diagnosis.scan.tensors import FP16_OVERFLOW_AT
from ampdoctor.errors import AmpdoctorError, FactoryError
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import ErrorNote, Finding, Report, Skipped
from ampdoctor.evidence.report_target import Kept
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.process_state import are_several, unwarned
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.precision import policy_in_force
from ampdoctor.probes.nonfinite import is_nonfinite, stats_of
from ampdoctor.replay.bundles.model import Made
from ampdoctor.replay.bundles.write import Written, write_bundle
from ampdoctor.replay.recorded_step import lies_in_parts, on_its_own, run_of
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import Policy, ReplayRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampdoctor.evidence.location import NonFinite
    from ampdoctor.evidence.thresholds import Thresholds
    from ampdoctor.hooks.program import Leading, Program
    from ampdoctor.live.log.facts import Place
    from ampdoctor.live.loop_watch import Attempt, LoopWatch
    from ampdoctor.live.numbers.other_modules import Beside, Lost
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.training_run import TrainingRun
    from ampdoctor.workflows.requests import WatchRequest


# Looks at a recorded step, in place: runs it again from its calls on the live model, and puts everything back.


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


# Weights that are not finite before a step whose predecessor was well: what is known of the update between the two.


_SHOWN = ("lr", "betas", "momentum", "alpha", "eps", "weight_decay")
"""Settings that a sentence names, of the optimizers that have them."""
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""State of torch's optimizers whose root an update is divided by, with eps added to it."""


@dataclass(frozen=True, slots=True, eq=False)
class LastUpdate:
    """The settings with which an optimizer has made its last update, of gradients that were not seen to be sick.

    Attributes:
        step: Of the update.
        optimizer: Whose.
        settings: Of each of its groups; a scheduler may have changed them since.
        read: Its gradients were read; they were finite.
    """

    step: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    settings: tuple[Mapping[str, Any], ...]
    read: bool

    @classmethod
    def of(cls, attempt: Attempt, *, read: bool) -> LastUpdate:
        """The update that is about to be made, of gradients that were read and are finite, or were not read."""
        groups = attempt.optimizer.param_groups
        settings = tuple({key: group[key] for key in _SHOWN if key in group} for group in groups)
        return cls(attempt.step, weakref.ref(attempt.optimizer), settings, read)

    def explained(self, report: Report, parameters: Mapping[str, torch.Tensor]) -> Report:
        """Returns the report; where a weight is not finite before the step, this update is named.

        Args:
            report: Of a step after it, whose weights are as it has left them.
            parameters: Of the step's model, by name.
        """
        return replace(report, findings=tuple(self._told(finding, parameters) for finding in report.findings))

    def _told(self, finding: Finding, parameters: Mapping[str, torch.Tensor]) -> Finding:
        where, optimizer = finding.where, self.optimizer()
        parameter = parameters.get(where.tensor or "")
        if where.phase != "checkpoint" or parameter is None or optimizer is None:
            return finding
        settings = self._settings_of(parameter, optimizer)
        if settings is None:
            return finding
        state = optimizer.state.get(parameter, {})
        if parameter.grad is None and not state:
            return finding  # it was not updated
        with unseen(), torch.no_grad():
            lost = int(parameter.isfinite().logical_not().sum())
            why = list(_reasons(parameter, settings, state))
        if not lost:
            return finding
        kind = type(optimizer).__name__
        shown = ", ".join([kind, *(f"{key}={_text(value)}" for key, value in settings.items())])
        after = "" if why else ", or what the loop did to the weights after it"
        gradients = "the gradients of that step were finite, and" if self.read else "the gradients were not read;"
        message = (
            f"{where.tensor} holds {lost} non-finite values after step {self.step}: {gradients} its update ({shown}) "
            f"made the weights so{after}{': ' if why else ''}{'; '.join(why)}"
        )
        return replace(
            finding,
            message=message,
            cause=None,
            where=replace(where, step=self.step, phase="optimizer", op=f"{kind}.step"),
            evidence={**finding.evidence, "settings": {key: _text(value) for key, value in settings.items()}},
            help="Mend what the update was made with, and go on from a checkpoint before it.",
        )

    def _settings_of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        for group, settings in zip(optimizer.param_groups, self.settings, strict=False):
            if any(one is parameter for one in group["params"]):
                return settings
        return None


def lost_weight(parameters: Mapping[str, torch.Tensor], step: int) -> Finding | None:
    """Returns the finding for the first weight that is not finite when a training ends; None where each is.

    Tensors that lie in parts on several processes are not asked: that would need the others.

    Args:
        parameters: Of the loop's models, by name; those that are frozen may hold infinities on purpose.
        step: The last update.
    """
    for name, parameter in parameters.items():
        if not parameter.requires_grad or type(parameter.detach()) is not torch.Tensor or not is_nonfinite(parameter):
            continue
        stats = stats_of(parameter)
        module, _, leaf = name.rpartition(".")
        nonfinite: NonFinite = "nan" if stats.nans else "inf"
        where = Where(
            step=step, phase="checkpoint", module=module, op=f"state:{leaf}", tensor=name, nonfinite=nonfinite
        )
        message = (
            f"{name} holds {stats.nans + stats.infs} non-finite values when the training ends, after step {step}: no "
            "optimizer was seen to make them so, and the loop's own code writes to the weights"
        )
        return replace(state_finding("param", where, stats), message=message, cause=None)
    return None


def lost_beside(lost: Lost, models: Iterable[torch.nn.Module]) -> Finding:
    """Returns the finding for what a loop keeps beside its models and was finite before.

    Args:
        lost: It.
        models: The loop's.
    """
    own = [(name, p) for model in models for name, p in (*model.named_parameters(), *model.named_buffers())]
    with unseen(), torch.no_grad():
        twin = next((pair for pair in own if _same(lost, *pair)), None)
        twin = twin or next((pair for pair in own if _overflowed(lost.tensor, pair[1])), None)
        amax = None if twin is None or is_nonfinite(twin[1]) else stats_of(twin[1]).amax
        stats = stats_of(lost.tensor)
    return seen_beside(
        lost.name, stats, lost.since, lost.step, None if twin is None or amax is None else (twin[0], amax)
    )


def found_beside(beside: Beside, watch: LoopWatch, step: int, *, at_the_end: bool) -> tuple[Finding, int] | None:
    """Look at what a loop keeps beside its models, where it is time; returns what is not finite any more.

    Args:
        beside: Knows what was finite.
        watch: The loop's.
        step: The step that was made last.
        at_the_end: The training has ended: what is on its way is waited for.
    """
    if watch.recorder.is_crowded:  # what is beside one thread's model may be another's
        return None
    models = [root for _, root in watch.recorder.models.roots]
    if not at_the_end and beside.wants(step):
        with watch.looking_away():
            beside.look(step, models)
    lost = beside.finish(step, models) if at_the_end else beside.arrived(models)
    return None if lost is None else (lost_beside(lost, models), lost.step)


def _same(lost: Lost, name: str, tensor: torch.Tensor) -> bool:
    return tensor.shape == lost.tensor.shape and f".{lost.name}".endswith(f".{name}")


def _overflowed(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Is a copy infinite just where a tensor is beyond fp16? A list of copies has none of the model's names."""
    if copy.shape != tensor.shape or copy.device != tensor.device or type(tensor.detach()) is not torch.Tensor:
        return False
    beyond = tensor.detach().abs() >= FP16_OVERFLOW_AT
    return bool(beyond.any()) and bool((copy.detach().isinf() == beyond).all())


def _reasons(parameter: torch.Tensor, settings: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """Yields what of an optimizer's settings and state makes an update of finite gradients non-finite."""
    for key, value in settings.items():
        if isinstance(value, torch.Tensor | float) and not math.isfinite(value):
            yield f"{key} is {_text(value)}"
    lost = parameter.isfinite().logical_not()
    for key, held in state.items():
        if not isinstance(held, torch.Tensor) or held.shape != parameter.shape or not held.is_floating_point():
            continue
        dtype = str(held.dtype).removeprefix("torch.")
        if count := int(held.isfinite().logical_not().sum()):
            yield f"its {key}, in {dtype}, holds {count} non-finite values"
        eps = settings.get("eps")
        if key in _SQUARES and isinstance(eps, float) and float(torch.tensor(eps, dtype=held.dtype)) == 0.0:
            zeros = int(((held == 0) & lost).sum())
            small = "eps is 0" if eps == 0.0 else f"eps={eps:g} is 0 in {dtype}"
            if zeros:
                yield f"its {key} is 0 in {zeros} places where the weights are lost, and {small}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return (
        f"{float(value):g}" if isinstance(value, torch.Tensor | float) and not isinstance(value, bool) else str(value)
    )
