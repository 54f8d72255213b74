"""`Doctor`: stands by somebody's training: takes its numbers, keeps its log, and looks at the first sick step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch

from ampdoctor.diagnosis.replay.scaler_misuse import stepped_again_finding
from ampdoctor.diagnosis.replay.scaler_verdict import NEVER_UPDATED
from ampdoctor.errors import EXIT_INTERRUPTED, AmpdoctorError, StoppedError
from ampdoctor.evidence.codec import to_plain
from ampdoctor.evidence.report import ErrorNote, Finding, Report
from ampdoctor.evidence.report.target import Kept, Run
from ampdoctor.evidence.run_log.lines import AlertLine, EndLine, LookLine, RunLine
from ampdoctor.evidence.run_log.text import text_of
from ampdoctor.live.blind_steps import SKIPPED, BlindSteps, LateNews
from ampdoctor.live.guard import Guard
from ampdoctor.live.intake.intake import Intake
from ampdoctor.live.log.facts import hardware, software
from ampdoctor.live.log.run_log import RunLog
from ampdoctor.live.loop_watch import Again, Attempt, LoopWatch
from ampdoctor.live.numbers.beside import Beside
from ampdoctor.live.numbers.clipping import Clip, hearing
from ampdoctor.live.numbers.readings import StepReading
from ampdoctor.live.numbers.step_numbers import StepNumbers
from ampdoctor.live.protocol import Protocol, past_its_scaler, unguarded
from ampdoctor.live.recording.construction import Constructions
from ampdoctor.live.recording.kept_updates import KeptUpdates
from ampdoctor.live.recording.naming import together
from ampdoctor.live.recording.trainers import SEVERAL
from ampdoctor.live.step_lines import StepLines
from ampdoctor.loop.hooks.gradient_hooks import on_gradient
from ampdoctor.loop.nested import iter_tensors
from ampdoctor.loop.raised import causes_of, describe
from ampdoctor.loop.recorded.leading import Leading
from ampdoctor.loop.recorded.program import Program
from ampdoctor.loop.torch_internals import unseen
from ampdoctor.precision import policy_in_force
from ampdoctor.probes.ops.source import as_source
from ampdoctor.replay.bundles.writing import Written, write_bundle
from ampdoctor.replay.recorded.inner_autocast import with_inner_autocast
from ampdoctor.workflows.alerting import Alerting, OnAlert, steps_before
from ampdoctor.workflows.exporting import export_while_it_runs
from ampdoctor.workflows.last_update import LastUpdate, lost_beside, lost_weight
from ampdoctor.workflows.looking import MOST_BACKOFFS, Look, at_its_begin, look, not_looked_at
from ampdoctor.workflows.opening.watch_request import WatchRequest

_AFTER_SICK = 3
"""Steps whose tensors are looked at after a firing."""
_LAST_LINES = 256
"""Step lines that a bundle holds."""
_TOO_LATE = (
    "step {step} was sick ({what}), which a device tells only after the update: the weights may be poisoned, and "
    "nothing was run again"
)
_WAYS_OUT = (
    ". Ways out: guard with a fused optimizer, which holds such an update back; look=sync, at one synchronisation a "
    "step; or the last good checkpoint, {from_there}"
)
_RECORD = (
    "where record_batches=K has kept the batches of the last K updates: they are replayed from it up to the sick step"
)
_HELD_BACK = (
    "step {step} was sick ({what}) and its update was held back on the device: the weights are intact, and the next "
    "sick one within {steps} steps is looked at, at one synchronisation a step until then"
)

_standing: list[tuple[int, Doctor]] = []  # with the process that it stands in


def standing() -> Doctor | None:
    """Returns the doctor that stands by this process's training; None where none does."""
    return next((doctor for process, doctor in _standing if process == os.getpid()), None)


P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[Doctor, P], None]) -> Callable[Concatenate[Doctor, P], None]:
    """What fails inside is ours, and is said once; the training goes on unwatched."""

    @functools.wraps(method)
    def guarded(self: Doctor, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self._failed = True
            self._watch.recorder.fail(error)
            self._say(f"the training is watched no more: {describe(error)}")

    return guarded  # type: ignore[return-value]  # a method stays one


class Doctor:
    """Stands by the loops of this process for as long as `attending` lasts.

    Args:
        request: What to watch, and what to do where it falls sick.
        tell: Told the diagnosis, at the step that is sick.
        say: Told sentences for the user, a line each.
        on_alert: Told each alert, on a thread of its own.

    Attributes:
        report: The diagnosis of the first sick step; None as long as none is.
        folder: Of the log and the bundles.
    """

    def __init__(
        self,
        request: WatchRequest,
        tell: Callable[[Report], None],
        say: Callable[[str], None],
        on_alert: OnAlert | None = None,
    ) -> None:
        self.report: Report | None = None
        self.folder = request.health
        self._request, self._tell, self._hear = request, tell, say
        self._watch = LoopWatch(self)
        self._constructions = Constructions()
        name, rank, restarts = Path(request.health).name, _number("RANK", 0), _number("TORCHELASTIC_RESTART_COUNT", 0)
        self._log = RunLog(
            request.health,
            RunLine(name=name, detail_every=request.every),
            rank=rank,
            world_size=max(_number("WORLD_SIZE", 1), 1),
            restarts=restarts,
            say=self._say,
        )
        before = steps_before(request.health, rank=rank, restarts=restarts)
        self._alerting = Alerting(self._log.write, self._say, request.thresholds, on_alert, before)
        if rank == 0:  # the others' numbers are the same, or parts of these
            export_while_it_runs(self._log, request.export)
            if self._log.failed is None:  # said already; there is nothing to judge
                self._log.listen(self._alerting.hear, name="the judge of the run over time", answers=True)
        self._intake = Intake(max(_number("WORLD_SIZE", 1), 1))
        self._lines = StepLines(self._log, self._intake)
        self._numbers = StepNumbers(self._read, self._lines.detail, every=request.every)
        self._beside = Beside(request.every)
        self._settling: dict[str, int] = {}  # by optimizer: back-offs that are known to come
        self._last: dict[str, LastUpdate] = {}  # by optimizer
        self._guard = Guard()
        self._blind = BlindSteps()
        self._updates = KeptUpdates(request.record_batches, request.bundle_max)
        self._late: LateNews | None = None  # what has to be said of a step that is over
        self._attentive = 0  # attempts that are still read before their update, on any device
        self._failed = False
        self._described = False
        self._protocol = Protocol(self._watch)
        self._refused: tuple[tuple[int, str], Finding, str] | None = None  # the last call that a scaler has refused
        self._said: set[str] = set()

    @contextmanager
    def attending(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        scalers: Iterable[Any] = (),
    ) -> Iterator[None]:
        """Hooks are in place inside, and gone afterwards whatever happens.

        Args:
            model: Known beforehand; others are met when they are first called.
            optimizers: Known beforehand; others are met at their first step.
            scalers: Known beforehand; torch's own need not be.
        """
        with ExitStack() as stack:
            entry = os.getpid(), self
            _standing.append(entry)
            stack.callback(_standing.remove, entry)
            stack.callback(self._guard.release)
            stack.callback(self._updates.clear)
            stack.callback(self._log.close)
            self._log.describe(**software(), script={"command": list(self._request.command)})
            stack.enter_context(self._constructions.recording())
            stack.enter_context(self._protocol.half_made.recording())
            stack.enter_context(self._watch.watching(*scalers))
            self._watch.meet(model, optimizers)
            stack.enter_context(self._numbers.watching())
            stack.enter_context(hearing(self._clipped))
            stack.enter_context(self._intake.watching())
            self._watch.recorder.listener = self
            self._watch.recorder.cleared = self._numbers.cleared
            self._numbers.begin_step(0)
            yield

    def ended(self, error: BaseException | None) -> None:
        """The training has ended, with this error or in order; one that its own code ended may be sick.

        Args:
            error: What ended it; `SystemExit` too.
        """
        self._ended_by(error)
        self._look_at_the_weights()
        self._look_beside(at_the_end=True)
        if not self._failed:
            self._tell_what_ended()
        if not self._lines.attempted and self._watch.recorder.backwards and self.report is None:
            self._say("no optimizer of torch's was stepped: there are backwards, and no steps to log or to look at")
        reason, lines = "" if error is None else type(error).__name__, self._lines
        self._log.write(EndLine(exit_code=_code_of(error), steps=lines.attempted, accepted=lines.taken, reason=reason))

    # -- what the loop does ------------------------------------------------------------------------------------------

    @_harmless
    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """As in `LoopListener`."""
        self._numbers.unscaling([p for group in optimizer.param_groups for p in group["params"]])

    @_harmless
    def about_to_step(self, attempt: Attempt, losses: list[torch.Tensor]) -> None:
        """As in `LoopListener`."""
        norm = self._measured(attempt, losses)
        self._judge_calls(attempt, losses)
        held = self._request.guard and attempt.scaler is None and self._guard.hold(attempt.optimizer, losses, norm)
        if self._is_readable(attempt):
            self._updates.clear()
            sick = self._sick_of(losses, norm)
            if sick is not None:
                self._fall_sick(attempt, sick, settles=_steps_either_way(attempt))
            elif self.report is None:
                self._last[attempt.name] = LastUpdate.of(attempt)
        elif self.report is None:
            self._blind.add(attempt, held=held)
            self._keep(attempt)
        self._attentive = max(self._attentive - 1, 0)

    @_harmless
    def held_back(self, attempt: Attempt, losses: list[torch.Tensor]) -> None:
        """As in `LoopListener`."""
        self._measured(attempt, losses)
        self._judge_calls(attempt, losses)
        if self._protocol.is_never_updated(attempt) and self.report is None:
            program = with_inner_autocast(self._watch.program(attempt))
            self._examine(program, SKIPPED, name=attempt.name, settles=False, advice=NEVER_UPDATED)
        if self.report is None and self._request.look != "off":
            self._fall_sick(attempt, SKIPPED, settles=True)

    @_harmless
    def attempted(self, attempt: Attempt, *, skipped: bool | None) -> None:
        """As in `LoopListener`."""
        self._guard.release()
        if skipped is False:
            self._settling.pop(attempt.name, None)
            self._protocol.taken(attempt)
        else:
            self._last.pop(attempt.name, None)
        self._lines.ended(attempt, skipped=skipped)
        self._numbers.stepped(attempt.name, skipped=skipped)
        alert = self._alerting.taken()
        if alert is not None:
            self._numbers.look(alert, _AFTER_SICK)
        self._numbers.begin_step(self._lines.turn)
        self._tell_what_ended()
        if not self._described:
            self._describe(attempt)
        self._tell_late()
        self._look_beside()

    @_harmless
    def stepping_again(self, again: Again) -> None:
        """As in `LoopListener`."""
        source = as_source(again.line)
        finding = stepped_again_finding(again.step, source, held_back=again.held_back, scaled=again.scaled)
        self._is_misused(finding, again.name, key=f"again {again.name} {again.held_back}")

    @_harmless
    def refused(self, method: str, optimizer: Any, error: Exception) -> None:
        """As in `LoopListener`: whoever catches the error goes on, and then it is no failure."""
        finding = self._protocol.refused(method, optimizer, error, self._lines.turn)
        # the error itself would keep the loop's frames alive
        self._refused = (id(error), describe(error)), finding, self._watch.name_of(optimizer)

    def _keep(self, attempt: Attempt) -> None:
        """Keep an update behind itself, where that is asked for; without one nothing leads up to the next."""
        request, recorder = self._request, self._watch.recorder
        if not request.record_batches or not request.bundle or request.look == "off":
            return
        if recorder.is_crowded or recorder.failed is not None:
            self._updates.clear()
        else:
            self._updates.keep(self._watch.keepable(attempt))

    def _measured(self, attempt: Attempt, losses: list[torch.Tensor]) -> torch.Tensor | None:
        for loss in losses:
            self._numbers.loss(loss)
        scaler, optimizer = attempt.scaler, attempt.optimizer
        fused = getattr(optimizer, "grad_scale", None) is not None
        names = self._watch.recorder.names()
        groups = [
            [(names.get(id(p), f"{attempt.name}.group{g}.param{i}"), p) for i, p in enumerate(group["params"])]
            for g, group in enumerate(optimizer.param_groups)
        ]
        self._lines.begins(attempt, groups)
        return self._numbers.about_to_step(
            attempt.name,
            list(chain.from_iterable(groups)),
            number=attempt.step,
            scale=getattr(scaler, "_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
            growth_tracker=getattr(scaler, "_growth_tracker", None),
            unscaled=not fused,
        )

    def _is_readable(self, attempt: Attempt) -> bool:
        """Whether a number can be read without waiting for a device, or that was asked for."""
        first = next((p for group in attempt.optimizer.param_groups for p in group["params"]), None)
        if first is None or self.report is not None:
            return False
        # where a scaler has waited, its gradients are finite: to read a loss as well would wait once more
        return first.device.type == "cpu" or self._request.look == "sync" or self._attentive > 0

    def _sick_of(self, losses: list[torch.Tensor], norm: torch.Tensor | None) -> str | None:
        with unseen():
            if any(not bool(loss.isfinite().all()) for loss in losses):
                return "its loss is not finite"
            return None if norm is None or bool(norm.isfinite()) else "its gradients are not finite"

    def _clipped(self, clip: Clip) -> None:
        self._protocol.clipping(clip)
        if clip.max_norm is not None:
            self._watch.recorder.clipped(clip.gradients, clip.max_norm, clip.norm_type or 2.0)

    @_harmless
    def entering(self, model: torch.nn.Module) -> None:
        """As in `CallListener`."""
        if self._numbers.looking:
            self._numbers.entering(self._watch.recorder.name_of(model) or "", model)

    def left(self) -> None:
        """As in `CallListener`."""
        self._numbers.left()

    @_harmless
    def returned(self, model: torch.nn.Module, name: str, call: int, *, given: tuple[Any, Any], output: Any) -> None:
        """As in `CallListener`."""
        batch = self._intake.called(model, *given, backwards=self._watch.recorder.backwards)
        if batch is not None:
            self._numbers.batch(batch)
        if self._numbers.looking:
            self._numbers.returned(name, model, output)
            for path, tensor in iter_tensors(output):
                if tensor.requires_grad and tensor.is_floating_point():
                    on_gradient(tensor, self._gradient_of(name, call, f"output.{path}" if path else "output"))

    def _gradient_of(self, model: str, call: int, part: str) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            self._numbers.incoming(model, gradient, part=part, call=call)

        return arrived

    # -- the first sick step -----------------------------------------------------------------------------------------

    def _fall_sick(self, attempt: Attempt, what: str, *, settles: bool) -> None:
        left = self._settling.get(attempt.name, 0)
        if settles and left > 0:
            self._settling[attempt.name] = left - 1
            return
        program = with_inner_autocast(self._watch.program(attempt))
        scaler = past_its_scaler(self._watch, attempt)
        if scaler is not None and self._request.look != "off" and not self._watch.recorder.is_crowded:
            program = replace(program, scaler=scaler)
            with self._watch.looking_away():
                if self._look(program, settles=True).report is None:
                    self._is_misused(unguarded(attempt, scaler), attempt.name, key="unguarded")
                    return
        self._examine(program, what, name=attempt.name, settles=settles)

    @_harmless
    def _ended_by(self, error: BaseException | None) -> None:
        self._tell_what_was_refused(error)
        asked = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not asked and not isinstance(error, KeyboardInterrupt) and self.report is None:
            self._look_at_the_end()

    def _tell_what_was_refused(self, error: BaseException | None) -> None:
        """Say why a scaler has refused a call, where that has ended the training."""
        refused, self._refused = self._refused, None
        if refused is not None and any((id(one), describe(one)) == refused[0] for one in causes_of(error)):
            self._is_misused(*refused[1:], key="refused")

    @_harmless
    def _look_at_the_weights(self) -> None:
        """Look at the weights that the training leaves: nothing has come after its last update that would show them."""
        recorder = self._watch.recorder
        if self.report is not None or self._request.look == "off" or not recorder.used.any_backward:
            return
        step = max(self._lines.turn - 1, 0)
        with self._watch.looking_away():
            parameters = dict(together(recorder.models.roots).named_parameters())
            finding = lost_weight(parameters, step)
        if finding is not None:
            self._lost(finding, step, "its weights are not finite")

    @_harmless
    def _look_beside(self, *, at_the_end: bool = False) -> None:
        """Look at what the loop keeps beside its models: an average, a teacher, a copy that a validation casts."""
        if self.report is not None or self._request.look == "off":
            return
        step, models = max(self._lines.turn - 1, 0), [root for _, root in self._watch.recorder.models.roots]
        if not at_the_end and self._beside.wants(step):
            with self._watch.looking_away():
                self._beside.look(step, models)
        lost = self._beside.finish(step) if at_the_end else self._beside.arrived()
        if lost is not None:
            self._lost(lost_beside(lost, models), lost.step, "what it keeps beside the model is not finite")

    def _lost(self, finding: Finding, step: int, what: str) -> None:
        run = Run(step=step, kept=self._kept(None))
        report = Report(command="run", target={}, run=run, verdict="sick", findings=(finding,))
        parameters = dict(together(self._watch.recorder.models.roots).named_parameters())
        self._diagnosed(self._explained(report, parameters), what, bundle=None, seconds=None)

    def _look_at_the_end(self) -> None:
        """Look at the step that was running when the loop's own code ended it, if something of it is not finite."""
        recorder = self._watch.recorder
        with unseen():
            sick = any(not bool(loss.isfinite().all()) for loss in recorder.losses(None))
        root = None if sick else recorder.last_value()
        if sick or root is not None:
            step = self._lines.turn
            program = recorder.program(None, name="", scaler=None, step=step, root=root)
            self._examine(with_inner_autocast(program), "its code has ended it", name="", settles=False)

    def _examine(self, program: Program, what: str, *, name: str, settles: bool, advice: str = "") -> None:
        request = self._request
        if request.look == "off":
            return
        losses = self._watch.recorder.losses(program.optimizer)
        healthy = self._sick_of(losses, None) is None
        hopeful = settles and name not in self._settling and healthy
        if hopeful and program.optimizer is None:  # it cannot be asked where the scaler would let it step
            self._hope(program, name)
            return
        crowded = self._watch.recorder.is_crowded
        if crowded:
            seen = not_looked_at(program, what, SEVERAL)
        else:
            with self._watch.looking_away():
                seen = self._look(program, settles=settles)
        if seen.report is not None:
            report = self._explained(seen.report, dict(program.model.named_parameters()))
            seen = replace(seen, report=_advised(report, advice) if advice else report)
        self._attentive = 0
        if seen.failed and hopeful:
            self._hope(program, name)
            return
        if seen.report is None:
            self._settling[name] = max(seen.backoffs - 1, 0)
            return
        self._numbers.look(what, _AFTER_SICK)
        if crowded:
            self._told(program, seen, what, None)
            return
        with self._watch.looking_away(), at_its_begin(program):
            bundle = self._bundled(program, seen.report) if request.bundle and program.calls_models else None
            if seen.failed and bundle is not None and bundle.replays:
                elsewhere = f"ampdoctor bisect-nan {bundle.folder}"
                self._say(f"step {program.step} could not be run again here; elsewhere: {elsewhere}")
            self._told(program, seen, what, bundle)

    def _look(self, program: Program, *, settles: bool) -> Look:
        return look(
            program,
            policy=policy_in_force(),
            device=_device_of(program),
            thresholds=self._request.thresholds,
            settles=settles,
        )

    def _judge_calls(self, attempt: Attempt, losses: list[torch.Tensor]) -> None:
        if self._is_readable(attempt) and self._sick_of(losses, None) is not None:
            return  # what is wrong begins before any scale
        finding = self._protocol.broken_by(attempt)
        if finding is not None:
            self._is_misused(finding, attempt.name, key=f"{finding.where.op} {attempt.name}")

    def _is_misused(self, finding: Finding, optimizer: str, *, key: str) -> None:
        """The loop's calls break the scaler's protocol, which no look has to show: told once for each `key`."""
        if key in self._said:
            return
        self._said.add(key)
        if self.report is not None or finding.severity != "error":
            self._log.write(AlertLine(step=finding.where.step or 0, finding=finding))
            self._say(f"{finding.severity} {finding.code}: {finding.message}")
            return
        run = {**self._when(finding.where.step or 0, optimizer), "kept": self._kept(None)}
        report = Report(command="run", target={}, run=run, verdict="sick", findings=(finding,))
        self._diagnosed(report, "its calls break the scaler's protocol", bundle=None, seconds=None)

    def _explained(self, report: Report, parameters: Mapping[str, torch.Tensor]) -> Report:
        for update in self._last.values():
            report = update.explained(report, parameters)
        return report

    def _hope(self, program: Program, name: str) -> None:
        self._say(f"step {program.step} was skipped by its scaler, and could not be run again: that may be health")
        self._settling[name] = MOST_BACKOFFS

    def _bundled(self, program: Program, report: Report, leading: Leading | None = None) -> Written | None:
        folder = Path(self._request.health) / f"bundle-{program.step}"
        try:
            written = write_bundle(
                folder,
                program,
                made=self._constructions.of,
                rank=_number("RANK", 0),
                world=max(_number("WORLD_SIZE", 1), 1),
                policy="cuda" if policy_in_force() == "cuda" else None,
                leading=leading,
                diagnosis=to_plain(report),
                log=[text_of(line) for line in self._log.last(_LAST_LINES)],
                max_bytes=self._request.bundle_max,
            )
        except Exception as error:  # noqa: BLE001 - the diagnosis stands without it
            why = str(error) if isinstance(error, AmpdoctorError) else describe(error)
            self._say(f"no bundle of step {program.step} was kept: {why}")
            return None
        if not written.replays:
            self._say(f"the bundle of step {program.step} holds what cannot be written down, and is no replay")
        for sentence in written.left_out:
            self._say(f"the bundle of step {program.step}: {sentence}")
        return written

    def _told(self, program: Program, seen: Look, what: str, bundle: Written | None) -> None:
        report = seen.report
        if report is None:
            return
        run = {**report.run, **self._when(program.step, program.optimizer_name), "kept": self._kept(bundle)}
        self._diagnosed(replace(report, run=run), what, bundle=bundle, seconds=seen.seconds)

    def _diagnosed(self, report: Report, what: str, *, bundle: Written | None, seconds: float | None) -> None:
        """Log and tell a diagnosis, whose `run` says of which step and what was kept of it."""
        self._updates.clear()
        target = {"factory": self._request.script, "arguments": list(self._request.arguments)}
        self.report = replace(report, target=target)
        line = LookLine(
            step=report.run["step"],
            verdict=report.verdict,
            findings=report.findings,
            bundle=None if bundle is None else bundle.folder.name,
            model=report.run.get("kept", {}).get("model"),
            reason=what,
            seconds=seconds,
            device=_trained_on(report.run),
            precision=report.run.get("precision"),
            autocast=report.run.get("autocast"),
        )
        self._log.write(line)
        try:
            self._tell(self.report)
        except Exception as error:  # noqa: BLE001 - the log has it, and what was asked for is done all the same
            self._say(f"the diagnosis of step {line.step} could not be told: {describe(error)}; it is in {self.folder}")
        if self._request.on_sick == "stop":
            self._log.flush()
            raise StoppedError

    def _when(self, step: int, optimizer: str) -> Run:
        whose = self._watch.whose(optimizer)
        return {"step": step} if whose is None else {"step": step, "optimizer": whose}

    def _kept(self, bundle: Written | None) -> Kept:
        health = Path(self._request.named or self._request.health)
        kept = Kept(health=str(health))
        if bundle is not None and bundle.replays:
            kept["bundle"] = str(health / bundle.folder.name)
            if bundle.code is not None:
                kept["model"] = bundle.code
            if bundle.from_checkpoint:
                kept["from_checkpoint"] = True
        return kept

    # -- numbers that arrive after the update ------------------------------------------------------------------------

    def _read(self, reading: StepReading) -> None:
        self._lines.step(reading)
        news = self._blind.arrived(reading)
        if news is None:
            self._updates.was_sound(reading.optimizer, reading.step, reading.loss)
        elif self._late is None:
            self._late = news

    def _tell_late(self) -> None:
        """Say of a step that is over that it was sick, once."""
        news, self._late = self._late, None
        if news is None or self.report is not None or self._request.look == "off":
            return
        if news.weights == "intact":
            if not self._attentive:
                self._attentive = self._request.every
                if news.what != SKIPPED:
                    self._say(_HELD_BACK.format(step=news.step, what=news.what, steps=self._attentive))
            return
        self._numbers.look(news.what, _AFTER_SICK)
        note = ErrorNote(
            what=f"step {news.step}", kind="too_late", message=_TOO_LATE.format(step=news.step, what=news.what)
        )
        report = Report(command="run", target={}, verdict="sick", complete=False, errors=(note,))
        with self._watch.looking_away():
            bundle = self._bundled_late(news, report)
        kept = self._kept(bundle)
        note = replace(note, message=note.message + _WAYS_OUT.format(from_there=self._from_there(kept)))
        report = replace(report, errors=(note,), run={**self._when(news.step, news.optimizer), "kept": kept})
        self._diagnosed(report, news.what, bundle=bundle, seconds=None)

    def _from_there(self, kept: Kept) -> str:
        """How a sick step is come to again from a checkpoint."""
        if "bundle" in kept:
            model = f" --model {kept['model']}" if "model" in kept else ""
            return f"from which its bundle is replayed: ampdoctor bisect-nan {kept['bundle']} --checkpoint LAST{model}"
        return "from which the training is run again" if self._request.record_batches else _RECORD

    def _bundled_late(self, news: LateNews, report: Report) -> Written | None:
        """The bundle of a step that has changed its weights, with the kept updates that lead up to it."""
        led = self._updates.leading_to(news.optimizer, news.step, self._watch.recorder.kept)
        return None if led is None else self._bundled(led[0], report, led[1])

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _say(self, sentence: str) -> None:
        """Say it where somebody can hear: a closed stream, or a listener that fails, is no matter of the training."""
        with suppress(Exception):
            self._hear(sentence)

    def _describe(self, attempt: Attempt) -> None:
        self._described = True
        roots = self._watch.recorder.models.roots
        models = [
            {
                "name": name,
                "class": f"{type(root).__module__}.{type(root).__qualname__}",
                "parameters": sum(p.numel() for p in root.parameters()),
                "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in root.parameters()}),
            }
            for name, root in roots
        ]
        self._log.describe(**hardware(), models=models, optimizer=type(attempt.optimizer).__name__)

    def _tell_what_ended(self) -> None:
        """What is not watched any more is said once."""
        ended = {
            "the steps are recorded no more, and none can be run again": self._watch.recorder.failed,
            "the steps' numbers are taken no more": self._numbers.failed,
        }
        sentences = [f"{what}: {why}" for what, why in ended.items() if why is not None]
        for sentence in (*sentences, *self._watch.recorder.models.unseen):
            self._say_once(sentence)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


def _advised(report: Report, advice: str) -> Report:
    """A report of one step, with what more steps than that have shown."""
    told = tuple(replace(one, severity="error", help=f"{advice} {one.help}") for one in report.findings)
    return replace(report, findings=told, verdict="sick" if told else report.verdict)


def _code_of(error: BaseException | None) -> int:
    """With what Python ends a process that nothing but this has ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


def _steps_either_way(attempt: Attempt) -> bool:
    """Whether a scaler calls the optimizer whatever it has found: a fused one skips by itself, on its device."""
    return attempt.scaler is not None and getattr(attempt.optimizer, "grad_scale", None) is not None


def _number(variable: str, otherwise: int) -> int:
    """A number that a launcher has put into the environment."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise


def _trained_on(run: Mapping[str, Any]) -> str | None:
    """The device type of the training behind a replay; None where none was made."""
    device = run.get("device")
    if device is None:
        return None
    return "cuda" if run.get("policy") == "cuda" else str(device).partition(":")[0]


def _device_of(program: Program) -> str:
    first = next(program.model.parameters(), None)
    return "cpu" if first is None else str(first.device)
