"""`StepWatch`: watches somebody else's training loop op by op, and says what went non-finite, where and why.

The loop runs once and cannot be run again, so each of its ops is traced from the first on. What is sick is decided as
in `bisect-nan`: a value that became non-finite, and a path from it to a loss whose gradients are used, to gradients
that an optimizer uses, or to the state after a step. No cure is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.nonfinite import (
    STATE,
    Cause,
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
from ampdoctor.evidence.report import ErrorNote, Finding, Report
from ampdoctor.evidence.trace import Birth, Sightings, StepEvent
from ampdoctor.hooks.callbacks import OptimizerHooks
from ampdoctor.hooks.interfaces import describe
from ampdoctor.hooks.process_state import no_anomaly_mode, no_fast_path, unwarned_of_hooks
from ampdoctor.hooks.scaler_events import Listener
from ampdoctor.hooks.torch_internals import Backward, in_backward, seen_backwards, under_fake_tensors, unseen
from ampdoctor.live.live_trace import LiveRun, LiveTrace, has_state, state_of
from ampdoctor.package import working_folder
from ampdoctor.probes.tensor_memory import NONE, Births
from ampdoctor.probes.user_code import as_source, shown_from, user_line

if TYPE_CHECKING:
    from torch import nn


# Backwards that spread what is not finite: no harm is done before the loop uses it, and it may leave that step out.


@dataclass(slots=True, kw_only=True)
class Spread:
    """What one backward spread.

    Attributes:
        what: What of it was not finite, in words.
        births: Why, worst first.
        origins: How the trace numbers, in this step, those and what its gradients descend from.
        curable: A lower loss scale may take it away.
        leaves: The tensors whose gradients it is.
        gradients: Where it has put them, by `id` of the leaf; nothing where it handed them out. None while it runs.
        passed_over: A step was taken since, and did not use them.
    """

    what: str
    births: tuple[Birth, ...]
    origins: Births = NONE
    curable: bool = False
    leaves: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] | None = None
    passed_over: bool = False
    _zero: frozenset[int] = frozenset()  # the leaves whose gradients were so before anybody cleared them

    def over(self, *, accumulated: bool) -> None:
        """The backward has come to its end."""
        self.gradients = {id(leaf): leaf.grad for leaf in self.leaves if accumulated and leaf.grad is not None}
        self._zero = frozenset(key for key, gradient in self.gradients.items() if _is_zero(gradient))

    @property
    def put(self) -> Iterable[torch.Tensor]:
        """The gradients, where it has put them somewhere."""
        return (self.gradients or {}).values()

    def reaches(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Its gradients are there for these tensors to be updated with."""
        own = {id(leaf) for leaf in self.leaves}
        return self.gradients is None or any(id(t) in own and self._is_there(t) for t in tensors)

    @property
    def cleared(self) -> bool:
        """Its gradients were put somewhere, and are there no more."""
        return bool(self.gradients) and not any(map(self._is_there, self.leaves))

    def _is_there(self, leaf: torch.Tensor) -> bool:
        if not self.gradients:
            return True  # handed out: nobody sees what becomes of them
        gradient = self.gradients.get(id(leaf))
        return gradient is not None and leaf.grad is gradient and (id(leaf) in self._zero or not _is_zero(gradient))


class Undecided:
    """Those of which the loop has not shown yet whether it uses them."""

    def __init__(self) -> None:
        self._open: list[Spread] = []

    def add(self, spread: Spread) -> None:
        """A backward begins, or is found to have spread something."""
        self._open.append(spread)

    def next_backward(self) -> None:
        """The loop goes on: it has left out what it has cleared, and what it was handed and did not step with."""
        self._open = [spread for spread in self._open if spread.gradients and not spread.cleared]

    def next_step(self) -> None:
        """A step was taken that used none of it."""
        for spread in self._open:
            spread.passed_over, spread.origins = True, NONE

    def used_by(self, optimizer: Any) -> Spread | None:
        """The first of which a step of this optimizer makes use."""
        held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
        return next((spread for spread in self._open if spread.reaches(held)), None)

    def left(self, asked: Births, *, stepped: bool) -> Spread | None:
        """The first that the loop did not leave out, now that it is over.

        Where nothing follows, a step that is left out and a test that takes no steps look alike. It is left out where
        the loop takes steps otherwise and has looked.

        Args:
            asked: What the code has looked at.
            stepped: An optimizer has taken steps.
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
    """The tensors that a backward gives gradients: its inputs where it names them, else the leaves of its graph."""
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


# What it means that something of a watched loop is not finite, or that its calls break the scaler's protocol.


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


class StepWatch(Listener):
    """Watches a loop for as long as `watching` lasts, up to its first sick step.

    Args:
        on_sick: Told the diagnosis.
        max_skipped: Steps that a GradScaler may skip in all; None: as many as it takes to settle. It settles where the
            scale comes down and a scale of at least 1 fits the gradients.
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
        """The loop has these parts, which it would show only when it uses them."""
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

    def _backward(self, backward: Backward, run: Callable[[], Any]) -> Any:
        """A backward runs, and what it returns is handed on."""
        roots, inputs, accumulated = backward.roots, backward.inputs, backward.accumulated
        if in_backward() and self._running is not None and accumulated:  # of a checkpointed part
            self._running.leaves += leaves_of(roots, inputs)
        if in_backward() or self._run.events.part is not None:  # no step's loss
            return run()
        self._backwards += 1
        self._hooks.hang()  # a test may have cleared them with its own
        trained = [] if accumulated else self._run.parameters_among(inputs)
        if self._trace.idle or not (accumulated or trained):  # gradients of an input: a penalty, a saliency map
            return run()
        self._updates = True
        self._undecided.next_backward()
        # more than one element is a test's own gradient, and no loss
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
    ) -> Spread | None:
        """Note what is not finite of a backward; unless the state has become so since the last step, by hand."""
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
        self._judge_use(optimizer)  # what a closure spread is there only now
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
        """As in `Listener`."""
        if hasattr(optimizer, "param_groups") and not under_fake_tensors():
            self._meet_optimizer(optimizer)

    def noted(self, event: StepEvent) -> None:
        """As in `Listener`."""
        if event.kind != "optimizer_step":  # of which the gradients are looked at first
            self._judge.called(event)

    @contextmanager
    def asking(self, event: StepEvent, optimizer: Any) -> Iterator[None]:
        """As in `Listener`: the scaler has skipped the step where the optimizer has not taken it by the end."""
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
        """A step is taken, or skipped by a scaler: what it is taken with has to come of a finite loss."""
        spread = None if self._trace.idle else self._undecided.used_by(optimizer)
        if spread is not None and not (skipped and spread.curable):
            self._judge.uses(spread, past_scaler=self._asked is not optimizer)

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note those that are not finite; False where all are."""
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
        """The loop is over: what was not used by then, or was updated by hand, is judged now."""
        if self._trace.idle or not (self._given or self._updates or self._run.optimizers):
            return
        stepped = any(self._run.steps.values())
        spread = self._undecided.left(self._trace.asked, stepped=stepped)
        if spread is not None:
            self._judge.uses(spread)
        elif not stepped:
            self._judge.unused_gradients()
        self._judge.last_state(trained=self._updates or stepped)
