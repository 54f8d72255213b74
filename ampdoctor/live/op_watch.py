"""`StepWatch`: watches a training loop op by op, and reports what became non-finite, where and why.

The loop cannot be run again, so each of its ops is traced. A step is sick as in `bisect-nan`: a non-finite value
reaches a loss whose gradients are used, gradients that an optimizer uses, or the state after a step. No cure is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.nonfinite import (
    STATE,
    cause_of,
    culprits,
    finding_of_birth,
    fitting_scale,
    independent,
    scale_may_cure,
)
from ampdoctor.diagnosis.replay.scaler_misuse import (
    certain_misuse,
    scale_kills,
    unguarded_step_finding,
    verdict_on_skips,
)
from ampdoctor.diagnosis.replay.scaler_state import dead_scaler_finding
from ampdoctor.evidence.checkpoint_stats import DEAD_SCALE
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Cause, ErrorNote, Finding, Report
from ampdoctor.evidence.trace import NonFiniteOrigin, NonFiniteReport, StepEvent
from ampdoctor.hooks.callbacks import OptimizerHooks
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.process_state import no_anomaly_mode, no_fast_path, unwarned_of_hooks
from ampdoctor.hooks.scaler_events import ScalerCallbacks
from ampdoctor.hooks.torch_internals import Backward, in_backward, seen_backwards, under_fake_tensors, unseen
from ampdoctor.live.live_trace import LiveRun, LiveTrace, has_state, state_of
from ampdoctor.package import working_folder
from ampdoctor.probes.tensor_memory import NONE, OriginIds
from ampdoctor.probes.user_code import as_source, shown_from, user_line

if TYPE_CHECKING:
    from torch import nn


# -- non-finite backwards: no harm until the loop uses the gradients, and it may leave that step out --


@dataclass(slots=True, kw_only=True)
class NonFiniteBackward:
    """The non-finite results of one backward."""

    what: str  # what was not finite, in words
    births: tuple[NonFiniteOrigin, ...]  # the causes, worst first
    origins: OriginIds = NONE  # the trace's numbers, in this step, of the causes and of the gradients' origins
    curable: bool = False  # a lower loss scale may remove it
    leaves: list[torch.Tensor] = field(default_factory=list)  # the tensors that get the gradients
    # by `id` of the leaf; empty where the backward returned them; None while it runs
    gradients: dict[int, torch.Tensor] | None = None
    passed_over: bool = False  # a later step did not use them
    _zero: frozenset[int] = frozenset()  # leaves whose gradients were zero before anything cleared them

    def over(self, *, accumulated: bool) -> None:
        """Records the gradients after the backward has ended."""
        self.gradients = {id(leaf): leaf.grad for leaf in self.leaves if accumulated and leaf.grad is not None}
        self._zero = frozenset(key for key, gradient in self.gradients.items() if _is_zero(gradient))

    @property
    def put(self) -> Iterable[torch.Tensor]:
        """The gradients that were stored in `.grad`."""
        return (self.gradients or {}).values()

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether an update of these tensors would use its gradients."""
        own = {id(leaf) for leaf in self.leaves}
        return self.gradients is None or any(id(t) in own and self._is_there(t) for t in tensors)

    @property
    def cleared(self) -> bool:
        """Whether its gradients were stored in `.grad` and have all been cleared since."""
        return bool(self.gradients) and not any(map(self._is_there, self.leaves))

    def _is_there(self, leaf: torch.Tensor) -> bool:
        if not self.gradients:
            return True  # returned to the loop: their use is not visible
        gradient = self.gradients.get(id(leaf))
        return gradient is not None and leaf.grad is gradient and (id(leaf) in self._zero or not _is_zero(gradient))


class PendingOrigins:
    """The non-finite backwards that the loop has neither used nor left out so far."""

    def __init__(self) -> None:
        self._open: list[NonFiniteBackward] = []

    def add(self, spread: NonFiniteBackward) -> None:
        """Adds a backward that begins, or that had non-finite results."""
        self._open.append(spread)

    def next_backward(self) -> None:
        """Forgets the backwards whose gradients were cleared, and those that returned gradients which no step used."""
        self._open = [spread for spread in self._open if spread.gradients and not spread.cleared]

    def next_step(self) -> None:
        """Marks all as passed over: a step was taken that used none of them."""
        for spread in self._open:
            spread.passed_over, spread.origins = True, NONE

    def used_by(self, optimizer: Any) -> NonFiniteBackward | None:
        """Returns the first whose gradients a step of this optimizer uses."""
        held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        return next((spread for spread in self._open if spread.reaches(held)), None)

    def left(self, asked: OriginIds, *, stepped: bool) -> NonFiniteBackward | None:
        """Returns, at the end of the loop, the first that the loop did not leave out.

        At the end, a step that was left out looks like a test that takes no steps. It counts as left out where the loop
        took other steps (`stepped`) and its code has read one of the values in `asked`.
        """
        for spread in self._open:
            looked = spread.passed_over or (stepped and bool(spread.origins & asked))
            if not (spread.curable or spread.cleared or looked):
                return spread
        return None


def _is_zero(gradient: torch.Tensor) -> bool:
    with unseen():
        return gradient.layout is torch.strided and not bool(gradient.count_nonzero())


def leaves_of(roots: Iterable[Any], inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors that a backward gives gradients: its named inputs, else the leaves of its graph."""
    named = [t for t in inputs if isinstance(t, torch.Tensor)]
    if named:
        return named
    waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
    found = {id(root): root for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is None}
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


# -- judging --

Sick = Callable[[Report], None]
"""Called once, at the sick step; may raise, which ends the loop there."""


@dataclass(slots=True)
class LiveJudge:
    """Judges a loop up to its first sick step; after that the trace idles."""

    run: LiveRun
    trace: LiveTrace
    on_sick: Sick
    max_skipped: int | None = None  # steps that a GradScaler may skip in all; None: as many as it takes to settle
    report: Report | None = None  # None as long as nothing is sick
    skipped: int = 0  # steps that a scaler has skipped
    _in_a_row: dict[str, list[float]] = field(default_factory=dict)  # by optimizer: the scales of its latest skips
    _updated: bool = False

    def births(self) -> tuple[NonFiniteOrigin, ...]:
        """Returns what harms the running step, worst first."""
        return culprits(self.trace.gathered())

    def curable(self, births: tuple[NonFiniteOrigin, ...], *more: str) -> bool:
        """Whether a lower loss scale may repair the sinks that the births harm, and the sinks `more`."""
        sinks = (*(sink for birth in births for sink in birth.harms), *more)
        return scale_may_cure(births, NonFiniteReport(sinks=sinks, outputs=(), output_grads=(), fingerprint=""))

    def called(self, event: StepEvent) -> None:
        """Judges a call on a scaler, or on an optimizer whose gradients are finite."""
        self._updated |= event.kind == "update"
        if self.trace.idle:
            return
        finding = certain_misuse(self.run.events.events, self.run.step, as_source(user_line()))
        if finding is not None:
            self._tell((finding,))

    def stepped(self, optimizer: str) -> None:
        """Records a step that was taken and is healthy."""
        self._in_a_row.pop(optimizer, None)

    def skips(self, event: StepEvent) -> None:
        """Judges a step that the scaler skipped: healthy as long as a lower scale removes the overflow and is set."""
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

    def uses(self, spread: NonFiniteBackward, *, past_scaler: bool = False) -> None:
        """Reports a backward whose non-finite results are used, or remain at the end of the loop."""
        self.sick(spread.births, spread.what, past_scaler=past_scaler)

    def raised(self, error: Exception) -> None:
        """Reports an error of the loop's own code, where the code read a non-finite value before."""
        if self.trace.idle:
            return
        self.trace.harm_by_raising()
        births = tuple(b for b in self.births() if "raised" in b.harms)
        if births:
            self.sick(births, "what the code looked at", raised=describe(error))

    def unused_gradients(self) -> None:
        """Judges the gradients at the end of a loop in which no optimizer stepped."""
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
        """Judges the state at the end; a model that was not `trained` may have been non-finite from the start."""
        if self.trace.idle or not self.trace.harm_state():
            return
        births = self.births()
        if trained or not births or any(birth.origin not in STATE for birth in births):
            self.sick(births, "the state at the end")

    def sick(
        self,
        births: tuple[NonFiniteOrigin, ...],
        what: str,
        *,
        cause: Cause | None = None,
        advice: str = "",
        raised: str | None = None,
        past_scaler: bool = False,
    ) -> None:
        """Makes the report, passes it to `on_sick`, and stops looking.

        `births` are worst first; empty where no op was seen to produce the non-finite value. `raised` is the error of
        the loop's own code; `past_scaler` means that the optimizer was stepped without its scaler.
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

    def _finding(self, births: tuple[NonFiniteOrigin, ...], cause: Cause | None, *, past_scaler: bool) -> Finding:
        main, *others = independent(births)
        scale = self.run.events.scale()
        if scale is not None and scale_kills(main, scale):
            where = Where(step=main.where.step, phase="scaler", op="scaler_state", source=main.where.source)
            return dead_scaler_finding(scale, DEAD_SCALE, where, None)
        decided = cause or cause_of(main)
        if past_scaler and scale is not None and decided == "backward_overflow":
            return unguarded_step_finding(main, scale)
        return finding_of_birth(main, cause=decided, others=others)


class StepWatch(ScalerCallbacks):
    """Watches a loop for as long as `watching` lasts, up to its first sick step.

    A GradScaler may skip `max_skipped` steps in all; None: as many as it takes to settle. It settles where its scale
    comes down and a scale of at least 1 fits the gradients.
    """

    def __init__(self, on_sick: Sick, *, max_skipped: int | None = None) -> None:
        self._run = LiveRun(self)
        self._trace = LiveTrace(self._called)
        self._judge = LiveJudge(self._run, self._trace, on_sick, max_skipped)
        self._hooks = OptimizerHooks(self._before_step, self._after_step)
        self._asked: Any = None
        self._stepped: Any = None
        self._given = False
        self._backwards = 0
        self._updates = False
        self._undecided = PendingOrigins()
        self._running: NonFiniteBackward | None = None

    @contextmanager
    def watching(
        self,
        model: nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        scaler: Any = None,
    ) -> Iterator[None]:
        """Installs hooks and modes, and removes them on any exit.

        Other models are found when they are first called, other optimizers at their first step. `scaler` is an object
        that has the methods of torch's GradScaler but is not one.
        """
        with ExitStack() as stack:
            stack.enter_context(shown_from(working_folder()))
            stack.enter_context(unwarned_of_hooks())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(no_anomaly_mode())
            stack.enter_context(no_fast_path())
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]  # not in __all__
            stack.callback(self._hooks.remove)
            self._hooks.hang()
            stack.enter_context(self._run.events.watching(*([] if scaler is None else [scaler])))
            stack.enter_context(seen_backwards(self._backward))
            stack.enter_context(self._trace.watching(self._run))
            self.meet(model, optimizers)
            try:
                yield
            except Exception as error:
                self._judge.raised(error)
                raise
            self._ended()

    def meet(self, model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Registers parts of the loop before the loop uses them."""
        optimizers = list(optimizers)
        self._given |= model is not None
        if model is not None:
            self._run.meet(model)
        for optimizer in optimizers:
            self._run.meet_optimizer(optimizer)
        self._trace.met(state_of(model, optimizers))

    @property
    def report(self) -> Report | None:
        """The diagnosis; None as long as nothing is sick."""
        return self._judge.report

    @property
    def trained(self) -> bool:
        """Whether a backward or an optimizer's step has been seen."""
        return self._backwards > 0 or bool(self._run.optimizers)

    # -- events of the loop ----------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: Any, outermost: bool) -> str | None:  # noqa: FBT001 - the trace's seam
        """Returns the name of a module that is called; an unknown model becomes part of the run."""
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
        return name  # None: modules of the loss have no tensors, and count as loss code

    def _backward(self, backward: Backward, run: Callable[[], Any]) -> Any:
        roots, inputs, accumulated = backward.roots, backward.inputs, backward.accumulated
        if in_backward() and self._running is not None and accumulated:  # a checkpointed part
            self._running.leaves += leaves_of(roots, inputs)
        if in_backward() or self._run.events.part is not None:  # not the loss of a step
            return run()
        self._backwards += 1
        self._hooks.hang()  # a test that clears its hooks may have cleared ours
        trained = [] if accumulated else self._run.parameters_among(inputs)
        if self._trace.idle or not (accumulated or trained):  # gradients of an input: a penalty, a saliency map
            return run()
        self._updates = True
        self._undecided.next_backward()
        # more than one element: a test's own gradient, not a loss
        losses = [root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1]
        leaves = leaves_of(roots, inputs) if accumulated else [t for t in trained if t.is_leaf]
        self._running = spread = self._spread("the loss", "loss", losses, leaves)

        try:
            gradients = run()
            if spread is None and not accumulated:
                self._spread("the gradients", "grad:?", [g for g in gradients if g is not None], leaves)
            return gradients
        finally:
            self._running = None
            if spread is not None:
                spread.over(accumulated=accumulated)
                seen = self._trace.behind("gradients", spread.put)
                spread.origins |= seen[1] if seen else frozenset()

    def _spread(
        self, what: str, sink: str, tensors: Iterable[torch.Tensor], leaves: list[torch.Tensor]
    ) -> NonFiniteBackward | None:
        """Records a backward's non-finite tensors; reports the state instead where the loop's code broke it by hand."""
        seen = self._trace.behind(sink, tensors)
        if seen is None:
            return None
        if self._trace.harm_state():
            self._judge.sick(self._judge.births(), "the state")
            return None
        trace, origins = seen
        births = culprits(trace)
        overflowed = any(b.where.phase == "scaler" for b in births) or self._judge.curable(births, sink)
        curable = self._run.events.scale() is not None and bool(births) and overflowed
        spread = NonFiniteBackward(what=what, births=births, origins=origins, curable=curable, leaves=leaves)
        self._undecided.add(spread)
        return spread

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if under_fake_tensors():
            return None
        self._meet_optimizer(optimizer)
        outside = self._run.events.before_step(optimizer, args, kwargs)
        if not bool(getattr(optimizer, "found_inf", False)):  # a fused optimizer is always called, and skips by itself
            self._stepped = optimizer
            self._judge_use(optimizer)
            if not self._note_gradients(optimizer):
                self._judge.called(self._run.events.events[-1])
        return outside

    def _meet_optimizer(self, optimizer: Any) -> None:
        if not self._run.knows_optimizer(optimizer):
            self._run.meet_optimizer(optimizer)
            if not self._trace.idle:
                self._trace.met(state_of(None, [optimizer]))

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._run.events.after_step(optimizer)
        if self._trace.idle or self._stepped is not optimizer:
            return
        self._judge_use(optimizer)  # a closure's backward has run only now
        self._note_gradients(optimizer)
        self._trace.harm_state()
        trace = self._trace.gathered()
        if any(birth.harms for birth in trace.births) or trace.unattributed:
            past_scaler = self._asked is not optimizer
            self._judge.sick(self._judge.births(), "the state after the step", past_scaler=past_scaler)
            return
        self._judge.stepped(self._run.meet_optimizer(optimizer))
        self._next(optimizer)

    def calls(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002 - the seam's signature
        """As in `ScalerCallbacks`."""
        if hasattr(optimizer, "param_groups") and not under_fake_tensors():
            self._meet_optimizer(optimizer)

    def noted(self, event: StepEvent) -> None:
        """As in `ScalerCallbacks`."""
        if event.kind != "optimizer_step":  # there the gradients are checked first
            self._judge.called(event)

    @contextmanager
    def asking(self, event: StepEvent, optimizer: Any) -> Iterator[None]:
        """As in `ScalerCallbacks`: the scaler has skipped the step if the optimizer was not called by the end."""
        self._asked, self._stepped = optimizer, None
        yield
        self._asked = None
        if optimizer is None or self._stepped is optimizer or self._trace.idle:
            return
        self._judge.skipped += 1
        self._judge_use(optimizer, skipped=True)
        self._note_gradients(optimizer)
        self._judge.skips(event)
        if not self._trace.idle:
            self._next(optimizer)

    def _judge_use(self, optimizer: Any, *, skipped: bool = False) -> None:
        """Reports non-finite gradients that a step uses; a scaler may skip curable ones."""
        spread = None if self._trace.idle else self._undecided.used_by(optimizer)
        if spread is not None and not (skipped and spread.curable):
            self._judge.uses(spread, past_scaler=self._asked is not optimizer)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Records the non-finite gradients; False where all are finite."""
        if self._trace.idle:
            return False
        names = self._run.parameter_names()
        held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = [self._trace.harm(f"grad:{names.get(id(p), '?')}", gradient) for p, gradient in held]
        return any(found)

    def _next(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._run.meet_optimizer(optimizer)
        self._run.steps[name] += 1
        self._run.events.next_step(name)
        self._undecided.next_step()
        self._trace.next_step(self._run.step)

    def _ended(self) -> None:
        """Judges, after the loop, gradients that no step has used or that the loop applied itself."""
        if self._trace.idle or not (self._given or self._updates or self._run.optimizers):
            return
        stepped = any(self._run.steps.values())
        spread = self._undecided.left(self._trace.asked, stepped=stepped)
        if spread is not None:
            self._judge.uses(spread)
        elif not stepped:
            self._judge.unused_gradients()
        self._judge.last_state(trained=self._updates or stepped)
