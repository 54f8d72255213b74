"""`StepWatch`: looks on while somebody else's training loop runs, and says what went non-finite, where and why.

The loop runs once and is not ours to run again, so that each of its ops is traced from the first on. What is sick is
decided as in `bisect-nan` (a birth, and a path from it to a loss whose gradients are used, to gradients that an
optimizer uses, or to the state after a step); only that a cure is not tried.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampdoctor.diagnosis.replay.causes import (
    STATE,
    Cause,
    cause_of,
    culprits,
    derivative_beyond,
    fitting_scale,
    independent,
    scale_may_cure,
)
from ampdoctor.diagnosis.replay.findings import dead_scaler_finding, finding_of_birth, unguarded_step_finding
from ampdoctor.diagnosis.replay.scaler_verdict import NEVER_UPDATED, PERSISTS
from ampdoctor.evidence.of_checkpoints.checkpoint import DEAD_SCALE
from ampdoctor.evidence.of_runs.trace import Birth, Sightings, StepEvent
from ampdoctor.evidence.report import ErrorNote, Finding, Report
from ampdoctor.evidence.where import Where
from ampdoctor.live.run import LiveRun, has_state, state_of
from ampdoctor.live.trace import LiveTrace, under_fake_tensors
from ampdoctor.live.undecided import Spread, Undecided, leaves_of
from ampdoctor.loop.raised import describe
from ampdoctor.loop.scaler_events import Listener
from ampdoctor.loop.switches import no_anomaly_mode, no_fast_path
from ampdoctor.probes.ops.modules import in_backward
from ampdoctor.probes.ops.source import shown_from

if TYPE_CHECKING:
    from torch import nn

Sick = Callable[[Report], None]
"""Told once, at the step that is sick; may raise, which ends the loop there."""


class StepWatch(Listener):
    """Watches a loop for as long as `watching` lasts, up to its first sick step.

    Args:
        on_sick: Told the diagnosis.
        max_skipped: Steps that a GradScaler may skip in all; None: as many as it takes to settle. It settles where the
            scale comes down and a scale of at least 1 fits the gradients.

    Attributes:
        report: The diagnosis; None as long as nothing is sick.
    """

    def __init__(self, on_sick: Sick, *, max_skipped: int | None = None) -> None:
        self.report: Report | None = None
        self._on_sick = on_sick
        self._max_skipped = max_skipped
        self._run = LiveRun(self)
        self._trace = LiveTrace(self._called)
        self._skipped = 0
        self._in_a_row: dict[str, list[float]] = {}  # by optimizer: the scales of the last steps, if it skipped them
        self._asked: Any = None
        self._stepped: Any = None
        self._given = False
        self._backwards = 0
        self._updates = False
        self._undecided = Undecided()
        self._running: Spread | None = None

    @contextmanager
    def watching(
        self,
        model: nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        scaler: Any = None,
    ) -> Iterator[None]:
        """Hooks and modes are in place, and gone afterwards whatever happens.

        Args:
            model: Known beforehand; other models are met when they are first called.
            optimizers: Known beforehand; others are met at their first step.
            scaler: One that is not torch's own GradScaler and has its methods.
        """
        with ExitStack() as stack:
            stack.enter_context(shown_from(Path.cwd()))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(no_anomaly_mode())
            stack.enter_context(no_fast_path())
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]  # not in __all__
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(self._run.events.watching(*([] if scaler is None else [scaler])))
            stack.enter_context(self._watched_backwards())
            stack.enter_context(self._trace.watching(self._run))
            self.meet(model, optimizers)
            try:
                yield
            except Exception as error:
                self._raised(error)
                raise
            self._ended()

    def meet(self, model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """The loop has these parts, which it would show only when it uses them."""
        optimizers = list(optimizers)
        self._given |= model is not None
        if model is not None:
            self._run.meet(model)
        for optimizer in optimizers:
            self._run.meet_optimizer(optimizer)
        self._trace.met(state_of(model, optimizers))

    @property
    def trained(self) -> bool:
        """Whether a backward or an optimizer's step has been seen."""
        return self._backwards > 0 or bool(self._run.optimizers)

    # -- what the loop does ----------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: Any, outermost: bool) -> str | None:  # noqa: FBT001 - the trace's seam
        """The name of a module that is called; a model that was not met before belongs to the run from now on."""
        if self._trace.idle or under_fake_tensors():
            return None
        name = self._run.name_of(module)
        if name is None and outermost and has_state(module):
            self._run.meet(module)
            self._trace.met(state_of(module, ()))
            name = self._run.name_of(module)
        if outermost:
            self._run.called(module)
        if outermost and not in_backward():
            self._trace.given(args[0] if len(args) == 1 else args)
        return name  # None: the loss's own modules have no tensors, and pass for loss code

    @contextmanager
    def _watched_backwards(self) -> Iterator[None]:
        engine = getattr(torch.autograd, "_engine_run_backward", None)
        if engine is None:  # a private name: without it a loss shows in the gradients
            yield
            return

        def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            named = args[3] if len(args) > 3 else ()
            with self._backward(roots, named, accumulated=bool(kwargs.get("accumulate_grad"))) as done:
                return done(engine(roots, *args, **kwargs))

        torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined,assignment]  # noqa: SLF001
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]  # noqa: SLF001

    @contextmanager
    def _backward(
        self, roots: Sequence[Any], inputs: Sequence[Any], *, accumulated: bool
    ) -> Iterator[Callable[[Any], Any]]:
        """A backward runs; what is yielded is handed what it returns, and hands it on."""
        if in_backward() and self._running is not None and accumulated:  # of a checkpointed part
            self._running.leaves += leaves_of(roots, inputs)
        if in_backward() or self._run.events.part is not None:  # no step's loss
            yield lambda gradients: gradients
            return
        self._backwards += 1
        trained = [] if accumulated else self._run.parameters_among(inputs)
        if self._trace.idle or not (accumulated or trained):  # gradients of an input: a penalty, a saliency map
            yield lambda gradients: gradients
            return
        self._updates = True
        self._undecided.next_backward()
        # more than one element is a test's own gradient, and no loss
        losses = [root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
        leaves = leaves_of(roots, inputs) if accumulated else [t for t in trained if t.is_leaf]
        self._running = spread = self._spread("the loss", "loss", losses, leaves)

        def done(gradients: Any) -> Any:
            if spread is None and not accumulated:
                self._spread("the gradients", "grad:?", [g for g in gradients if g is not None], leaves)
            return gradients

        try:
            yield done
        finally:
            self._running = None
            if spread is not None:
                spread.over(accumulated=accumulated)
                seen = self._trace.behind("gradients", spread.put)
                spread.origins |= seen[1] if seen else frozenset()

    def _spread(
        self, what: str, sink: str, tensors: Iterable[torch.Tensor], leaves: list[torch.Tensor]
    ) -> Spread | None:
        """Note what is not finite of a backward; unless the state has become so since the last step, by hand."""
        seen = self._trace.behind(sink, tensors)
        if seen is None:
            return None
        if self._trace.harm_state():
            self._sick(self._births(), "the state")
            return None
        trace, origins = seen
        births = culprits(trace)
        overflowed = any(b.where.phase == "scaler" for b in births) or scale_may_cure(births, self._sinks(sink))
        curable = self._run.events.scale() is not None and bool(births) and overflowed
        spread = Spread(what=what, births=births, origins=origins, curable=curable, leaves=leaves)
        self._undecided.add(spread)
        return spread

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if under_fake_tensors():
            return None
        self._meet_optimizer(optimizer)
        outside = self._run.events.before_step(optimizer, args, kwargs)
        if not bool(getattr(optimizer, "found_inf", False)):  # a fused one is called either way, and skips by itself
            self._stepped = optimizer
            self._judge_use(optimizer)
            self._note_gradients(optimizer)
        return outside

    def _meet_optimizer(self, optimizer: Any) -> None:
        if not self._run.knows_optimizer(optimizer):
            self._run.meet_optimizer(optimizer)
            if not self._trace.idle:
                self._trace.met(state_of(None, [optimizer]))

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._run.events.after_step()
        if self._trace.idle or self._stepped is not optimizer:
            return
        self._judge_use(optimizer)  # what a closure spread is there only now
        self._note_gradients(optimizer)
        self._trace.harm_state()
        trace = self._trace.gathered()
        if any(birth.harms for birth in trace.births) or trace.unattributed:
            self._sick(self._births(), "the state after the step", past_scaler=self._asked is not optimizer)
            return
        self._in_a_row.pop(self._run.meet_optimizer(optimizer), None)
        self._next(optimizer)

    def calls(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002 - the seam's signature
        """As in `Listener`."""
        if hasattr(optimizer, "param_groups") and not under_fake_tensors():
            self._meet_optimizer(optimizer)

    @contextmanager
    def asking(self, event: StepEvent, optimizer: Any) -> Iterator[None]:
        """As in `Listener`: the scaler has skipped the step where the optimizer has not taken it by the end."""
        self._asked, self._stepped = optimizer, None
        yield
        self._asked = None
        if optimizer is None or self._stepped is optimizer or self._trace.idle:
            return
        self._skipped += 1
        self._judge_use(optimizer, skipped=True)
        self._note_gradients(optimizer)
        self._judge_skip(event.optimizer, event.scale or 1.0)
        if not self._trace.idle:
            self._next(optimizer)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._trace.idle:
            return
        names = self._run.parameter_names()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._trace.harm(f"grad:{names.get(id(parameter), '?')}", parameter.grad)

    def _next(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._run.meet_optimizer(optimizer)
        self._run.steps[name] += 1
        self._run.events.next_step(name)
        self._undecided.next_step()
        self._trace.next_step(self._run.step)

    # -- what it means ---------------------------------------------------------------------------------------------

    def _births(self) -> tuple[Birth, ...]:
        return culprits(self._trace.gathered())

    def _sinks(self, *sinks: str) -> Sightings:
        return Sightings(sinks=sinks, outputs=(), output_grads=(), fingerprint="")

    def _judge_use(self, optimizer: Any, *, skipped: bool = False) -> None:
        """A step is taken, or skipped by a scaler: what it is taken with has to come of a finite loss."""
        spread = None if self._trace.idle else self._undecided.used_by(optimizer)
        if spread is not None and not (skipped and spread.curable):
            self._sick(spread.births, spread.what, past_scaler=self._asked is not optimizer)

    def _judge_skip(self, optimizer: str, scale: float) -> None:
        """A step that the scaler skips is health, as long as a lower scale takes the overflow away and comes."""
        if self._trace.idle:
            return
        scales = self._in_a_row.setdefault(optimizer, [])
        scales.append(scale)
        births = self._births()
        sinks = self._sinks(*(sink for birth in births for sink in birth.harms))
        if births and not scale_may_cure(births, sinks):
            self._sick(births, "the gradients")
        elif births and fitting_scale(births, scale) < 1.0:
            main = births[0]
            self._sick(births, "the gradients", cause=cause_of(main) if derivative_beyond(main) else "scaler_collapse")
        elif self._max_skipped is not None and self._skipped > self._max_skipped:
            self._sick(births, "the gradients", cause="grad_overflow")
        elif len(scales) >= PERSISTS and len(set(scales)) == 1:
            self._sick(births, "the gradients", cause="grad_overflow", advice=NEVER_UPDATED)
        elif scale < 1.0:
            self._sick(births, "the gradients", cause="scaler_collapse")

    def _raised(self, error: Exception) -> None:
        """The loop was ended by its own code: because of what it saw, where that was non-finite."""
        if self._trace.idle:
            return
        self._trace.harm_by_raising()
        births = tuple(b for b in self._births() if "raised" in b.harms)
        if births:
            self._sick(births, "what the code looked at", raised=describe(error))

    def _ended(self) -> None:
        """The loop is over: what was not used by then, or was updated by hand, is judged now."""
        if self._trace.idle or not (self._given or self._updates or self._run.optimizers):
            return
        stepped = any(self._run.steps.values())
        spread = self._undecided.left(self._trace.asked, stepped=stepped)
        if spread is not None:
            self._sick(spread.births, spread.what)
        elif not stepped:
            self._judge_unused_gradients()
        if not self._trace.idle and self._trace.harm_state():
            births = self._births()
            # a model that is only looked at may be as it came
            if self._updates or stepped or not births or any(birth.origin not in STATE for birth in births):
                self._sick(births, "the state at the end")

    def _judge_unused_gradients(self) -> None:
        names = self._run.parameter_names()
        found = [
            self._trace.harm(f"grad:{names[id(parameter)]}", parameter.grad)
            for parameter in self._run.model.parameters()
            if parameter.grad is not None
        ]
        births = self._births()
        sinks = self._sinks(*(sink for birth in births for sink in birth.harms))
        if any(found) and not (self._run.events.scale() is not None and scale_may_cure(births, sinks)):
            self._sick(births, "the gradients")

    def _sick(
        self,
        births: tuple[Birth, ...],
        what: str,
        *,
        cause: Cause | None = None,
        advice: str = "",
        raised: str | None = None,
        past_scaler: bool = False,
    ) -> None:
        self._trace.idle = True
        finding = self._finding(births, cause, past_scaler=past_scaler) if births else None
        if finding is not None and advice:
            finding = replace(finding, help=f"{advice} {finding.help}")
        if finding is not None and raised is not None:
            finding = replace(finding, evidence={**finding.evidence, "raised": raised})
        step = self._run.step
        where = "in another thread, or outside torch's dispatcher"
        said = f"step {step}: {what} went non-finite, and no op was seen to make it so ({where}?)"
        unattributed = ErrorNote(what=f"step {step}", kind="unattributed", message=said)
        self.report = Report(
            command="watch",
            target={},
            run={"steps": step + 1, "steps_skipped": self._skipped},
            verdict="sick",
            complete=finding is not None,
            findings=() if finding is None else (finding,),
            errors=() if finding is not None else (unattributed,),
        )
        self._on_sick(self.report)

    def _finding(self, births: tuple[Birth, ...], cause: Cause | None, *, past_scaler: bool) -> Finding:
        main, *others = independent(births)
        scale = self._run.events.scale()
        dead = scale is not None and not (math.isfinite(scale) and abs(scale) > DEAD_SCALE)
        if scale is not None and dead and main.where.phase not in ("forward", "loss", "data"):
            where = Where(step=main.where.step, phase="scaler", op="scaler_state", source=main.where.source)
            return dead_scaler_finding(scale, DEAD_SCALE, where, None)
        decided = cause or cause_of(main)
        if past_scaler and scale is not None and decided == "backward_overflow":
            return unguarded_step_finding(main, scale)
        return finding_of_birth(main, cause=decided, others=others)
