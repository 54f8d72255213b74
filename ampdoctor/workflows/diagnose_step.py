"""Diagnoses a sick step of a watched training: replays its recorded calls in place, or examines the last update."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic  # a script may replace time.monotonic
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.nonfinite import hand_update_finding, seen_beside, state_finding
from ampdoctor.diagnosis.scan.tensors import FP16_OVERFLOW_AT
from ampdoctor.errors import AmpdoctorError, FactoryError
from ampdoctor.evidence.json_records import to_plain
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import ErrorNote, Finding, Prescription, Report, Skipped
from ampdoctor.evidence.report_target import Kept
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.process_state import are_several, unwarned
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.recording.journal import together
from ampdoctor.precision.cuda_autocast import policy_in_force
from ampdoctor.probes.nonfinite import any_nonfinite, is_nonfinite, stats_of
from ampdoctor.probes.user_code import as_source
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
    from ampdoctor.hooks.program import PriorSteps, Program
    from ampdoctor.live.log.facts import RankInJob
    from ampdoctor.live.log.step_lines import StepLines
    from ampdoctor.live.loop_watch import LoopWatch, UpdateAttempt
    from ampdoctor.live.numbers.other_modules import Lost, OtherModules
    from ampdoctor.replay.session import Session
    from ampdoctor.replay.training_run import TrainingRun
    from ampdoctor.workflows.requests import WatchRequest
    from ampdoctor.workflows.watched_test import WatchedTest


# -- replay of a recorded step on the live model --

AGREE = 1e-3
"""Relative difference up to which the loop's gradient and the replay's count as equal. Kernels that add in no fixed
order (the backward of attention) stay below it. The tolerance is that of Megatron's rerun state machine."""
MOST_BACKOFFS = 40
"""Enough halvings from any usual scale to below 1: GradScaler starts at 2^16, and 2^24 is the usual maximum."""
IN_PARTS = (
    "the parameters lie in parts on several processes ({parts}), and one alone cannot run the model without the others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """What was found out about a step; `report` is None where the step is healthy and its scaler only settles."""

    report: Report | None
    backoffs: int = 0  # how often the scaler backs off until the step is taken
    failed: bool = False  # the step could not be replayed here
    elsewhere: bool = False  # finite here: the cause is another process, or lies after the reduction of gradients
    seconds: float = 0.0

    @property
    def shows_error(self) -> bool:
        """Whether an error was found, rather than only that the step is sick."""
        return self.report is not None and any(finding.severity == "error" for finding in self.report.findings)

    def telling(self, *, raised: BaseException | None = None, advice: str = "") -> StepDiagnosis:
        """Returns a copy with the loop's own exception, and `advice` from other steps, which makes findings errors."""
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


def look(program: Program, *, policy: Policy, device: str, thresholds: Thresholds, settles: bool) -> StepDiagnosis:
    """Replay a step whose weights are unchanged and undo that; `settles`: healthy if its scaler backs off enough."""
    began, failed, unsaid = monotonic(), None, tuple[str, ...]()
    if not program.calls_models:
        unseen = Report(command="run", target={}, verdict="inconclusive", skipped=tuple(_not_replayed(program, ())))
        return StepDiagnosis(report=unseen, failed=True)
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
                return StepDiagnosis(
                    report=None, backoffs=backoffs, elsewhere=backoffs == 0, seconds=monotonic() - began
                )
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
    return StepDiagnosis(report=report, failed=failed is not None, elsewhere=elsewhere, seconds=seconds)


def not_looked_at(program: Program, what: str, why: str) -> StepDiagnosis:
    """Returns the result for a sick step that is not replayed, with the reason `why`."""
    said = f"step {program.step} was sick ({what}), and was not run again: {why}"
    note = ErrorNote(what=f"step {program.step}", kind="not_replayed", message=said)
    return StepDiagnosis(
        report=Report(command="run", target={}, verdict="sick", complete=False, errors=(note,)), failed=True
    )


def all_gradients_nan(model: torch.nn.Module) -> bool:
    """Whether each gradient of a model holds a NaN, as after a NaN loss; False where it has none."""
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with unseen():
        return bool(held) and all(bool(gradient.isnan().any()) for gradient in held)


def bundled(
    program: Program,
    report: Report,
    request: WatchRequest,
    place: RankInJob,
    say: Callable[[str], None],
    *,
    made: Made,
    log: Sequence[str],
    leading: PriorSteps | None,
) -> Written | None:
    """Write a sick step's bundle into the health folder and say what it lacks; None where it could not be written."""
    rank = place.rank
    folder = Path(request.health) / (f"bundle-{program.step}" + (f".rank{rank}" if rank else ""))
    try:
        with unwarned():
            written = write_bundle(
                folder,
                program,
                made=made,
                rank=rank,
                world=place.world,
                policy="cuda" if policy_in_force() == "cuda" else None,
                leading=leading,
                diagnosis=to_plain(report),
                log=log,
                max_bytes=request.bundle_max,
            )
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
    """Returns what is kept of a sick step; `health` is the log's folder as the user typed it."""
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
    """Inside, buffers, gradients, scaler and optimizer are as when the step began; afterwards as they were."""
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
    """Inside, the scaler has no per-optimizer state from this step."""
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
    """Inside, the optimizer has no post hooks, and no values that a scaler has set on it."""
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
        for parameter, one in moments.items():  # kept all along, so restoring them takes no memory
            if not optimizer.state.get(parameter):
                optimizer.state[parameter] = one


def _once(program: Program) -> Callable[[], TrainingRun]:
    """Returns a factory for the live model; a second call is refused, because the model cannot run beside itself."""
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
    """Run the step; returns the unexplained gradients, and the back-offs until it is taken (0: finite here)."""
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
    gradients = (p.grad for p in program.model.parameters() if p.grad is not None)
    return (loss is None or math.isfinite(loss)) and all(bool(g.isfinite().all()) for g in gradients)


def _uncovered(session: Session, program: Program, real: Mapping[int, torch.Tensor]) -> tuple[str, ...]:
    """Returns the optimizer's parameters whose gradient in the replay differs from the loop's."""
    if program.optimizer is None:
        return ()
    names = session.parameter_names()
    held = [p for group in program.optimizer.param_groups for p in group["params"] if p.requires_grad]
    return tuple(names.get(id(p), "?") for p in held if not _agree(real.get(id(p)), p.grad))


def _agree(here: torch.Tensor | None, there: torch.Tensor | None) -> bool:
    """Whether the loop's gradient equals the replay's; of a mean over processes, only non-finite values count."""
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
    """Returns the note that the step is finite when replayed: something other than its calls is the cause."""
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
    """Returns the sentence on a step of several processes that is finite on this one."""
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
    """Returns the finding without its proof: the replay's gradients are not those of the loop."""
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
    """Returns the device type of the training behind a replay; None where no replay was made."""
    device = run.get("device")
    if device is None:
        return None
    return "cuda" if run.get("policy") == "cuda" else str(device).partition(":")[0]


def device_of(program: Program) -> str:
    """Returns the device of a step's model."""
    first = next(program.model.parameters(), None)
    return "cpu" if first is None else str(first.device)


# -- weights that are non-finite before a step whose predecessor was healthy --

_SHOWN = ("lr", "betas", "momentum", "alpha", "eps", "weight_decay")
"""Optimizer settings that a message names."""
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""States of torch's optimizers whose root, plus eps, divides an update."""
HALF_EPS = 1e-4
"""An eps that fp16 holds as a normal number; torch's default of 1e-8 is 0 there."""


@dataclass(frozen=True, slots=True, eq=False)
class LastUpdate:
    """The settings of an optimizer's last update, whose gradients were not seen to be sick."""

    step: int
    optimizer: weakref.ref[torch.optim.Optimizer]
    settings: tuple[Mapping[str, Any], ...]  # by parameter group; a scheduler may have changed them since
    read: bool  # its gradients were read, and were finite

    @classmethod
    def of(cls, attempt: UpdateAttempt, *, read: bool) -> LastUpdate:
        """Returns the record of the update that is about to be made."""
        groups = attempt.optimizer.param_groups
        settings = tuple({key: group[key] for key in _SHOWN if key in group} for group in groups)
        return cls(attempt.step, weakref.ref(attempt.optimizer), settings, read)

    def explained(self, report: Report, parameters: Mapping[str, torch.Tensor]) -> Report:
        """Returns the report; if a weight is non-finite before the step, its finding names this update."""
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
            reasons = list(_reasons(parameter, settings, state))
        if not lost:
            return finding
        kind, why = type(optimizer).__name__, [said for said, _ in reasons]
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
            prescription=_with_eps(max((eps for _, eps in reasons), default=0.0), finding.prescription),
        )

    def _settings_of(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        for group, settings in zip(optimizer.param_groups, self.settings, strict=False):
            if any(one is parameter for one in group["params"]):
                return settings
        return None


def left_at_the_end(
    watch: LoopWatch, lines: StepLines, test: WatchedTest | None
) -> Iterator[tuple[str, Finding | Program, int]]:
    """Yields what the last steps have left, with a sentence and the step; the first that is wrong counts."""
    recorder, step = watch.recorder, lines.turn
    if (lost := recorder.by_hand.lost) is not None:
        where = Where(
            step=step,
            phase="optimizer",
            op=f"aten.{lost.function}",
            tensor=lost.parameter,
            nonfinite=lost.nonfinite,
            source=as_source(lost.line),
        )
        yield "its weights are not finite", hand_update_finding(where, lost.number), step
    left_out = lines.attempted and (test is None or recorder.reads.any)  # the loop may have seen that
    if recorder.backwards and recorder.failed is None and not recorder.is_crowded and not left_out:
        program = recorder.program(None, name="", scaler=None, step=step)
        losses = recorder.losses(None)
        gradients = [p.grad for p in program.model.parameters() if p.grad is not None]
        whole = all(type(gradient) is torch.Tensor for gradient in gradients)  # not in parts, and not fake
        # of scaled gradients alone, a scaler would skip the step
        judged = losses if watch.scalers.last is not None else [*losses, *gradients]
        if gradients and whole and any_nonfinite(judged):
            yield "no optimizer has used its gradients", program, step
    if recorder.used.runs or (test is not None and test.began_finite):
        step = max(step - 1, 0)
        with watch.looking_away():
            found_weight = lost_weight(dict(together(recorder.models.roots).named_parameters()), step)
        if found_weight is not None:
            yield "its weights are not finite", found_weight, step


def lost_weight(parameters: Mapping[str, torch.Tensor], step: int) -> Finding | None:
    """Returns the finding for the first trained, unsharded weight that is non-finite at the end, or None."""
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
    """Returns the finding for a tensor that a loop keeps outside its models and that is no longer finite."""
    own = [(name, p) for model in models for name, p in (*model.named_parameters(), *model.named_buffers())]
    with unseen(), torch.no_grad():
        twin = next((pair for pair in own if _same(lost, *pair)), None)
        twin = twin or next((pair for pair in own if _overflowed(lost.tensor, pair[1])), None)
        amax = None if twin is None or is_nonfinite(twin[1]) else stats_of(twin[1]).amax
        stats = stats_of(lost.tensor)
    return seen_beside(
        lost.name, stats, lost.since, lost.step, None if twin is None or amax is None else (twin[0], amax)
    )


def found_beside(beside: OtherModules, watch: LoopWatch, step: int, *, at_the_end: bool) -> tuple[Finding, int] | None:
    """Check, when due, the tensors that a loop keeps outside its models; returns a finding and its step, or None."""
    if watch.recorder.is_crowded:  # tensors beside one thread's model may be another's
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
    """Whether a copy is infinite exactly where a tensor exceeds fp16; copies in a list have no names to compare."""
    if copy.shape != tensor.shape or copy.device != tensor.device or type(tensor.detach()) is not torch.Tensor:
        return False
    beyond = tensor.detach().abs() >= FP16_OVERFLOW_AT
    return bool(beyond.any()) and bool((copy.detach().isinf() == beyond).all())


def _with_eps(eps: float, made: Prescription | None) -> Prescription | None:
    """Returns the change to this eps, with what was tried beside it; `made` itself where eps is not the reason."""
    if not eps:
        return made
    other = " (or fp32 parameters)" if eps == HALF_EPS else ""
    words = f"give the optimizer eps={f'{eps:.0e}'.replace('e-0', 'e-')}{other}"
    tried = () if made is None or made.status == "not_run" else (made,)
    reason = "the update was made before the step that is replayed"
    return Prescription(
        kind="optimizer", value={"eps": eps}, status="not_run", detail=words, reason=reason, alternatives=tried
    )


def _reasons(
    parameter: torch.Tensor, settings: Mapping[str, Any], state: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """Yields what makes an update of finite gradients non-finite, and the eps that avoids it (0.0: none does)."""
    for key, value in settings.items():
        if isinstance(value, torch.Tensor | float) and not math.isfinite(value):
            yield f"{key} is {_text(value)}", 0.0
    lost = parameter.isfinite().logical_not()
    for key, held in state.items():
        if not isinstance(held, torch.Tensor) or held.shape != parameter.shape or not held.is_floating_point():
            continue
        dtype = str(held.dtype).removeprefix("torch.")
        if count := int(held.isfinite().logical_not().sum()):
            yield f"its {key}, in {dtype}, holds {count} non-finite values", 0.0
        eps = settings.get("eps")
        if key in _SQUARES and isinstance(eps, float) and float(torch.tensor(eps, dtype=held.dtype)) == 0.0:
            zeros = int(((held == 0) & lost).sum())
            small = "eps is 0" if eps == 0.0 else f"eps={eps:g} is 0 in {dtype}"
            if zeros:
                enough = HALF_EPS if held.dtype is torch.float16 else 1e-8
                yield f"its {key} is 0 in {zeros} places where the weights are lost, and {small}", enough


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return (
        f"{float(value):g}" if isinstance(value, torch.Tensor | float) and not isinstance(value, bool) else str(value)
    )
