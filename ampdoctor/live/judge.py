"""What it means that something of a watched loop is not finite, or that its calls break the scaler's protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ampdoctor.diagnosis.replay.births import finding_of_birth
from ampdoctor.diagnosis.replay.causes import (
    STATE,
    Cause,
    cause_of,
    culprits,
    fitting_scale,
    independent,
    scale_may_cure,
)
from ampdoctor.diagnosis.replay.certain_misuse import certain_misuse
from ampdoctor.diagnosis.replay.dead_scale import dead_scaler_finding
from ampdoctor.diagnosis.replay.scaler_misuse import unguarded_step_finding
from ampdoctor.diagnosis.replay.scaler_verdict import scale_kills, verdict_on_skips
from ampdoctor.evidence.of_checkpoints.checkpoint import DEAD_SCALE
from ampdoctor.evidence.of_runs.trace import Birth, Sightings, StepEvent
from ampdoctor.evidence.report import ErrorNote, Finding, Report
from ampdoctor.evidence.where import Where
from ampdoctor.hooks.interfaces import describe
from ampdoctor.live.run import LiveRun
from ampdoctor.live.trace import LiveTrace
from ampdoctor.live.undecided import Spread
from ampdoctor.probes.ops.source import as_source, user_line

Sick = Callable[[Report], None]
"""Told once, at the step that is sick; may raise, which ends the loop there."""


@dataclass(slots=True)
class LiveJudge:
    """Judges what a watch sees, up to the first that is sick: then the trace idles.

    Attributes:
        run: The loop.
        trace: Of its running step.
        on_sick: Told the diagnosis.
        max_skipped: Steps that a GradScaler may skip in all; None: as many as it takes to settle.
        report: The diagnosis; None as long as nothing is sick.
        skipped: Steps that a scaler has skipped.
    """

    run: LiveRun
    trace: LiveTrace
    on_sick: Sick
    max_skipped: int | None = None
    report: Report | None = None
    skipped: int = 0
    _in_a_row: dict[str, list[float]] = field(default_factory=dict)  # by optimizer: the scales, if it skipped the last
    _updated: bool = False

    def births(self) -> tuple[Birth, ...]:
        """What harms the running step, worst first."""
        return culprits(self.trace.gathered())

    def curable(self, births: tuple[Birth, ...], *more: str) -> bool:
        """A lower loss scale may take what they harm away, and what is harmed `more`."""
        sinks = (*(sink for birth in births for sink in birth.harms), *more)
        return scale_may_cure(births, Sightings(sinks=sinks, outputs=(), output_grads=(), fingerprint=""))

    def called(self, event: StepEvent) -> None:
        """A call was made on a scaler, or on an optimizer whose gradients are finite."""
        self._updated |= event.kind == "update"
        if self.trace.idle:
            return
        finding = certain_misuse(self.run.events.events, self.run.step, as_source(user_line()))
        if finding is not None:
            self._tell((finding,))

    def stepped(self, optimizer: str) -> None:
        """A step was taken, and nothing of it is sick."""
        self._in_a_row.pop(optimizer, None)

    def skips(self, event: StepEvent) -> None:
        """A step that the scaler skips is health, as long as a lower scale takes the overflow away and comes.

        Args:
            event: The call of the scaler's `step`.
        """
        if self.trace.idle:
            return
        scale = event.scale or 1.0
        scales = self._in_a_row.setdefault(event.optimizer, [])
        scales.append(scale)
        births = self.births()
        if births and not self.curable(births):
            self.sick(births, "the gradients")
            return
        verdict = verdict_on_skips(
            births[0] if births else None,
            scales=scales,
            steps=len(scales),
            cures=fitting_scale(births, scale) >= 1.0,
            updated=self._updated,
        )
        if verdict.severity == "error":
            self.sick(births, "the gradients", cause=verdict.cause, advice=verdict.advice)
        elif self.max_skipped is not None and self.skipped > self.max_skipped:
            self.sick(births, "the gradients", cause="grad_overflow")

    def uses(self, spread: Spread, *, past_scaler: bool = False) -> None:
        """What a backward spread is used, or is left when the loop is over."""
        self.sick(spread.births, spread.what, past_scaler=past_scaler)

    def raised(self, error: Exception) -> None:
        """The loop was ended by its own code: because of what it saw, where that was non-finite."""
        if self.trace.idle:
            return
        self.trace.harm_by_raising()
        births = tuple(b for b in self.births() if "raised" in b.harms)
        if births:
            self.sick(births, "what the code looked at", raised=describe(error))

    def unused_gradients(self) -> None:
        """The loop is over, and no optimizer has stepped."""
        names = self.run.parameter_names()
        found = [
            self.trace.harm(f"grad:{names[id(parameter)]}", parameter.grad)
            for parameter in self.run.model.parameters()
            if parameter.grad is not None
        ]
        births = self.births()
        if any(found) and not (self.run.events.scale() is not None and self.curable(births)):
            self.sick(births, "the gradients")

    def last_state(self, *, trained: bool) -> None:
        """The loop is over; a model that was only looked at may be as it came.

        Args:
            trained: An optimizer, or a backward, was seen.
        """
        if self.trace.idle or not self.trace.harm_state():
            return
        births = self.births()
        if trained or not births or any(birth.origin not in STATE for birth in births):
            self.sick(births, "the state at the end")

    def sick(
        self,
        births: tuple[Birth, ...],
        what: str,
        *,
        cause: Cause | None = None,
        advice: str = "",
        raised: str | None = None,
        past_scaler: bool = False,
    ) -> None:
        """Tell it, and look no more.

        Args:
            births: Of what is not finite, worst first; none where no op was seen to make it so.
            what: What is not finite, in words.
            cause: Where more is known than the births show.
            advice: What to do first.
            raised: What the loop's own code said of it.
            past_scaler: An optimizer was stepped, and its scaler was not asked.
        """
        if not births:
            said = f"step {self.run.step}: {what} went non-finite, and no op was seen to make it so "
            where = "(in another thread, or outside torch's dispatcher?)"
            note = ErrorNote(what=f"step {self.run.step}", kind="unattributed", message=said + where)
            self._tell((), (note,))
            return
        finding = self._finding(births, cause, past_scaler=past_scaler)
        if advice:
            finding = replace(finding, help=f"{advice} {finding.help}")
        if raised is not None:
            finding = replace(finding, evidence={**finding.evidence, "raised": raised})
        self._tell((finding,))

    def _tell(self, findings: tuple[Finding, ...], errors: tuple[ErrorNote, ...] = ()) -> None:
        self.trace.idle = True
        self.report = Report(
            command="watch",
            target={},
            run={"steps": self.run.step + 1, "steps_skipped": self.skipped},
            verdict="sick",
            complete=not errors,
            findings=findings,
            errors=errors,
        )
        self.on_sick(self.report)

    def _finding(self, births: tuple[Birth, ...], cause: Cause | None, *, past_scaler: bool) -> Finding:
        main, *others = independent(births)
        scale = self.run.events.scale()
        if scale is not None and scale_kills(main, scale):
            where = Where(step=main.where.step, phase="scaler", op="scaler_state", source=main.where.source)
            return dead_scaler_finding(scale, DEAD_SCALE, where, None)
        decided = cause or cause_of(main)
        if past_scaler and scale is not None and decided == "backward_overflow":
            return unguarded_step_finding(main, scale)
        return finding_of_birth(main, cause=decided, others=others)
