"""`TrainingWatcher` watches a training: it takes its numbers, keeps its log, and diagnoses the first sick step."""

from __future__ import annotations

import cmath
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ampdoctor.diagnosis.health.run_rules import NO_STEP_TAKEN as NO_STEP
from ampdoctor.diagnosis.replay.scaler import NEVER_UPDATED, stepped_again_finding
from ampdoctor.errors import StoppedError
from ampdoctor.evidence.log_records import AlertLine, EndLine, LookLine
from ampdoctor.evidence.log_text import text_of
from ampdoctor.evidence.report import ErrorNote, Finding, Report
from ampdoctor.evidence.report_target import Kept, Run
from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.callbacks import Clip, is_enabled, on_gradient
from ampdoctor.hooks.interfaces import OWN_TIME, causes_of, code_of, describe, is_out_of_memory
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.hooks.program import PriorSteps, Program
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.data_stats import DataStats
from ampdoctor.live.log.facts import RankInJob, hardware, models_of, software
from ampdoctor.live.log.step_lines import StepLines
from ampdoctor.live.loop_watch import LoopWatch, UpdateAttempt, harmless
from ampdoctor.live.numbers.other_modules import OtherModules
from ampdoctor.live.numbers.readings import StepReading
from ampdoctor.live.numbers.step_numbers import StepNumbers
from ampdoctor.live.recording.journal import named_groups, together
from ampdoctor.live.recording.models import SEVERAL, Constructions
from ampdoctor.live.recording.programs import KeptUpdates
from ampdoctor.live.scaler_protocol import Protocol, past_its_scaler, unguarded
from ampdoctor.live.unread_steps import (
    GRADIENTS,
    HELD_BACK,
    LOSS,
    SKIPPED,
    UNREAD,
    LateFailure,
    SkipNonFiniteUpdate,
    UnreadSteps,
    too_late,
    ways_out,
)
from ampdoctor.precision.cuda_autocast import policy_in_force
from ampdoctor.probes.user_code import as_source, own_line
from ampdoctor.replay.bundles.write import Written
from ampdoctor.replay.recorded_step import lies_in_parts, with_inner_autocast
from ampdoctor.workflows.diagnose_step import (
    IN_PARTS,
    MOST_BACKOFFS,
    LastUpdate,
    StepDiagnosis,
    all_gradients_nan,
    at_its_begin,
    bundled,
    device_of,
    finite_here,
    found_beside,
    kept_of,
    left_at_the_end,
    look,
    not_looked_at,
    trained_on,
)
from ampdoctor.workflows.log_listeners import LogOfRank, OnAlert, Tally
from ampdoctor.workflows.requests import WatchRequest
from ampdoctor.workflows.watched_test import WatchedTest

_AFTER_SICK = 3
"""Number of steps after an alarm whose tensors are measured closely."""
_LEFT_OUT = "step {step}: a batch was left out by the loop's own check, and its loss was not finite"
_LAST_LINES = 256
"""Number of step lines in a bundle."""
_standing: list[tuple[int, TrainingWatcher]] = []  # with the id of its process


def standing() -> TrainingWatcher | None:
    """Returns the doctor that watches this process's training, or None."""
    return next((doctor for process, doctor in _standing if process == os.getpid()), None)


class TrainingWatcher:
    """Watches the loops of this process while `attending` lasts; `tell` gets the diagnosis, `say` sentences."""

    def __init__(
        self,
        request: WatchRequest,
        tell: Callable[[Report], None],
        say: Callable[[str], None],
        on_alert: OnAlert | None = None,
    ) -> None:
        self.report: Report | None = None
        self.folder = request.health
        self.speaks = True
        self._request, self._tell, self._on_sentence = request, tell, say
        self._watch = LoopWatch(self)
        self._constructions = Constructions()
        self._rank = LogOfRank(request, self._say, on_alert)
        self._log = self._rank.log
        self._intake = DataStats(self._rank.place.world)
        self._lines = StepLines(self._log, self._intake)
        self._numbers = StepNumbers(self._read, self._lines.detail, every=0 if request.test else request.every)
        self._beside = OtherModules(request.every)
        self._settling: dict[str, int] = {}  # by optimizer: back-offs that are still expected
        self._last: dict[str, LastUpdate] = {}  # by optimizer
        self._guard = SkipNonFiniteUpdate()
        self._blind = UnreadSteps()
        self._updates = KeptUpdates(request.record_batches, request.bundle_max)
        self._late: LateFailure | None = None  # news of a step that is over
        self._attentive = 0  # attempts that are still read before their update, on any device
        self.broken = self._over = False
        self.failure: str | None = None
        self.skipped = 0
        self._lost = 0  # readings
        self._described = request.test  # nobody reads a test's log: neither facts nor single tensors are taken for it
        self._protocol = Protocol(self._watch)
        self._refused: tuple[tuple[int, str], Finding, str] | None = None  # the last call that a scaler has refused
        self._said: set[str] = set()
        self._test: WatchedTest | None = None
        self._tally = Tally(incomplete=request.look == "off")

    @property
    def trained(self) -> bool:
        """Whether a backward or an optimizer's step has been seen."""
        return self._watch.recorder.used.runs > 0 or bool(self._lines.attempted)

    @contextmanager
    def attending(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        scalers: Iterable[Any] = (),
    ) -> Iterator[None]:
        """Install the hooks, and remove them afterwards whatever happens; scalers of other classes need to be given."""
        with ExitStack() as stack:
            entry = os.getpid(), self
            _standing.append(entry)
            stack.callback(_standing.remove, entry)
            stack.callback(self._guard.release)
            stack.callback(self._updates.clear)
            stack.callback(self._log.close)
            if not self._described:
                self._log.describe(**software(), script={"command": list(self._request.command)})
            stack.enter_context(self._constructions.recording())
            stack.enter_context(self._protocol.half_made.recording())
            stack.enter_context(self._watch.watching(*scalers))
            if self._request.test:
                self._test = WatchedTest(model)
                self._watch.recorder.follows_reads = self._watch.recorder.models.always = True
            self.meet(model, optimizers)
            stack.enter_context(self._numbers.watching(self._clipped))
            stack.enter_context(self._intake.wait.watching())
            self._watch.recorder.listener = self
            self._watch.recorder.cleared = self._numbers.cleared
            self._numbers.begin_step(0)
            yield

    @property
    def place(self) -> RankInJob:
        """This process among the others, as far as it is known by now."""
        return self._rank.place

    def meet(self, model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Register parts of the loop before the loop uses them."""
        self._watch.meet(model, optimizers)

    def ended(self, error: BaseException | None) -> None:
        """End the watch: the training was ended by `error` (`SystemExit` too), or in order; it may be sick."""
        self._over = True  # the caller gets the error that ended the training
        self._rank.take_place(self._intake)
        self._ended_by(error)
        self._look_at_what_is_left()
        self._look_beside(at_the_end=True)
        self._look_at_the_count()
        if not self.broken:
            self._tell_what_ended()
        if self._lost:
            self._say(f"the numbers of {self._lost} of {self._lines.attempted} steps were lost; none of them is judged")
        if not self._lines.attempted and self._watch.recorder.backwards and self.report is None:
            self._say("no optimizer of torch's was stepped: there are backwards, and no steps to log or to look at")
        scaler = self._watch.scalers.last
        self._tally.unscaled = self._numbers.in_fp16 and (scaler is None or not is_enabled(scaler))
        self._tally.ended(code_of(error))
        interrupted = self._rank.finish_scans(error)
        reason, lines = "" if error is None else type(error).__name__, self._lines
        self._log.write(EndLine(exit_code=code_of(error), steps=lines.attempted, accepted=lines.taken, reason=reason))
        if interrupted is not None:
            raise interrupted

    def summary(self) -> str | None:
        """Returns what was seen, in a sentence, once the log is closed; None where there was no step."""
        said = self._tally.said(self._lines, self.report, self._rank.alerting, self._request, lost=self._numbers.lost)
        return None if said is None else said + self._rank.resume_from()

    # -- what the loop does --

    @harmless
    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a scaler divides an optimizer's gradients by its scale."""
        self._numbers.unscaling(list(parameters_of(optimizer)))

    @harmless
    def about_to_step(self, attempt: UpdateAttempt, losses: list[torch.Tensor]) -> None:
        """Called before an update; the weights are unchanged."""
        self._rank.take_place(self._intake)
        self._look_at_what_was_left_out()
        norm = self._measured(attempt, losses)
        readable = self._is_readable(attempt)
        sick = self._sick_of(losses, norm) if readable else None
        self._judge_calls(attempt, sick if attempt.unscaled_by is not None or sick == LOSS else None)
        held = self._request.guard and attempt.scaler is None and self._guard.hold(attempt.optimizer, losses, norm)
        if held:
            self._numbers.guarded(attempt.name, attempt.optimizer.found_inf)  # type: ignore[attr-defined]  # put there
        if readable and self.report is None:
            self._updates.clear()
            if sick is not None:
                self._fall_sick(attempt, sick, settles=attempt.is_called_either_way)
            else:
                self._last[attempt.name] = LastUpdate.of(attempt, read=norm is not None)
                if self._test is not None:
                    self._test.about_to_step(attempt.optimizer)
        elif self.report is None:
            self._blind.add(attempt, held=held)
            self._keep(attempt)
        self._attentive = max(self._attentive - 1, 0)

    @harmless
    def held_back(self, attempt: UpdateAttempt, losses: list[torch.Tensor]) -> None:
        """Called after a scaler has skipped an update; the weights are unchanged."""
        self._rank.take_place(self._intake)
        self._look_at_what_was_left_out()
        self._measured(attempt, losses)
        self._judge_calls(attempt, self._sick_of(losses, None) if self._is_readable(attempt) else None)
        self.skipped += 1
        most = self._request.most_skipped
        advice = "" if most is None or self.skipped <= most else f"At most {most} steps may be skipped."
        if self._protocol.is_never_updated(attempt):
            advice = NEVER_UPDATED
        if advice and self.report is None:
            program = with_inner_autocast(self._watch.program(attempt))
            self._examine(program, SKIPPED, name=attempt.name, settles=False, advice=advice)
        if self.report is None and self._request.look != "off":
            self._fall_sick(attempt, SKIPPED, settles=True)

    @harmless
    def attempted(self, attempt: UpdateAttempt, *, skipped: bool | None) -> None:
        """Called after an update was made or skipped; `skipped` is None where the answer is still on a device."""
        self._guard.release()
        if self._test is not None and self.report is None and skipped is not True:
            self._look_at_the_update(self._test, attempt)
        if skipped is False:
            self._settling.pop(attempt.name, None)
            self._protocol.taken(attempt)
        else:
            self._last.pop(attempt.name, None)
        self._lines.ended(attempt, skipped=skipped)
        self._numbers.stepped(attempt.name, skipped=skipped)
        self._count_lost(attempt)
        alert = None if self._rank.alerting is None else self._rank.alerting.taken()
        if alert is not None:
            self._numbers.look(alert, _AFTER_SICK)
        self._numbers.begin_step(self._lines.turn)
        self._tell_what_ended()
        if not self._described:
            self._described = True
            models = models_of(self._watch.recorder.models.roots)
            self._log.describe(**hardware(), models=models, optimizer=type(attempt.optimizer).__name__)
        self._tell_late()
        self._beside.stepped(skipped=skipped)
        self._look_beside()

    def _count_lost(self, attempt: UpdateAttempt) -> None:
        lost, self._lost = self._numbers.lost - self._lost, self._numbers.lost
        if lost:
            self._log.lose(lost)
            if lost == self._lost:
                self._say(UNREAD.format(step=attempt.step))

    @harmless
    def stepping_again(self, step: int, name: str, *, scaled: bool, held_back: bool) -> None:
        """Called before an optimizer uses the gradients of its update `step` again, or after its scaler has skipped."""
        finding = stepped_again_finding(step, as_source(own_line()), held_back=held_back, scaled=scaled)
        self._is_misused(finding, name, key=f"again {name} {held_back}")

    @harmless
    def refused(self, method: str, optimizer: Any, error: Exception) -> None:
        """Called after a scaler's method has raised; if the loop catches the error, it is no failure."""
        finding = self._protocol.refused(method, optimizer, error, self._lines.turn)
        # the error itself would keep the loop's frames alive
        self._refused = (id(error), describe(error)), finding, self._watch.name_of(optimizer)

    def failed(self, error: Exception) -> None:
        """Called when the watch itself has failed; no other call follows."""
        self.broken, self.failure = True, describe(error)
        self._watch.recorder.fail(error)
        self._say(f"the training is watched no more: {self.failure}")

    def _keep(self, attempt: UpdateAttempt) -> None:
        """Keep an update for the bundle's history where that is asked for; a gap makes earlier updates useless."""
        request, recorder = self._request, self._watch.recorder
        if not request.record_batches or not request.bundle or request.look == "off":
            return
        if recorder.is_crowded or recorder.failed is not None:
            self._updates.clear()
        else:
            self._updates.keep(self._watch.keepable(attempt))

    def _measured(self, attempt: UpdateAttempt, losses: list[torch.Tensor]) -> torch.Tensor | None:
        for loss in losses:
            self._numbers.loss(loss)
        scaler, optimizer = attempt.scaler, attempt.optimizer
        fused = getattr(optimizer, "grad_scale", None) is not None
        names = self._watch.recorder.names()
        groups = named_groups(attempt.name, optimizer, names)
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

    def _is_readable(self, attempt: UpdateAttempt) -> bool:
        """Whether numbers can be read without waiting for a device, or the user asked to wait."""
        first = next(parameters_of(attempt.optimizer), None)
        if first is None or self.report is not None:
            return False
        # if a scaler has waited already, the gradients are finite, and reading a loss would wait once more
        return first.device.type == "cpu" or self._request.look == "sync" or self._attentive > 0

    def _sick_of(self, losses: list[torch.Tensor], norm: torch.Tensor | None) -> str | None:
        with unseen():
            if not all(map(_is_finite, losses)):
                return LOSS
            return None if norm is None or _is_finite(norm) else GRADIENTS

    def _clipped(self, clip: Clip) -> None:
        self._protocol.clipping(clip)
        self._watch.recorder.clipped(clip)

    @harmless
    def entering(self, model: torch.nn.Module) -> None:
        """Called before a model of the loop runs."""
        if self._numbers.looking:
            self._numbers.entering(self._watch.recorder.name_of(model) or "", model)

    def left(self) -> None:
        """Called after the model has returned or raised."""
        self._numbers.left()

    @harmless
    def returned(self, model: torch.nn.Module, name: str, call: int, *, given: tuple[Any, Any], output: Any) -> None:
        """Called after a model has returned; `call` is its number in the step, from 0, and `given` its arguments."""
        if self._test is not None:
            self._test.hold(model, *(root for _, root in self._watch.recorder.models.roots))
        batch = self._intake.batches.called(model, *given, backwards=self._watch.recorder.backwards)
        if batch is not None:
            self._numbers.batch(batch)
        if self._numbers.looking:
            self._numbers.returned(name, model, output)
            for path, tensor in iter_tensors(output):
                if tensor.requires_grad and tensor.is_floating_point():
                    part = f"output.{path}" if path else "output"
                    on_gradient(tensor, partial(self._numbers.incoming, name, part=part, call=call))

    # -- the first sick step --

    def _fall_sick(self, attempt: UpdateAttempt, what: str, *, settles: bool) -> None:
        left = self._settling.get(attempt.name, 0)
        if settles and left > 0:
            self._settling[attempt.name] = left - 1
            return
        program = with_inner_autocast(self._watch.program(attempt))
        scaler = past_its_scaler(self._watch, attempt)
        if scaler is not None and self._request.look != "off" and not self._watch.recorder.is_crowded:
            program = replace(program, scaler=scaler)
            if self._looked_at(program, settles=True).report is None:
                self._is_misused(unguarded(attempt, scaler), attempt.name, key="unguarded")
                return
        self._examine(program, what, name=attempt.name, settles=settles)

    @harmless
    def _ended_by(self, error: BaseException | None) -> None:
        self._tell_what_was_refused(error)
        asked = isinstance(error, SystemExit) and error.code in (None, 0)
        if isinstance(error, KeyboardInterrupt) or (error is not None and is_out_of_memory(error)):
            return
        if self.report is None and error is not None and not asked:
            self._look_at_the_end(error)
        self._look_at_what_was_left_out(over=True)

    def _tell_what_was_refused(self, error: BaseException | None) -> None:
        """Report why a scaler refused a call, where that has ended the training."""
        refused, self._refused = self._refused, None
        if refused is not None and any((id(one), describe(one)) == refused[0] for one in causes_of(error)):
            self._is_misused(*refused[1:], key="refused")

    def _look_at_the_update(self, test: WatchedTest, attempt: UpdateAttempt) -> None:
        """Examine a step whose update, or forward, has left a state that is not finite."""
        buffers = together(self._watch.recorder.models.roots).buffers()
        if test.may_be_lost(attempt.optimizer, buffers) and test.is_lost(program := self._watch.program(attempt)):
            with test.undone():
                what = "the state after its update is not finite"
                self._examine(with_inner_autocast(program), what, name=attempt.name, settles=False)

    @harmless
    def _look_at_what_is_left(self) -> None:
        """Check, at the training's end, what no later step shows."""
        if self._request.look == "off":
            return
        for what, left, step in left_at_the_end(self._watch, self._lines, self._test):
            if self.report is not None:
                return
            if isinstance(left, Finding):
                self._found(left, step, what)
            else:
                self._examine(with_inner_autocast(left), what, name="", settles=False, if_shown=True)

    @harmless
    def _look_beside(self, *, at_the_end: bool = False) -> None:
        """Check what the loop keeps outside its models: an average, a teacher, a copy that a validation casts."""
        if self.report is None and self._request.look != "off":
            found = found_beside(self._beside, self._watch, max(self._lines.turn - 1, 0), at_the_end=at_the_end)
            if found is not None:
                self._found(*found, "what it keeps beside the model is not finite")

    @harmless
    def _look_at_the_count(self) -> None:
        """Report a training that has taken no step, although a look at one did not show it to be sick."""
        seen = self.report
        if (seen is not None and seen.verdict != "inconclusive") or self._rank.alerting is None or self._lines.taken:
            return
        self._log.drain()
        finding = self._rank.alerting.errors.get(NO_STEP.code)
        if finding is not None:
            self._found(finding, finding.where.step or 0, "no step was taken")
            if seen is not None:
                self.report = replace(seen, verdict="sick", findings=(finding, *seen.findings))

    def _found(self, finding: Finding, step: int, what: str) -> None:
        run = Run(step=step, kept=self._kept(None))
        report = Report(command="run", target={}, run=run, verdict="sick", findings=(finding,))
        parameters = dict(together(self._watch.recorder.models.roots).named_parameters())
        self._diagnosed(self._explained(report, parameters), what, bundle=None, seconds=None)

    def _look_at_the_end(self, error: BaseException) -> None:
        """Examine the step that was running when the loop's own code ended it, if something in it is non-finite."""
        recorder = self._watch.recorder
        program, said = recorder.ended(self._lines.turn), "its code has ended it"
        if program is not None:
            self._examine(with_inner_autocast(program), said, name="", settles=False)
        elif recorder.failed is None and not recorder.is_crowded and self._request.look != "off":
            unfinished = recorder.interrupted(error, self._lines.turn)
            if unfinished is not None and unfinished.calls_models:
                said += f" ({describe(error)})"
                self._examine(with_inner_autocast(unfinished), said, name="", settles=False, raised=error)

    def _look_at_what_was_left_out(self, *, over: bool = False) -> None:
        """Examine a forward whose non-finite loss made the loop leave it out, or end (`over`)."""
        recorder = self._watch.recorder
        program = recorder.left_out(self._lines.turn)
        if program is None or self.report is not None or self._request.look == "off":
            return
        if recorder.is_crowded or lies_in_parts(program.model) is not None or (not over and _LEFT_OUT in self._said):
            return
        program = with_inner_autocast(program)
        if over:
            self._examine(program, "its code has ended it", name="", settles=False, if_shown=True)
            return
        seen = self._looked_at(program, settles=False)
        if seen.report is None or not seen.shows_error:
            return
        self._said.add(_LEFT_OUT)
        with self._watch.looking_away(), at_its_begin(program):
            bundle = self._bundled(program, seen.report) if self._request.bundle else None
        finding = replace(seen.report.findings[0], severity="warning")
        self._log.write(AlertLine(step=program.step, finding=finding))
        self._tally.warned.add((finding.code, program.step))
        kept = "" if bundle is None else f" (kept: {bundle.folder})"
        self._say(f"warning {finding.code}: {_LEFT_OUT.format(step=program.step)}{kept}: {finding.message}")

    @OWN_TIME.set_apart()
    def _examine(
        self,
        program: Program,
        what: str,
        *,
        name: str,
        settles: bool,
        advice: str = "",
        raised: BaseException | None = None,
        if_shown: bool = False,
    ) -> None:
        """Replay a step and report what is found; with `raised` or `if_shown`, only if the replay shows an error."""
        request = self._request
        if request.look == "off":
            return
        losses = self._watch.recorder.losses(program.optimizer)
        healthy = self._sick_of(losses, None) is None
        hopeful = settles and name not in self._settling and healthy
        if hopeful and program.optimizer is None:  # without one, the scale at which the scaler steps is unknown
            self._hope(program, name)
            return
        crowded, parts = self._watch.recorder.is_crowded, lies_in_parts(program.model)
        if crowded or parts is not None:
            seen = not_looked_at(program, what, SEVERAL if parts is None else IN_PARTS.format(parts=parts))
        else:
            seen = self._looked_at(program, settles=settles)
        if (raised is not None or if_shown) and not seen.shows_error:
            return
        seen = seen.telling(raised=raised, advice=advice)
        self._attentive = 0
        if seen.failed and hopeful:
            self._hope(program, name)
            return
        if seen.report is None:
            self._passed(program, seen, name)
            return
        self.speaks = self.place.rank == 0 or not healthy or bool(seen.report.findings) or program.optimizer is None
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

    @OWN_TIME.set_apart()
    def _looked_at(self, program: Program, *, settles: bool) -> StepDiagnosis:
        thresholds = self._request.thresholds
        with self._watch.looking_away():
            seen = look(
                program, policy=policy_in_force(), device=device_of(program), thresholds=thresholds, settles=settles
            )
        if seen.report is None:
            return seen
        return replace(seen, report=self._explained(seen.report, dict(program.model.named_parameters())))

    def _passed(self, program: Program, seen: StepDiagnosis, name: str) -> None:
        """Note a step that is no error: the scaler settles, or all ranks skipped a step that is finite on this one."""
        self._settling[name] = max(seen.backoffs - 1, 0)
        if not seen.elsewhere:
            return
        line = LookLine(
            step=program.step, verdict="not_reproduced", reason=finite_here(program.step), seconds=seen.seconds
        )
        self._log.write(line)
        if self.place.rank == 0 and all_gradients_nan(program.model):  # an overflow alone leaves some finite
            self._say(line.reason)

    def _judge_calls(self, attempt: UpdateAttempt, sick: str | None) -> None:
        if sick is not None:
            return  # the error lies before the scaling, or is reported with the overflow that it lets through
        finding = self._protocol.broken_by(attempt)
        if finding is not None:
            self._is_misused(finding, attempt.name, key=f"{finding.where.op} {attempt.name}")

    def _is_misused(self, finding: Finding, optimizer: str, *, key: str) -> None:
        """Report that the loop's calls break the scaler's protocol, which needs no replay; once for each `key`."""
        if key in self._said:
            return
        self._said.add(key)
        if self.report is not None or finding.severity != "error":
            self._log.write(AlertLine(step=finding.where.step or 0, finding=finding))
            self._tally.warned.add((finding.code, finding.where.step))
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

    @OWN_TIME.set_apart()
    def _bundled(self, program: Program, report: Report, leading: PriorSteps | None = None) -> Written | None:
        log, made = [text_of(line) for line in self._log.last(_LAST_LINES)], self._constructions.of
        return bundled(program, report, self._request, self.place, self._say, made=made, log=log, leading=leading)

    def _told(self, program: Program, seen: StepDiagnosis, what: str, bundle: Written | None) -> None:
        report = seen.report
        if report is None:
            return
        run = {**report.run, **self._when(program.step, program.optimizer_name), "kept": self._kept(bundle)}
        self._diagnosed(replace(report, run=run), what, bundle=bundle, seconds=seen.seconds)

    def _diagnosed(self, report: Report, what: str, *, bundle: Written | None, seconds: float | None) -> None:
        """Log and report a diagnosis; its `run` says which step it is and what was kept of it."""
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
            device=trained_on(report.run),
            precision=report.run.get("precision"),
            autocast=report.run.get("autocast"),
        )
        self._log.write(line)
        try:
            self._tell(self.report)
        except Exception as error:  # noqa: BLE001 - the log has it, and what was asked for is done all the same
            self._say(f"the diagnosis of step {line.step} could not be told: {describe(error)}; it is in {self.folder}")
        if self._request.on_sick == "stop" and not self._over:
            self._log.flush()
            raise StoppedError

    def _when(self, step: int, optimizer: str) -> Run:
        whose = self._watch.whose(optimizer)
        return {"step": step} if whose is None else {"step": step, "optimizer": whose}

    def _kept(self, bundle: Written | None) -> Kept:
        return kept_of(Path(self._request.named or self._request.health), bundle)

    # -- numbers that arrive after the update --

    def _read(self, reading: StepReading) -> None:
        self._lines.step(reading)
        news = self._blind.arrived(reading)
        if news is None:
            self._updates.was_sound(reading.optimizer, reading.step, reading.loss)
        elif self._late is None:
            self._late = news

    def _tell_late(self) -> None:
        """Report once that a step was sick whose update is already made."""
        news, self._late = self._late, None
        if news is None or self.report is not None or self._request.look == "off":
            return
        if news.intact:
            if not self._attentive:
                self._attentive = self._request.every
                if news.what != SKIPPED:
                    self._say(HELD_BACK.format(step=news.step, what=news.what, steps=self._attentive))
            return
        self._numbers.look(news.what, _AFTER_SICK)
        note = ErrorNote(what=f"step {news.step}", kind="too_late", message=too_late(news))
        report = Report(command="run", target={}, verdict="sick", complete=False, errors=(note,))
        with self._watch.looking_away():
            led = self._updates.leading_to(news.optimizer, news.step, self._watch.recorder.kept)
            bundle = None if led is None else self._bundled(led[0], report, led[1])
        kept, records = self._kept(bundle), bool(self._request.record_batches)
        note = replace(note, message=note.message + ways_out(kept.get("bundle"), kept.get("model"), records=records))
        report = replace(report, errors=(note,), run={**self._when(news.step, news.optimizer), "kept": kept})
        self._diagnosed(report, news.what, bundle=bundle, seconds=None)

    # -- messages --

    def _say(self, sentence: str) -> None:
        """Send a sentence to the user; a closed stream or a listener that fails must not disturb the training."""
        self._tally.incomplete = True
        with suppress(Exception):
            rank = self.place.rank
            self._on_sentence(f"rank {rank}: {sentence}" if rank else sentence)

    def _tell_what_ended(self) -> None:
        """Report once each part of the watch that has stopped."""
        ended = {
            "the steps are recorded no more, and none can be run again": self._watch.recorder.failed,
            "the steps' numbers are taken no more": self._numbers.failed,
        }
        sentences = [f"{what}: {why}" for what, why in ended.items() if why is not None]
        for sentence in (*sentences, *self._watch.recorder.models.unseen):
            if sentence not in self._said:
                self._said.add(sentence)
                self._say(sentence)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 1:  # a loss or a norm: two functions of torch's would take ten times as long
        return cmath.isfinite(tensor.item())
    return bool(tensor.isfinite().all())
