"""`StepRecorder`: records the running step by reference, so that it can be run again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from ampdoctor.hooks.backwards import UsedGradients, mark_scaled, parameters_of, scaled_within
from ampdoctor.hooks.callbacks import Clip, NumberReads
from ampdoctor.hooks.interfaces import harmless_until
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Instruction,
    Line,
    Program,
    Reference,
    ResultRef,
    Scaled,
    Unscaled,
    results,
)
from ampdoctor.hooks.torch_internals import Backward as SeenBackward
from ampdoctor.hooks.torch_internals import in_backward, seen_backwards, transforms, under_fake_tensors, unseen
from ampdoctor.live.recording.journal import MOST, Gradients, RecordedInstructions, prefixed, together
from ampdoctor.live.recording.models import SEVERAL, OutermostModels, Trainers
from ampdoctor.live.recording.programs import KeptUpdate, StepPrograms, with_changed_buffers
from ampdoctor.live.recording.samples import GradientSamples, HandUpdates
from ampdoctor.live.recording.tape import Buffers, around_each, holds_nonfinite, is_about_numbers, mode_now
from ampdoctor.probes.user_code import user_line

_NODES = 256
"""Nodes of a loss's graph that are searched for an earlier scaling; the ops on a loss are a few dozen."""


_harmless = harmless_until("away", "fail")
"""The first error ends the recording."""


class StepRecorder:
    """Records the steps of a loop."""

    def __init__(self) -> None:
        self.models = OutermostModels(self)
        self.backwards = 0  # since the last update
        self.away = False  # the code that runs is not the loop's
        self.listener: Any = None  # a `TrainingWatcher`: gets `entering`, `left` and `returned`
        # called with parameters whose gradients are about to be cleared, or (True) were cleared by the loop's own code
        self.cleared: Callable[[Iterable[torch.Tensor], bool], None] | None = None
        self.failed: str | None = None  # what ended the recording
        self.used = UsedGradients()  # the gradients that an optimizer has used, on any thread
        self.samples = GradientSamples()  # in a loop that scales its losses
        self.reads = NumberReads()  # the numbers that the loop has read since its `unscale_`
        self.by_hand = HandUpdates(self.names, self.fail)  # in a loop that no optimizer has stepped yet
        self.follows_reads = False  # numbers that are read after a backward count as well
        self.scaled_again: Line = None  # where a loss with an already scaled part was scaled, since the last update
        self._scales = False
        self._left_out: tuple[Program, int] | None = None  # the program behind a number, and the count at that time
        self._calls = 0
        self._gradients = Gradients(self.models)
        self._journal = RecordedInstructions(self._gradients, self.fail, self._asked)
        self._tape = self._journal.tape
        self._programs = StepPrograms(self._journal, self._gradients, self.models)
        self._buffers = Buffers()
        self._process = os.getpid()
        self._trainers = Trainers()
        self._raised: tuple[Call, dict[str, torch.Tensor]] | None = None  # the last call, if it raised
        self._entering: tuple[RandomState, Any, bool, dict[str, torch.Tensor], Line] | None = None
        self._losses: list[tuple[int, list[torch.Tensor]]] = []  # of backwards since the last update: moment, losses
        self._scaled_losses: dict[int, torch.Tensor] = {}  # by number of the scaled loss; not differentiated yet
        self._prefixes: list[tuple[str, weakref.ref[nn.Module]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records steps inside, and removes all hooks afterwards."""
        with ExitStack() as stack:
            stack.callback(self._let_go)
            stack.enter_context(self.models.watching())
            stack.enter_context(self.used.watching())
            stack.enter_context(seen_backwards(self._backward))
            # a mode cannot be left from within itself: it is left before a backward reaches it
            stack.enter_context(around_each((torch.Tensor, torch.autograd), "backward", self._in_backward))
            stack.enter_context(around_each((nn.Module, torch.optim.Optimizer), "zero_grad", self._zeroing))
            stack.enter_context(around_each((nn.utils, clip_grad), "clip_grad_norm_", self._asleep))
            yield

    def _let_go(self) -> None:
        """Releases everything of the loop, even if this recorder lives on."""
        self._tape.close()
        self._journal.clear()
        self._losses.clear()
        self._scaled_losses.clear()
        self._left_out = None
        self.samples.clear()
        self.stop_observing()
        self._entering = self._raised = self.listener = self.cleared = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Does not record functions inside: those of a scaler, an optimizer, or ours."""
        opened = self._tape.is_open
        self._tape.close()
        try:
            yield
        finally:
            if opened:
                self._tape.open()

    # -- calls -------------------------------------------------------------------------------------------------------

    @_harmless
    def entered(self, module: nn.Module) -> None:
        """Called before an outermost model runs, under autograd."""
        if module.training:
            self._trainers.called()
        if self._is_elsewhere():
            return
        self.rest()
        self._raised = None
        self._name()
        if self.listener is not None:
            self.listener.entering(module)
        self._entering = RandomState.capture(), mode_now(), module.training, self._buffers.now(), user_line()

    @_harmless
    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Called after an outermost model has run; `output` is None where it raised."""
        if self._is_elsewhere() or self._entering is None:
            return
        if self.listener is not None:
            self.listener.left()
        name = self.name_of(module)
        (random, mode, training, buffers, line), self._entering = self._entering, None
        if name is None:
            return
        call = Call(
            model=name,
            args=self._tape.references(args),
            kwargs=self._tape.references(kwargs),
            results={} if output is None else self._tape.make(output),
            mode=mode,
            random=random,
            training=training,
            line=line,
        )
        if output is None:
            self._raised = call, buffers
            return
        self._journal.add(call, buffers=buffers)
        if self.listener is not None:
            self.listener.returned(module, name, self._calls, given=(args, kwargs), output=output)
        self._calls += 1
        self._tape.open()
        self._journal.spare()

    def fail(self, error: Exception) -> None:
        """Ends the recording because of this error."""
        self._end(f"{type(error).__name__}: {error}".splitlines()[0])

    def _end(self, why: str) -> None:
        self.failed = self.failed or why
        self.away = True
        self._losses.clear()
        self._tape.close()

    @property
    def is_crowded(self) -> bool:
        """Whether another thread is in the middle of a step: nothing may be run again beside it."""
        return self._trainers.crowded()

    def trains(self) -> bool:
        """Registers that this thread runs a backward or is about to update; returns whether its steps are recorded."""
        self._trainers.trains()
        if self._trainers.several and self.failed is None:
            self._end(SEVERAL)
        return not self._is_elsewhere()

    def _is_elsewhere(self) -> bool:
        """Whether the running code is not the loop's, or runs on another thread than the one that trains."""
        return self.away or os.getpid() != self._process or not self._trainers.is_recorded()

    def names(self) -> Mapping[int, str]:
        """Returns the names of parameters and buffers, by their id."""
        self._name()
        return self._tape.names

    def _name(self) -> None:
        """Names parameters and buffers again if a model was added."""
        roots = self.models.roots
        if [id(root) for _, root in roots] != [id(there()) for _, there in self._prefixes]:
            self._rename()
            self._prefixes = [(prefix, weakref.ref(root)) for prefix, root in prefixed(roots)]
            model = together(roots)
            self._tape.hold([*model.named_parameters(), *model.named_buffers()])
            self._buffers.watch(model)

    def _rename(self) -> None:
        """Renames models in earlier instructions: a new model may change the names of the others."""
        new = [(old, self.name_of(there)) for old, root in self._prefixes if (there := root()) is not None]
        changed = [(old, name) for old, name in new if name is not None and name != old]
        if not changed:
            return

        def renamed(name: str) -> str:
            for old, now in changed:
                if not old or name == old or name.startswith(f"{old}."):
                    return ".".join(part for part in (now, name[len(old) :].lstrip(".")) if part)
            return name

        self._journal.rename(renamed)

    def name_of(self, module: nn.Module) -> str | None:
        """Returns the name of a model, or of its submodule, in the loop; None for an unknown one."""
        for prefix, root in prefixed(self.models.roots):
            for name, part in root.named_modules():
                if part is module:
                    return ".".join(piece for piece in (prefix, name) if piece)
        return None

    # -- backwards ---------------------------------------------------------------------------------------------------

    def scaled(self, losses: Any, run: Callable[[], Any]) -> Any:
        """Records that a scaler scales one loss or several."""
        with self.pausing():
            scaled = run()
        if not self._is_elsewhere():
            self._scaled(losses, scaled)
        return scaled

    @_harmless
    def _scaled(self, losses: Any, scaled: Any) -> None:
        self._scales = True
        for loss, result in _pairs(losses, scaled):
            if result.grad_fn is not None and not transforms():
                if scaled_within(loss, most=_NODES):
                    self.scaled_again = user_line()
                mark_scaled(result)
            taken, made = self._tape.reference(loss), self._tape.make(result)[""]
            self._scaled_losses[made.index] = loss.detach()
            self._journal.add(Scaled(loss=taken, result=made, line=user_line()))

    def _backward(self, seen: SeenBackward, run: Callable[[], Any]) -> Any:
        self.used.engine_runs()
        if in_backward() or transforms() or os.getpid() != self._process:
            return run()
        if not seen.accumulated:  # also by compilers, of tensors of their own
            result = run()
            if any(id(one) in self._tape.names for one in seen.inputs) and not under_fake_tensors():
                self._follows()
            return result
        self._begins(seen)
        result = run()
        self._has_run()
        return result

    def _in_backward(self, _: Any, run: Callable[[], Any]) -> Any:
        self._tape.close()
        return run()

    @_harmless
    def _begins(self, seen: SeenBackward) -> None:
        if not self.trains():
            return
        self._tape.close()
        if not self.is_crowded:
            for owner in self._gradients.emptied():
                self._zeroed(owner, by_hand=True)
            self._gradients.find_edited()
        self.backwards += 1
        roots = [root for root in seen.roots if isinstance(root, torch.Tensor)]
        name = self._tape.reference
        losses = [loss for root in roots for loss in self._losses_of(root, name(root))]
        self._losses.append((self._journal.count, losses))
        del self._losses[:-MOST]
        self._journal.add(
            Backward(
                roots=tuple(map(name, roots)),
                seeds=tuple(None if s is None else name(s) for s in seen.seeds[: len(roots)]),
                inputs=tuple(name(t) for t in seen.inputs if isinstance(t, torch.Tensor)),
                kept=seen.kept,
                mode=mode_now(),
                line=user_line(),
            )
        )
        if self._left_out is not None:
            behind = self._journal.sliced([len(self._tape.instructions) - 1])
            moments = [self._journal.moment(one) for one in behind if isinstance(one, Call)]
            if any(moment < self._left_out[1] for moment in moments):  # the loop uses the earlier call after all
                self._left_out = None

    @_harmless
    def _has_run(self) -> None:
        """Records that a backward has added to gradients; while another thread runs one, torch forbids reading them."""
        if self._is_elsewhere() or self.is_crowded:
            self._gradients.unreadable()
        else:
            self._gradients.filled()
            if self._scales:
                self.samples.left(self._gradients.owners())
        self._follows()

    @_harmless
    def _follows(self) -> None:
        """Observes what the loop does after a backward, on the thread that is recorded."""
        if self._is_elsewhere():
            return
        if self.follows_reads:
            self.reads.listen()
        if not self._gradients.are_updated:
            self.by_hand.listen()

    def _losses_of(self, root: torch.Tensor, reference: Reference) -> list[torch.Tensor]:
        """The losses behind a backward's root, before they were scaled."""
        if isinstance(reference, ResultRef) and self._scaled_losses:
            if reference.index in self._scaled_losses:
                return [self._scaled_losses.pop(reference.index)]
            instructions = self._tape.instructions
            made = {one.index: place for place, each in enumerate(instructions) for one in results(each)}
            behind = self._journal.sliced([made[reference.index]]) if reference.index in made else []
            scaled = [one.result.index for one in behind if isinstance(one, Scaled)]
            if any(index in self._scaled_losses for index in scaled):
                return [self._scaled_losses.pop(index) for index in scaled if index in self._scaled_losses]
        return [root.detach()] if root.numel() == 1 else []

    def losses(self, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """Returns the losses behind an optimizer's gradients (None: all): detached, and before a scaler scaled them."""
        begun = self._adding_up(optimizer)
        losses = [loss for count, losses in self._losses if begun is None or count in begun for loss in losses]
        return [*losses, *self._scaled_losses.values()]

    def micro_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns how many backwards an optimizer's gradients add up; all since the last update without a clearing."""
        begun = self._adding_up(optimizer)
        return self.backwards if begun is None else sum(count in begun for count, _ in self._losses)

    def _adding_up(self, optimizer: Any) -> set[int] | None:
        """The moments at which the backwards of an optimizer's gradients began; None for all since the last update."""
        first = self._losses[0][0] if self._losses else self._journal.count
        if not self._gradients.were_cleared_after(first):
            return None
        owner = optimizer if optimizer is not None and self._programs.is_reached(optimizer) else None
        return {self._journal.moment(self._tape.instructions[place]) for place in self._programs.wanted(owner)}

    def unedited(self, optimizer: Any) -> int:
        """Returns how many of an optimizer's gradients the loop's own code has not changed since the last backward."""
        self._gradients.find_edited()
        held = (p for p in parameters_of(optimizer) if p.grad is not None)
        return sum(not self._gradients.is_edited(id(p)) for p in held)

    def of_scaled(self, optimizer: Any) -> list[Instruction]:
        """The backwards of an optimizer's gradients and later changes to these; [] where a loss was not scaled."""
        instructions = self._tape.instructions
        if self._is_elsewhere() or not any(isinstance(one, Scaled) for one in instructions):
            return []
        if not self._programs.is_reached(optimizer):
            return []
        wanted = self._programs.wanted(optimizer)
        backwards = [place for place in wanted if isinstance(instructions[place], Backward)]
        scaled = (any(isinstance(one, Scaled) for one in self._journal.sliced([place])) for place in backwards)
        return [instructions[place] for place in wanted] if backwards and all(scaled) else []

    def rest(self) -> None:
        """Stops recording functions until a model is called again."""
        self._tape.close()
        self.stop_observing()

    def stop_observing(self) -> None:
        """Stops observing what the loop does after a backward."""
        self.reads.rest()
        self.by_hand.rest()

    # -- updates -----------------------------------------------------------------------------------------------------

    @_harmless
    def unscaling(self, optimizer: Any) -> None:
        """Called before a scaler unscales an optimizer's gradients."""
        if not self.is_crowded:
            self._gradients.find_edited()
            self.samples.unscaling(optimizer)

    @_harmless
    def unscaled(self, optimizer: Any) -> None:
        """Called after a scaler has unscaled an optimizer's gradients."""
        if self._is_elsewhere():
            return
        self._gradients.left()
        if hasattr(optimizer, "param_groups"):
            self.samples.left([optimizer])
        self._journal.add(Unscaled(line=user_line()), optimizer=id(optimizer))

    @_harmless
    def clipped(self, clip: Clip) -> None:
        """Called before gradients are clipped."""
        self.used.clipped(clip.gradients)
        if not self._is_elsewhere():
            self._gradients.find_edited()
            self._gradients.clipped(clip.gradients)
            held, norm_type = self._tape.parameters(clip.parameters), clip.norm_type or 2.0
            self._journal.add(Clipped(parameters=held, max_norm=clip.max_norm, norm_type=norm_type, line=user_line()))

    def program(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        name: str = "",
        scaler: Any = None,
        step: int,
        root: torch.Tensor | None = None,
        raised: Call | None = None,
    ) -> Program:
        """Returns the running step before its update; without an optimizer it leads up to `root` or to `raised`."""
        return with_changed_buffers(
            self._programs.program(
                optimizer, name=name, scaler=scaler, step=step, root=root, raised=raised, failed=self.failed
            )
        )

    def keepable(self, optimizer: torch.optim.Optimizer, *, name: str, scaler: Any, step: int) -> KeptUpdate:
        """As `program`, to be kept after the update; does not wait for a device."""
        program = self._programs.program(optimizer, name=name, scaler=scaler, step=step, failed=self.failed)
        return KeptUpdate.of(program, prefixed(self.models.roots))

    def kept(self, update: KeptUpdate) -> Program | None:
        """Returns the step of a kept update; None where its models or optimizer are gone, or have other names now."""
        roots = self.models.roots
        found = update.program_of(together(roots), prefixed(roots)) if roots else None
        return None if found is None else with_changed_buffers(found)

    @_harmless
    def _asked(self, tensor: torch.Tensor) -> None:
        """Called when the loop reads a number: where it is not finite, the loop may leave out the step."""
        if self._is_elsewhere() or self._left_out is not None:
            return
        lost = self._journal.lost_behind(tensor)
        calls = [] if lost is None else self._journal.calls_behind(lost)
        if any(call.training for call in calls):
            self._left_out = self.program(step=0, root=lost), self._journal.count

    def left_out(self, step: int) -> Program | None:
        """Returns, once, the training-mode calls behind a NaN or +Inf that the loop has read and then left out."""
        left, self._left_out = self._left_out, None
        return None if left is None else replace(left[0], step=step)

    def ended(self, step: int) -> Program | None:
        """Returns the running step if a loss of it is not finite; waits for a device."""
        with unseen():
            sick = any(not bool(loss.isfinite().all()) for loss in self.losses(None))
        return self.program(step=step) if sick else None

    def interrupted(self, error: BaseException, step: int) -> Program | None:
        """Returns the step up to a forward that returned, or was about to return, non-finite values; waits."""
        about_numbers = is_about_numbers(error)
        root = self._journal.last_nonfinite(signed=about_numbers)
        if root is not None:
            return self.program(step=step, root=root)
        if self._raised is None or not (about_numbers or holds_nonfinite(error)):
            return None
        call, buffers = self._raised
        self._journal.add(call, buffers=buffers)
        return self.program(step=step, raised=call)

    @_harmless
    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer has stepped or was held back; forgets what cannot be used any more."""
        elsewhere = self._is_elsewhere()
        self._trainers.updated()
        if elsewhere:
            return
        self._tape.close()
        self._losses.clear()
        self._scaled_losses.clear()
        self._raised = None
        self._gradients.updated(optimizer, self._journal.count)
        self.samples.updated(optimizer)
        self.scaled_again = None
        self.models.left_behind()
        self.backwards = self._calls = 0
        self._journal.updated()

    def _zeroing(self, owner: Any, run: Callable[[], Any]) -> Any:
        self._zeroed(owner)
        return self._asleep(owner, run)

    def _asleep(self, _: Any, run: Callable[[], Any]) -> Any:
        """Calls a function that asks for each parameter's gradient; what it does is an event of its own."""
        if torch.compiler.is_compiling() or not self._tape.is_open:
            return run()
        self._tape.close()
        try:
            return run()
        finally:
            self._tape.open()

    @_harmless
    def _zeroed(self, owner: Any, *, by_hand: bool = False) -> None:
        if self._is_elsewhere():
            return
        if self.cleared is not None:
            self.cleared(parameters_of(owner), by_hand)
        self._gradients.cleared(owner, self._journal.count)


def _pairs(losses: Any, scaled: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each loss with its scaled loss; an iterator is used up by then, and gives none."""
    if isinstance(losses, torch.Tensor):
        yield losses, scaled
    elif isinstance(losses, list | tuple):
        for loss, result in zip(losses, scaled, strict=True):
            yield from _pairs(loss, result)
