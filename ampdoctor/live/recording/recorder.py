"""`StepRecorder`: keeps what the running step is made of, so that it can be run again.

Nothing is copied but buffers that a call changes and the random state: what entered a model is kept by reference until
the optimizer has stepped.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ampdoctor.live.recording.doors import before_backwards, told_of_zeroed
from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.live.recording.naming import prefixed, renumbered, spoken, together
from ampdoctor.live.recording.slicing import leads_to, sliced
from ampdoctor.live.recording.tape import Tape, mode_now
from ampdoctor.live.recording.trainers import SEVERAL, Trainers
from ampdoctor.loop.random_state import RandomState
from ampdoctor.loop.recorded.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    Given,
    Held,
    Instruction,
    Line,
    Made,
    Program,
    Reference,
    Scaled,
    Unscaled,
    references,
    results,
)
from ampdoctor.loop.torch_internals import Backward as SeenBackward
from ampdoctor.loop.torch_internals import in_backward, seen_backwards, transforms, unseen, version_of
from ampdoctor.probes.ops.source import user_line

_MOST = 4096
"""Instructions without a backward that are kept: a loop that trains has far fewer between two updates."""
_MOST_BYTES = 512 * 1024**2
"""What the tensors that entered calls may take besides: 512 micro-batches of tokens are far below, and a GPU on which
pictures are accumulated has a hundred times as much."""
_IN_A_ROW = 64
"""Calls without a backward after which those are let go of whose results the loop has dropped, as an evaluation's."""
_RING = 4
"""Updates for which a tensor that the loop still holds keeps what it was made of: a GAN has two a turn."""
_APART = (
    "the optimizer steps tensors of its own, as master weights are: what the loop makes of the models' gradients for "
    "them, and their update, are not run again"
)


P = ParamSpec("P")


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
        failed: What ended the recording; None while all is well.
    """

    def __init__(self) -> None:
        self.models = OutermostModels(self)
        self.backwards = 0
        self.away = False
        self.listener: CallListener | None = None
        self.cleared: Callable[[list[torch.Tensor], bool], None] | None = None
        self.failed: str | None = None
        self._calls = 0
        self._tape = Tape(self._add, self.fail)
        self._process = os.getpid()
        self._trainers = Trainers()
        self._few, self._light = _MOST, _MOST_BYTES  # what the tape may hold until the unused is looked for
        self._in_a_row, self._patience = 0, _IN_A_ROW
        self._dropped = 0
        self._entering: tuple[RandomState, Any, bool, dict[str, torch.Tensor], Line] | None = None
        self._buffers: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self._before: dict[int, dict[str, torch.Tensor]] = {}  # by id(call): buffers
        self._buffered: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._ages: dict[int, int] = {}  # by id(instruction): updates before it
        self._order: dict[int, int] = {}  # by id(instruction): instructions before it
        self._of: dict[int, int | None] = {}  # by id(instruction): the optimizer that it unscales for
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # by optimizer: instructions before its last update
        self._cleared: dict[int, tuple[weakref.ref[Any], int]] = {}  # by owner of gradients: as they were cleared
        self._losses: list[tuple[int, list[torch.Tensor]]] = []  # by backward since the last update: as it began
        self._scaled_losses: dict[int, torch.Tensor] = {}  # by number of the scaled: not differentiated since
        self._filled: set[int] = set()  # owners of gradients that held some after the last backward
        self._as_left: dict[int, tuple[int, int]] = {}  # by parameter: its gradient, and how often that was written to
        self._edited: set[int] = set()  # parameters whose gradient the loop itself has changed since
        self._updates = 0
        self._count = 0
        self._prefixes: list[tuple[str, weakref.ref[nn.Module]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps are recorded; afterwards nothing is left in place."""
        with ExitStack() as stack:
            stack.callback(self._tape.close)
            stack.enter_context(self.models.watching())
            stack.enter_context(seen_backwards(self._backward))
            stack.enter_context(before_backwards(self._tape.close))
            stack.enter_context(told_of_zeroed(self._zeroed))
            yield

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
    def entered(self, module: nn.Module) -> None:
        """As in `ModelListener`."""
        if module.training:
            self._trainers.called()
        if self._is_elsewhere():
            return
        self._tape.close()
        self._name()
        if self.listener is not None:
            self.listener.entering(module)
        self._entering = RandomState.capture(), mode_now(), module.training, self._buffers_now(), user_line()

    @_harmless
    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As in `ModelListener`."""
        if self._is_elsewhere() or self._entering is None:
            return
        random, mode, training, buffers, line = self._entering
        self._entering = None
        if self.listener is not None:
            self.listener.left()
        name = self.name_of(module)
        if output is None or name is None:
            return
        call = Call(
            model=name,
            args=self._tape.references(args),
            kwargs=self._tape.references(kwargs),
            results=self._tape.make(output),
            mode=mode,
            random=random,
            training=training,
            line=line,
        )
        self._before[id(call)] = buffers
        self._add(call)
        if self.listener is not None:
            self.listener.returned(module, name, self._calls, given=(args, kwargs), output=output)
        self._calls += 1
        self._tape.open()
        if len(self._tape.instructions) > self._few or self._tape.held_bytes > self._light:
            self._forget_unused()
        self._in_a_row += 1
        if self._in_a_row > self._patience:
            self._keep(self._tape.instructions)
            self._in_a_row, self._patience = 0, max(_IN_A_ROW, 2 * len(self._tape.instructions))

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

    def last_value(self) -> torch.Tensor | None:
        """The last number on the tape that the loop still holds and that is not finite; None without one."""
        for one in reversed(self._tape.instructions):
            for made in results(one):
                value = self._tape.lives(made)
                if value is not None and value.numel() == 1 and value.is_floating_point():
                    with unseen():
                        finite = bool(value.isfinite())
                    if not finite:
                        return value
        return None

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
            self._buffered = [(name, weakref.ref(part)) for name, part in model.named_modules() if _own_buffers(part)]

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

        before = self._tape.instructions
        self._tape.instructions = [spoken(one, renamed) for one in before]
        tables: tuple[dict[int, Any], ...] = (self._before, self._ages, self._order, self._of)
        for was, one in zip(before, self._tape.instructions, strict=True):
            for table in tables:
                if was is not one and id(was) in table:
                    table[id(one)] = table.pop(id(was))
        for key, buffers in self._before.items():
            self._before[key] = {renamed(name): value for name, value in buffers.items()}

    def name_of(self, module: nn.Module) -> str | None:
        """The name that a model, or a part of one, has in the loop; None for one that is not known."""
        for prefix, root in prefixed(self.models.roots):
            for name, part in root.named_modules():
                if part is module:
                    return ".".join(piece for piece in (prefix, name) if piece)
        return None

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        """The buffers as they are: each is copied once for each time that it was written to."""
        found: dict[str, torch.Tensor] = {}
        for module_name, there in self._buffered:
            module = there()
            silent = module is not None and module.training and isinstance(module, _NormBase)
            for last, buffer in () if module is None else _own_buffers(module).items():
                if buffer is None:
                    continue
                known = self._buffers.get(id(buffer))
                version = version_of(buffer)
                # batch norm's kernel writes to its buffers and raises no version
                if silent or known is None or known[0]() is not buffer or known[1] != version:
                    known = weakref.ref(buffer), version, buffer.detach().clone()
                    self._buffers[id(buffer)] = known
                found[f"{module_name}.{last}" if module_name else last] = known[2]
        return found

    def _has_moved(self, call: Call, model: nn.Module) -> bool:
        """Whether an optimizer has updated a model's weights since its call."""
        held = {id(p) for p in model.get_submodule(call.model).parameters()}
        return any(
            count > self._order[id(call)]
            and (optimizer := there()) is not None
            and any(id(p) in held for p in _parameters_of(optimizer))
            for there, count in self._stepped.values()
        )

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
        if isinstance(losses, torch.Tensor):
            losses, scaled = (losses,), (scaled,)
        elif not isinstance(losses, list | tuple):
            return  # an iterator that is used up
        for loss, result in zip(losses, scaled, strict=True):
            taken, made = self._tape.reference(loss), self._tape.make(result)[""]
            self._scaled_losses[made.index] = loss.detach()
            self._add(Scaled(loss=taken, result=made, line=user_line()))

    def _backward(self, seen: SeenBackward, run: Callable[[], Any]) -> Any:
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
            for owner in self._owners():
                if id(owner) in self._filled and not _hold_gradients(owner):
                    self._zeroed(owner, by_hand=True)
            self._find_edited()
        self.backwards += 1
        self._in_a_row = 0
        roots = [root for root in seen.roots if isinstance(root, torch.Tensor)]
        name = self._tape.reference
        self._losses.append((self._count, [loss for root in roots for loss in self._losses_of(root, name(root))]))
        self._add(
            Backward(
                roots=tuple(map(name, roots)),
                seeds=tuple(None if s is None else name(s) for s in seen.seeds[: len(roots)]),
                inputs=tuple(name(t) for t in seen.inputs if isinstance(t, torch.Tensor)),
                kept=seen.kept,
                mode=mode_now(),
                line=user_line(),
            )
        )

    @_harmless
    def _has_run(self) -> None:
        """A backward has added to gradients. While another thread makes one, torch lets nobody read them."""
        if self._is_elsewhere() or self.is_crowded:
            self._filled.clear()
            self._as_left.clear()
            return
        self._filled = {id(owner) for owner in self._owners() if _hold_gradients(owner)}
        self._leave_gradients()

    def _leave_gradients(self) -> None:
        """These are the gradients as a backward, or a scaler, has left them."""
        self._as_left = {
            id(p): (id(gradient), version_of(gradient))
            for owner in self._owners()
            for p in _parameters_of(owner)
            if (gradient := p.grad) is not None
        }

    def _find_edited(self) -> None:
        """Note whose gradients are no more as they were left."""
        for owner in self._owners() if self._as_left else ():
            for p in _parameters_of(owner):
                left, gradient = self._as_left.get(id(p)), p.grad
                if left is not None and gradient is not None and left != (id(gradient), version_of(gradient)):
                    self._edited.add(id(p))

    def _owners(self) -> list[Any]:
        """Who holds gradients: the optimizers, or before the first update the models."""
        optimizers = [there for reference, _ in self._stepped.values() if (there := reference()) is not None]
        return optimizers or [root for _, root in self.models.roots]

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
        first = self._losses[0][0] if self._losses else self._count
        if all(count <= first for _, count in self._cleared.values()):
            return None
        owner = optimizer if optimizer is not None and self._is_reached(optimizer) else None
        return {self._order[id(self._tape.instructions[place])] for place in self._wanted(owner)}

    def rest(self) -> None:
        """Functions are not recorded until a model is called again."""
        self._tape.close()

    # -- updates -----------------------------------------------------------------------------------------------------

    @_harmless
    def unscaling(self) -> None:
        """A scaler is about to unscale gradients."""
        if not self.is_crowded:
            self._find_edited()

    @_harmless
    def unscaled(self, optimizer: Any) -> None:
        """A scaler has unscaled an optimizer's gradients."""
        if self._is_elsewhere():
            return
        self._leave_gradients()
        self._add(Unscaled(line=user_line()), id(optimizer))

    @_harmless
    def clipped(self, gradients: Collection[int], max_norm: float, norm_type: float) -> None:
        """Gradients are about to be clipped by their total norm.

        Args:
            gradients: The `id` of each.
            max_norm: The norm that they have afterwards at most.
            norm_type: Of the norm.
        """
        if not self._is_elsewhere():
            self._find_edited()
            self._as_left = {
                key: (gradient, version + (gradient in gradients)) for key, (gradient, version) in self._as_left.items()
            }
            held = tuple(
                Held(name) for name, tensor in self._tape.held() if tensor.is_leaf and id(tensor.grad) in gradients
            )
            self._add(Clipped(parameters=held, max_norm=max_norm, norm_type=norm_type, line=user_line()))

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
        roots = self.models.roots
        model = together(roots)
        instructions = self._tape.instructions
        apart = optimizer is not None and bool(roots) and not self._is_reached(optimizer)
        optimizer = None if apart else optimizer
        wanted = self._wanted(optimizer)
        if root is not None:
            instructions = [*instructions, Ended(value=self._tape.reference(root), line=None)]
            wanted.append(len(instructions) - 1)
        chosen = sliced(instructions, wanted)
        indices: dict[int, int] = {}
        for one in chosen:
            for taken in references(one):
                if isinstance(taken, Given):
                    indices.setdefault(taken.index, len(indices))
        given = [self._tape.given[index] for index in indices]
        calls = [one for one in chosen if isinstance(one, Call)]
        buffers: dict[str, torch.Tensor] = {}
        for call in reversed(calls):  # of each model, what it has before its own first call
            inside = f"{call.model}." if call.model else ""
            before = self._before[id(call)]
            buffers.update((key, value) for key, value in before.items() if key.startswith(inside))
        now = dict(model.named_buffers())
        self._find_edited()
        return Program(
            model=model,
            optimizer=optimizer,
            optimizer_name=name,
            scaler=scaler,
            instructions=tuple(renumbered(one, indices) for one in chosen),
            given=tuple(given),
            buffers={key: value for key, value in buffers.items() if key in now and not _same(now[key], value)},
            step=step,
            line=user_line(),
            edited=() if apart else tuple(name for key, name in self._tape.names.items() if key in self._edited),
            unexplained=(*self.models.unseen, *([_APART] if apart else []), *self._doubts(model, indices, calls)),
        )

    def _doubts(self, model: nn.Module, given: Iterable[int], calls: list[Call]) -> Iterator[str]:
        """Yields what of a step its instructions do not hold.

        Args:
            model: Of the program.
            given: Which of the given tensors it takes.
            calls: Those that it makes.
        """
        given = list(given)
        changed = sum(map(self._tape.is_changed, given))
        if changed:
            yield f"{changed} of the tensors that entered it were written to afterwards"
        if any((t := self._tape.given[index]).requires_grad and not t.is_leaf for index in given):
            yield "a tensor that entered it hangs on what was not recorded, and gives no gradient on"
        if any(self._has_moved(call, model) for call in calls):
            yield "weights have changed since one of its calls, which is run with what they are now"
        if self.failed is not None:
            yield f"the recording has ended before it ({self.failed})"
        if self._dropped:
            yield f"{self._dropped} of its backwards were let go of, to spare memory"
        if not calls:
            yield "no call of a model was recorded"

    def _is_reached(self, optimizer: Any) -> bool:
        """Whether a backward can reach what an optimizer holds: a parameter of a model, or a leaf of the loop's ops."""
        held = {id(p) for p in _parameters_of(optimizer)}
        return any(id(one) in held for one in (*self._tape.given, *(tensor for _, tensor in self._tape.held())))

    def _wanted(self, optimizer: Any) -> list[int]:
        """The places of the backwards that an optimizer's gradients come of, and of what was done to them."""
        instructions = self._tape.instructions
        model = together(self.models.roots)
        if optimizer is None:
            trained = {id(p) for p in model.parameters() if p.requires_grad}
            begun = self._begun(trained, max((count for _, count in self._stepped.values()), default=0))
            return [
                place
                for place, one in enumerate(instructions)
                if isinstance(one, Backward) and self._order[id(one)] >= begun
            ]
        held = {id(p) for p in _parameters_of(optimizer) if p.requires_grad}
        modules = dict(model.named_modules())

        names = {name for key, name in self._tape.names.items() if key in held}

        def holds(call: Call) -> bool:
            return any(id(p) in held for p in modules[call.model].parameters())

        def adds(place: int, one: Backward) -> bool:
            if one.inputs:
                return any(isinstance(taken, Held) and taken.name in names for taken in one.inputs)
            return leads_to(instructions[:place], one, self._tape.grad, holds)

        begun = self._begun(held, self._stepped[id(optimizer)][1] if id(optimizer) in self._stepped else 0)
        wanted = []
        for place, one in enumerate(instructions):
            if self._order[id(one)] < begun:
                continue
            if (
                (isinstance(one, Backward) and adds(place, one))
                or (isinstance(one, Unscaled) and self._of[id(one)] == id(optimizer))
                or (isinstance(one, Clipped) and any(parameter.name in names for parameter in one.parameters))
            ):
                wanted.append(place)
        return wanted

    @_harmless
    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or was held back: what nobody can use any more is forgotten."""
        elsewhere = self._is_elsewhere()
        self._trainers.updated()
        if elsewhere:
            return
        self._tape.close()
        self._updates += 1
        self._stepped[id(optimizer)] = weakref.ref(optimizer), self._count
        self._losses.clear()
        self._scaled_losses.clear()
        self._filled.clear()
        self._forget_gradients(optimizer)
        self.models.left_behind()
        self.backwards = self._calls = self._dropped = 0
        oldest = self._updates - _RING
        self._keep([one for one in self._tape.instructions if self._ages[id(one)] > oldest])

    @_harmless
    def _zeroed(self, owner: Any, *, by_hand: bool = False) -> None:
        """A model's, or an optimizer's, gradients are cleared."""
        if self._is_elsewhere():
            return
        if self.cleared is not None:
            self.cleared(_parameters_of(owner), by_hand)
        self._cleared[id(owner)] = weakref.ref(owner), self._count
        self._filled.discard(id(owner))
        self._forget_gradients(owner)

    def _forget_gradients(self, owner: Any) -> None:
        for p in _parameters_of(owner):
            self._as_left.pop(id(p), None)
            self._edited.discard(id(p))

    def _begun(self, held: set[int], begun: int) -> int:
        """How many instructions were recorded when these parameters' gradients began to add up.

        Args:
            held: The `id` of each.
            begun: How many were recorded at the update that used them last.
        """
        for owner, count in self._cleared.values():
            there = owner()
            if there is None or count <= begun:
                continue
            if held <= {id(p) for p in _parameters_of(there)}:
                begun = count
        return begun

    def _forget_unused(self) -> None:
        """Let go of calls that led to no backward and whose results the loop has dropped; then of the oldest backwards.

        What the loop itself holds stays, and is not looked for again until there is twice as much.
        """
        self._keep(self._tape.instructions)
        backwards = [one for one in self._tape.instructions if isinstance(one, Backward)]
        while len(backwards) > 1 and self._holds_much():
            half = len(backwards) // 2
            gone = {id(one) for one in backwards[:half]}
            self._dropped += half
            backwards = backwards[half:]
            self._keep([one for one in self._tape.instructions if id(one) not in gone])
        del self._losses[:-_MOST]
        self._few = max(_MOST, 2 * len(self._tape.instructions))
        self._light = max(_MOST_BYTES, 2 * self._tape.held_bytes)

    def _holds_much(self) -> bool:
        return len(self._tape.instructions) > _MOST // 2 or self._tape.held_bytes > _MOST_BYTES // 2

    def _keep(self, instructions: list[Instruction]) -> None:
        """Keep, of these, what a living tensor was made of, and what gradients that still add up came of."""
        first = min((count for there, count in self._stepped.values() if there() is not None), default=0)
        places = [
            place
            for place, one in enumerate(instructions)
            if (self._order[id(one)] >= first if isinstance(one, Unscaled | Clipped | Backward) else self._lives(one))
        ]
        kept = sliced(instructions, places)
        self._tape.keep(kept, [taken for one in kept for taken in references(one)])
        ids = {id(one) for one in kept}
        for table in (self._before, self._ages, self._order, self._of):
            for key in [key for key in table if key not in ids]:
                del table[key]

    def _lives(self, instruction: Instruction) -> bool:
        return any(
            (tensor := self._tape.lives(made)) is not None and tensor.requires_grad for made in results(instruction)
        )

    def _add(self, instruction: Instruction, optimizer: int | None = None) -> None:
        self._tape.instructions.append(instruction)
        self._ages[id(instruction)] = self._updates
        self._order[id(instruction)] = self._count
        self._of[id(instruction)] = optimizer
        self._count += 1
        if self._count % _MOST == 0 and len(self._tape.instructions) > _MOST:
            self._forget_unused()


def _own_buffers(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Those that a module has registered itself; `buffers()` walks its children too, which costs at each call."""
    return module._buffers  # noqa: SLF001


def _parameters_of(owner: Any) -> list[torch.Tensor]:
    """Of a model, or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


def _hold_gradients(owner: Any) -> bool:
    """Whether an owner's gradients are there, and are not all zeros, which a device would have to be waited for."""
    with unseen():
        return any(
            (gradient := p.grad) is not None
            and (gradient.device.type != "cpu" or type(gradient) is not torch.Tensor or _any(gradient))
            for p in reversed(_parameters_of(owner))
        )


def _any(gradient: torch.Tensor) -> bool:
    return gradient.layout != torch.strided or bool(gradient.any())


def _same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)
