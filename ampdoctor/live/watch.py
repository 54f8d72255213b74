"""`StepWatch`: looks on while somebody else's training loop runs, and says what went non-finite, where and why.

The loop runs once and is not ours to run again, so that each of its ops is traced from the first on. What is sick is
decided as in `bisect-nan` (a birth, and a path from it to a loss whose gradients are used, to gradients that an
optimizer uses, or to the state after a step); only that a cure is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.diagnosis.replay.causes import culprits
from ampdoctor.evidence.of_runs.trace import StepEvent
from ampdoctor.evidence.report import Report
from ampdoctor.hooks.callbacks import OptimizerHooks
from ampdoctor.hooks.process_state import no_anomaly_mode, no_fast_path, unwarned_of_hooks
from ampdoctor.hooks.scaler_events import Listener
from ampdoctor.hooks.torch_internals import Backward, in_backward, seen_backwards, under_fake_tensors
from ampdoctor.live.judge import LiveJudge, Sick
from ampdoctor.live.run import LiveRun, has_state, state_of
from ampdoctor.live.trace import LiveTrace
from ampdoctor.live.undecided import Spread, Undecided, leaves_of
from ampdoctor.package import working_folder
from ampdoctor.probes.ops.source import shown_from

if TYPE_CHECKING:
    from torch import nn


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
