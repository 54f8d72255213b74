"""`StepRecorder`: keeps what the running step is made of, so that it can be run again.

Nothing is copied but buffers that a call changes and the random state: what entered a model is kept by reference until
the optimizer has stepped.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import nn

from ampdoctor.hooks.backwards import UsedGradients, mark_scaled, scaled_within
from ampdoctor.hooks.callbacks import NumberReads
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Held,
    Instruction,
    Line,
    Made,
    Program,
    Reference,
    Scaled,
    Unscaled,
    results,
)
from ampdoctor.hooks.torch_internals import Backward as SeenBackward
from ampdoctor.hooks.torch_internals import in_backward, seen_backwards, transforms, unseen
from ampdoctor.live.recording.journal import MOST, Gradients, Journal, parameters_of, prefixed, sliced, together
from ampdoctor.live.recording.models import SEVERAL, OutermostModels, Trainers
from ampdoctor.live.recording.programs import KeptUpdate, StepPrograms, with_changed_buffers
from ampdoctor.live.recording.samples import GradientSamples
from ampdoctor.live.recording.tape import (
    Buffers,
    before_backwards,
    holds_nonfinite,
    is_about_numbers,
    mode_now,
    told_of_zeroed,
)
from ampdoctor.probes.user_code import user_line

P = ParamSpec("P")
_NODES = 256
"""Of a loss's graph that are searched for a loss that was scaled before: what is done to a loss is a few dozen."""


def _harmless(
    method: Callable[Concatenate[StepRecorder, P], None],
) -> Callable[Concatenate[StepRecorder, P], None]:
    """The method raises nothing into the loop: at the first error the recording ends."""

    @functools.wraps(method)
    def guarded(self: StepRecorder, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.away:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.fail(error)

    return guarded  # type: ignore[return-value]  # a method stays one


class CallListener(Protocol):
    """Told of the calls that are recorded: what wants to know of them takes no hooks of its own."""

    def entering(self, model: nn.Module) -> None:
        """The model is about to run."""

    def left(self) -> None:
        """It has run, or raised."""

    def returned(self, model: nn.Module, name: str, call: int, *, given: tuple[Any, Any], output: Any) -> None:
        """It has returned, at its call of this number in the step, from 0; it was given these arguments."""


class StepRecorder:
    """Records the steps of a loop.

    Attributes:
        models: The loop's models.
        backwards: How many backwards there were since the last update.
        away: What runs is not the loop's.
        listener: Told of the models' calls.
        cleared: Told of the parameters whose gradients are about to be cleared, or (True) were, by the loop's own hand.
        stay: Puts hooks back that a program has cleared with its own; called where a loop shows itself by other ways.
        failed: What ended the recording; None while all is well.
        used: Which gradients an optimizer has used, on whichever thread.
        samples: Of gradients, in a loop that scales its losses.
        reads: What the loop has read since it had its gradients unscaled.
        scaled_again: Where a loss was scaled of which a part was scaled already, since the last update; None for none.
    """

    def __init__(self) -> None:
        self.models = OutermostModels(self)
        self.backwards = 0
        self.away = False
        self.listener: CallListener | None = None
        self.cleared: Callable[[list[torch.Tensor], bool], None] | None = None
        self.stay: Callable[[], None] | None = None
        self.failed: str | None = None
        self.used = UsedGradients()
        self.samples = GradientSamples()
        self.reads = NumberReads()
        self.scaled_again: Line = None
        self._scales = False
        self._left_out: tuple[Program, int] | None = None  # what has led to a number, and what was recorded by then
        self._calls = 0
        self._gradients = Gradients(self.models)
        self._journal = Journal(self._gradients, self.fail, self._asked)
        self._tape = self._journal.tape
        self._programs = StepPrograms(self._journal, self._gradients, self.models)
        self._buffers = Buffers()
        self._process = os.getpid()
        self._trainers = Trainers()
        self._raised: tuple[Call, dict[str, torch.Tensor]] | None = None  # the last call, where it has raised
        self._inside: tuple[nn.Module, Any, Any] | None = None  # the model that runs, and what it was given
        self._entering: tuple[RandomState, Any, bool, dict[str, torch.Tensor], Line] | None = None
        self._losses: list[tuple[int, list[torch.Tensor]]] = []  # by backward since the last update: as it began
        self._scaled_losses: dict[int, torch.Tensor] = {}  # by number of the scaled: not differentiated since
        self._prefixes: list[tuple[str, weakref.ref[nn.Module]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps are recorded; afterwards nothing is left in place."""
        with ExitStack() as stack:
            stack.callback(self._let_go)
            stack.enter_context(self.models.watching())
            stack.enter_context(self.used.watching())
            stack.enter_context(seen_backwards(self._backward))
            stack.enter_context(before_backwards(self._tape.close))
            stack.enter_context(told_of_zeroed(self._zeroed))
            yield

    def _let_go(self) -> None:
        """Nothing of the loop's is held any more, whoever holds this recorder."""
        self._tape.close()
        self._journal.clear()
        self._losses.clear()
        self._scaled_losses.clear()
        self._left_out = None
        self.samples.clear()
        self.reads.rest()
        self._entering = self._inside = self._raised = self.listener = self.cleared = self.stay = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, functions are not recorded: a scaler's, an optimizer's, ours."""
        opened = self._tape.is_open
        self._tape.close()
        try:
            yield
        finally:
            if opened:
                self._tape.open()

    # -- calls -------------------------------------------------------------------------------------------------------

    @_harmless
    def entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """As in `ModelListener`."""
        if module.training:
            self._trainers.called()
        if self._is_elsewhere():
            return
        self._tape.close()
        self.reads.rest()
        self._raised = None
        self._name()
        if self.listener is not None:
            self.listener.entering(module)
        self._entering = RandomState.capture(), mode_now(), module.training, self._buffers.now(), user_line()
        self._inside = None if kwargs is None else (module, args, kwargs)

    @_harmless
    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As in `ModelListener`."""
        if self._is_elsewhere() or self._entering is None:
            return
        self._inside = None
        if self.listener is not None:
            self.listener.left()
        name = self.name_of(module)
        call, buffers = self._call(name, args, kwargs, output)
        if call is None or name is None:
            return
        if output is None:
            self._raised = call, buffers
            return
        self._journal.called(call, buffers)
        if self.listener is not None:
            self.listener.returned(module, name, self._calls, given=(args, kwargs), output=output)
        self._calls += 1
        self._tape.open()
        self._journal.spare()

    def _call(
        self, name: str | None, args: Any, kwargs: Any, output: Any
    ) -> tuple[Call | None, dict[str, torch.Tensor]]:
        """The call that was entered last, and the buffers before it; the output is None where it has not returned."""
        entering, self._entering = self._entering, None
        if entering is None or name is None:
            return None, {}
        random, mode, training, buffers, line = entering
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
        return call, buffers

    def fail(self, error: Exception) -> None:
        """Record no more, because of this."""
        self._end(f"{type(error).__name__}: {error}".splitlines()[0])

    def _end(self, why: str) -> None:
        self.failed = self.failed or why
        self.away = True
        self._losses.clear()
        self._tape.close()

    @property
    def is_crowded(self) -> bool:
        """Whether another thread is in the midst of a step: nothing may be run again beside it."""
        return self._trainers.crowded()

    def trains(self) -> bool:
        """This thread makes a backward, or is about to make an update; returns whether its steps are recorded."""
        self._trainers.trains()
        if self._trainers.several and self.failed is None:
            self._end(SEVERAL)
        return not self._is_elsewhere()

    def _is_elsewhere(self) -> bool:
        """Whether what runs is not the loop's, or this thread another than the one that trains."""
        return self.away or os.getpid() != self._process or not self._trainers.is_recorded()

    def names(self) -> Mapping[int, str]:
        """The names of parameters and buffers, by their id."""
        self._name()
        return self._tape.names

    def _name(self) -> None:
        """Give parameters and buffers their names, where a model was met since."""
        roots = self.models.roots
        if [id(root) for _, root in roots] != [id(there()) for _, there in self._prefixes]:
            self._rename()
            self._prefixes = [(prefix, weakref.ref(root)) for prefix, root in prefixed(roots)]
            model = together(roots)
            self._tape.hold([*model.named_parameters(), *model.named_buffers()])
            self._buffers.watch(model)

    def _rename(self) -> None:
        """What was recorded before another model was met speaks of the models by the names that they have now."""
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
        """The name that a model, or a part of one, has in the loop; None for one that is not known."""
        for prefix, root in prefixed(self.models.roots):
            for name, part in root.named_modules():
                if part is module:
                    return ".".join(piece for piece in (prefix, name) if piece)
        return None

    # -- backwards ---------------------------------------------------------------------------------------------------

    def scaled(self, losses: Any, run: Callable[[], Any]) -> Any:
        """A scaler scales a loss, or several."""
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

    @_harmless
    def stays(self) -> None:
        """What a program clears with hooks of its own is put back, in the process that is watched."""
        if os.getpid() == self._process and not in_backward():
            self.models.stay()
            if self.stay is not None:
                self.stay()

    def _backward(self, seen: SeenBackward, run: Callable[[], Any]) -> Any:
        self.stays()
        self.used.engine_runs()
        if in_backward() or not seen.accumulated or transforms() or os.getpid() != self._process:
            return run()
        self._begins(seen)
        result = run()
        self._has_run()
        return result

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
            behind = sliced(self._tape.instructions, [len(self._tape.instructions) - 1])
            moments = [self._journal.moment(one) for one in behind if isinstance(one, Call)]
            if any(moment < self._left_out[1] for moment in moments):  # the loop goes on with what it had called
                self._left_out = None

    @_harmless
    def _has_run(self) -> None:
        """A backward has added to gradients. While another thread makes one, torch lets nobody read them."""
        if self._is_elsewhere() or self.is_crowded:
            self._gradients.unreadable()
        else:
            self._gradients.filled()
            if self._scales:
                self.samples.left(self._gradients.owners())

    def _losses_of(self, root: torch.Tensor, reference: Reference) -> list[torch.Tensor]:
        """What a backward from here differentiates, before a scaler has scaled it, or a part of that was taken."""
        if isinstance(reference, Made) and self._scaled_losses:
            if reference.index in self._scaled_losses:
                return [self._scaled_losses.pop(reference.index)]
            instructions = self._tape.instructions
            made = {one.index: place for place, each in enumerate(instructions) for one in results(each)}
            behind = sliced(instructions, [made[reference.index]]) if reference.index in made else []
            scaled = [one.result.index for one in behind if isinstance(one, Scaled)]
            if any(index in self._scaled_losses for index in scaled):
                return [self._scaled_losses.pop(index) for index in scaled if index in self._scaled_losses]
        return [root.detach()] if root.numel() == 1 else []

    def losses(self, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
        """What the gradients that an optimizer holds came of, detached, unscaled where a scaler was told.

        Args:
            optimizer: Whose; None for all.
        """
        begun = self._adding_up(optimizer)
        losses = [loss for count, losses in self._losses if begun is None or count in begun for loss in losses]
        return [*losses, *self._scaled_losses.values()]

    def micro_steps(self, optimizer: torch.optim.Optimizer) -> int:
        """How many backwards an optimizer's gradients add up, or another's beside it, since the last update."""
        begun = self._adding_up(optimizer)
        return self.backwards if begun is None else sum(count in begun for count, _ in self._losses)

    def _adding_up(self, optimizer: Any) -> set[int] | None:
        """When the backwards began whose gradients an optimizer holds; None for all since the last update.

        A loop that leaves a batch out by itself clears the gradients after its backward.
        """
        first = self._losses[0][0] if self._losses else self._journal.count
        if not self._gradients.were_cleared_after(first):
            return None
        owner = optimizer if optimizer is not None and self._programs.is_reached(optimizer) else None
        return {self._journal.moment(self._tape.instructions[place]) for place in self._programs.wanted(owner)}

    def still_scaled(self, optimizer: Any) -> int:
        """How many of an optimizer's gradients are as backwards of scaled losses alone have left them."""
        places = self._of_scaled(optimizer)
        if not places or any(isinstance(one, Unscaled | Clipped) for one in places):
            return 0
        self._gradients.find_edited()
        held = (p for p in parameters_of(optimizer) if p.grad is not None)
        return sum(not self._gradients.is_edited(id(p)) for p in held)

    def comes_of_scaled(self, optimizer: Any) -> bool:
        """Whether an optimizer's gradients are those of scaled losses alone, whatever was done to them since."""
        return bool(self._of_scaled(optimizer))

    def clipped_while_scaled(self, optimizer: Any) -> bool:
        """Whether gradients of an optimizer, all of scaled losses, were clipped before a scaler unscaled them."""
        kinds = [type(one) for one in self._of_scaled(optimizer)]
        return Clipped in kinds and (Unscaled not in kinds or kinds.index(Clipped) < kinds.index(Unscaled))

    def _of_scaled(self, optimizer: Any) -> list[Instruction]:
        """What an optimizer's gradients come of and what was done to them; [] where a loss of theirs was not scaled."""
        instructions = self._tape.instructions
        if self._is_elsewhere() or not any(isinstance(one, Scaled) for one in instructions):
            return []
        if not self._programs.is_reached(optimizer):
            return []
        wanted = self._programs.wanted(optimizer)
        backwards = [place for place in wanted if isinstance(instructions[place], Backward)]
        scaled = (any(isinstance(one, Scaled) for one in sliced(instructions, [place])) for place in backwards)
        return [instructions[place] for place in wanted] if backwards and all(scaled) else []

    def rest(self) -> None:
        """Functions are not recorded until a model is called again."""
        self._tape.close()
        self.reads.rest()

    # -- updates -----------------------------------------------------------------------------------------------------

    @_harmless
    def unscaling(self, optimizer: Any) -> None:
        """A scaler is about to unscale an optimizer's gradients."""
        if not self.is_crowded:
            self._gradients.find_edited()
            self.samples.unscaling(optimizer)

    @_harmless
    def unscaled(self, optimizer: Any) -> None:
        """A scaler has unscaled an optimizer's gradients."""
        if self._is_elsewhere():
            return
        self._gradients.left()
        if hasattr(optimizer, "param_groups"):
            self.samples.left([optimizer])
        self._journal.add(Unscaled(line=user_line()), id(optimizer))

    @_harmless
    def clipped(self, gradients: Collection[int], max_norm: float, norm_type: float) -> None:
        """Gradients are about to be clipped by their total norm.

        Args:
            gradients: The `id` of each.
            max_norm: The norm that they have afterwards at most.
            norm_type: Of the norm.
        """
        self.used.clipped(gradients)
        if not self._is_elsewhere():
            self._gradients.find_edited()
            self._gradients.clipped(gradients)
            held = tuple(
                Held(name) for name, tensor in self._tape.held() if tensor.is_leaf and id(tensor.grad) in gradients
            )
            self._journal.add(Clipped(parameters=held, max_norm=max_norm, norm_type=norm_type, line=user_line()))

    def program(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        name: str,
        scaler: Any,
        step: int,
        root: torch.Tensor | None = None,
    ) -> Program:
        """The running step of an optimizer, before it is taken.

        Args:
            optimizer: Whose step it is; None where the loop ends before. The program has none either where it holds
                tensors of its own, to which the loop copies what the models' gradients are.
            name: Its name.
            scaler: What steps it; None without one.
            step: The attempted step in the training.
            root: A value that was not differentiated; without an optimizer the program leads up to it.
        """
        return with_changed_buffers(self._all_of(optimizer, name=name, scaler=scaler, step=step, root=root))

    def keepable(self, optimizer: torch.optim.Optimizer, *, name: str, scaler: Any, step: int) -> KeptUpdate:
        """The running step of an optimizer, to be kept behind its update: no device is waited for; as in `program`."""
        program = self._all_of(optimizer, name=name, scaler=scaler, step=step, root=None)
        return KeptUpdate.of(program, prefixed(self.models.roots))

    def kept(self, update: KeptUpdate) -> Program | None:
        """The step of a kept update; None where its models or its optimizer are gone, or have other names by now."""
        roots = self.models.roots
        found = update.program_of(together(roots), prefixed(roots)) if roots else None
        return None if found is None else with_changed_buffers(found)

    def _all_of(
        self, optimizer: torch.optim.Optimizer | None, *, name: str, scaler: Any, step: int, root: torch.Tensor | None
    ) -> Program:
        return self._programs.program(optimizer, name=name, scaler=scaler, step=step, root=root, failed=self.failed)

    @_harmless
    def _asked(self, tensor: torch.Tensor) -> None:
        """The loop has asked for a number; where it is not finite, it may leave out what has led to it."""
        if self._is_elsewhere() or self._left_out is not None:
            return
        lost = self._journal.lost_behind(tensor)
        calls = [] if lost is None else self._journal.calls_behind(lost)
        if any(call.training for call in calls):
            program = self.program(None, name="", scaler=None, step=0, root=lost)
            self._left_out = program, self._journal.count

    def left_out(self, step: int) -> Program | None:
        """What has led a model in training to a NaN or +Inf that the loop has seen, and then left out.

        No backward has used a call that was made before. It is told once. An evaluation (`eval()`, `no_grad`) is none.

        Args:
            step: The attempted step in the training.
        """
        left, self._left_out = self._left_out, None
        return None if left is None else replace(left[0], step=step)

    def ended(self, step: int) -> Program | None:
        """The running step where it has a number that is not finite: a loss, or the last that the loop still holds.

        A device is waited for.

        Args:
            step: The attempted step in the training.
        """
        with unseen():
            sick = any(not bool(loss.isfinite().all()) for loss in self.losses(None))
        root = None if sick else self._journal.last_value()
        return self.program(None, name="", scaler=None, step=step, root=root) if sick or root is not None else None

    def interrupted(self, error: BaseException, step: int) -> Program | None:
        """The running step up to a forward that has returned, or was about to return, what is not finite.

        A device is waited for. An infinity of one sign alone, as masks are made of, counts where the error is about
        numbers.

        Args:
            error: What the loop's own code has ended the step with.
            step: The attempted step in the training.
        """
        about_numbers = is_about_numbers(error)
        root = self._journal.last_nonfinite(signed=about_numbers)
        if root is not None:
            return self.program(None, name="", scaler=None, step=step, root=root)
        if self._inside is not None:  # torch tells nobody of a call that something else than an `Exception` has ended
            module, args, kwargs = self._inside
            running, before = self._call(self.name_of(module), args, kwargs, None)
            self._raised = None if running is None else (running, before)
        if self._raised is None or not (about_numbers or holds_nonfinite(error)):
            return None
        call, buffers = self._raised
        self._journal.called(call, buffers)
        return with_changed_buffers(
            self._programs.program(None, name="", scaler=None, step=step, root=None, raised=call, failed=self.failed)
        )

    @_harmless
    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or was held back: what nobody can use any more is forgotten."""
        elsewhere = self._is_elsewhere()
        self._trainers.updated()
        if elsewhere:
            return
        self._tape.close()
        self._losses.clear()
        self._scaled_losses.clear()
        self._raised = self._inside = None
        self._gradients.updated(optimizer, self._journal.count)
        self.samples.updated(optimizer)
        self.scaled_again = None
        self.models.left_behind()
        self.backwards = self._calls = 0
        self._journal.updated()

    @_harmless
    def _zeroed(self, owner: Any, *, by_hand: bool = False) -> None:
        """A model's, or an optimizer's, gradients are cleared."""
        if self._is_elsewhere():
            return
        self.stays()
        if self.cleared is not None:
            self.cleared(parameters_of(owner), by_hand)
        self._gradients.cleared(owner, self._journal.count)


def _pairs(losses: Any, scaled: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each loss with what it was scaled to; an iterator is used up, and gives none."""
    if isinstance(losses, torch.Tensor):
        yield losses, scaled
    elif isinstance(losses, list | tuple):
        for loss, result in zip(losses, scaled, strict=True):
            yield from _pairs(loss, result)
