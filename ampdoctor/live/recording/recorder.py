"""`StepRecorder`: keeps what the running step is made of, so that it can be run again.

Nothing is copied but buffers that a call changes and the random state: what entered a model is kept by reference until
the optimizer has stepped.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.live.recording.slicing import leads_to, sliced
from ampdoctor.live.recording.tape import Tape, mode_now
from ampdoctor.loop.nested import map_kind
from ampdoctor.loop.program import (
    Backward,
    Call,
    Clipped,
    Given,
    Instruction,
    Line,
    Op,
    Program,
    Scaled,
    Unscaled,
    references,
    results,
)
from ampdoctor.loop.random_state import RandomState
from ampdoctor.loop.torch_internals import Backward as SeenBackward
from ampdoctor.loop.torch_internals import in_backward, seen_backwards, unseen
from ampdoctor.probes.ops.source import user_line

_MOST = 4096
"""Instructions without a backward that are kept: a loop that trains has far fewer between two updates."""
_RING = 4
"""Updates for which a tensor that the loop still holds keeps what it was made of: a GAN has two a turn."""


P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[StepRecorder, P], None]) -> Callable[Concatenate[StepRecorder, P], None]:
    """The method raises nothing into the loop: at the first error the recording ends."""

    @functools.wraps(method)
    def guarded(self: StepRecorder, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.away:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a watched training is never harmed
            self.fail(error)

    return guarded


class StepRecorder:
    """Records the steps of a loop.

    Attributes:
        models: The loop's models.
        losses: What the backwards since the last update began from, detached, unscaled where a scaler was told.
        backwards: How many backwards there were since.
        away: What runs is not the loop's.
        returned: Told of what a model's call has returned, with the model's name and the call's number.
        failed: What ended the recording; None while all is well.
    """

    def __init__(self) -> None:
        self.models = OutermostModels(self)
        self.losses: list[torch.Tensor] = []
        self.backwards = 0
        self.away = False
        self.returned: Callable[[str, int, Any], None] | None = None
        self.failed: str | None = None
        self._calls = 0
        self._tape = Tape(self._add, self.fail)
        self._thread: int | None = None
        self._entering: tuple[RandomState, Any, bool, dict[str, torch.Tensor], Line] | None = None
        self._buffers: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}
        self._before: dict[int, tuple[dict[str, torch.Tensor], int]] = {}  # by id(call): buffers, version of weights
        self._ages: dict[int, int] = {}  # by id(instruction): updates before it
        self._order: dict[int, int] = {}  # by id(instruction): instructions before it
        self._of: dict[int, int | None] = {}  # by id(instruction): the optimizer that it unscales or clips for
        self._stepped: dict[int, int] = {}  # by id(optimizer): instructions before its last update
        self._cleared: dict[int, tuple[weakref.ref[Any], int]] = {}  # by owner of gradients: as they were cleared
        self._updates = 0
        self._count = 0
        self._named = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, steps are recorded; afterwards nothing is left in place."""
        with ExitStack() as stack:
            stack.callback(self._tape.close)
            stack.enter_context(self.models.watching())
            stack.enter_context(seen_backwards(self._backward))
            stack.enter_context(_told_of_zeroed(self._zeroed))
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
        if self._is_elsewhere():
            return
        self._tape.close()
        self._name()
        self._entering = RandomState.capture(), mode_now(), module.training, self._buffers_now(), user_line()

    @_harmless
    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """As in `ModelListener`."""
        if self._is_elsewhere() or self._entering is None:
            return
        random, mode, training, buffers, line = self._entering
        self._entering = None
        name = self._name_of(module)
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
        self._before[id(call)] = buffers, self._version_of_weights()
        self._add(call)
        if self.returned is not None:
            self.returned(name, self._calls, output)
        self._calls += 1
        self._tape.open()
        if len(self._tape.instructions) > _MOST:
            self._forget_unused()

    def fail(self, error: Exception) -> None:
        """Record no more, because of this."""
        self.failed = self.failed or f"{type(error).__name__}: {error}".splitlines()[0]
        self.away = True
        self._tape.close()

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
        if self.away:
            return True
        here = threading.get_ident()
        if self._thread is None or not any(thread.ident == self._thread for thread in threading.enumerate()):
            self._thread = here
        return here != self._thread

    def names(self) -> Mapping[int, str]:
        """The names of parameters and buffers, by their id."""
        self._name()
        return self._tape.names

    def _name(self) -> None:
        """Give parameters and buffers their names, where a model was met since."""
        roots = self.models.roots
        now = hash(tuple(id(root) for _, root in roots))
        if now != self._named:
            self._named = now
            model = together(roots)
            self._tape.hold([*model.named_parameters(), *model.named_buffers()])

    def _name_of(self, module: nn.Module) -> str | None:
        for prefix, root in _prefixed(self.models.roots):
            for name, part in root.named_modules():
                if part is module:
                    return ".".join(piece for piece in (prefix, name) if piece)
        return None

    def _buffers_now(self) -> dict[str, torch.Tensor]:
        """The buffers as they are: each is copied once for each time that it was written to."""
        found: dict[str, torch.Tensor] = {}
        for prefix, root in _prefixed(self.models.roots):
            for name, buffer, silent in _buffers_of(root):
                known = self._buffers.get(id(buffer))
                version = buffer._version
                if silent or known is None or known[0]() is not buffer or known[1] != version:
                    known = weakref.ref(buffer), version, buffer.detach().clone()
                    self._buffers[id(buffer)] = known
                found[f"{prefix}.{name}" if prefix else name] = known[2]
        return found

    def _version_of_weights(self) -> int:
        return sum(p._version for _, root in self.models.roots for p in root.parameters())

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
            self.losses.append(loss.detach())
            taken = self._tape.reference(loss)
            self._add(Scaled(loss=taken, result=self._tape.make(result)[""], scale=None, line=user_line()))

    def _backward(self, seen: SeenBackward, run: Callable[[], Any]) -> Any:
        if not in_backward() and seen.accumulated and not self._is_elsewhere():
            self._begins(seen)
        return run()

    @_harmless
    def _begins(self, seen: SeenBackward) -> None:
        self._tape.close()
        self.backwards += 1
        roots = [root for root in seen.roots if isinstance(root, torch.Tensor)]
        for root in roots:
            if root.numel() == 1 and not self._is_scaled(root):
                self.losses.append(root.detach())
        name = self._tape.reference
        self._add(
            Backward(
                roots=tuple(map(name, roots)),
                seeds=tuple(None if s is None else name(s) for s in seen.seeds[: len(roots)]),
                inputs=tuple(name(t) for t in seen.inputs if isinstance(t, torch.Tensor)),
                kept=seen.kept,
                line=user_line(),
            )
        )

    def _is_scaled(self, root: torch.Tensor) -> bool:
        reference = self._tape.reference(root)
        return any(isinstance(one, Scaled) and one.result == reference for one in self._tape.instructions)

    def rest(self) -> None:
        """Functions are not recorded until a model is called again."""
        self._tape.close()

    # -- updates -----------------------------------------------------------------------------------------------------

    @_harmless
    def unscaled(self, optimizer: Any) -> None:
        """A scaler has unscaled an optimizer's gradients."""
        self._add(Unscaled(line=user_line()), id(optimizer))

    @_harmless
    def clipped(self, max_norm: float, norm_type: float) -> None:
        """Gradients were clipped, of whichever optimizer."""
        if not self._is_elsewhere():
            self._add(Clipped(max_norm=max_norm, norm_type=norm_type, line=user_line()))

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
            optimizer: Whose step it is; None where the loop ends before.
            name: Its name.
            scaler: What steps it; None without one.
            step: The attempted step in the training.
            root: A value that was not differentiated; without an optimizer the program leads up to it.
        """
        roots = self.models.roots
        model = together(roots)
        instructions = self._tape.instructions
        wanted = self._wanted(optimizer, model)
        unexplained: list[str] = []
        if root is not None:
            made = self._tape.reference(root)
            wanted += [place for place, one in enumerate(instructions) if made in getattr(one, "results", {}).values()]
        chosen = sliced(instructions, wanted)
        indices: dict[int, int] = {}
        for one in chosen:
            for taken in references(one):
                if isinstance(taken, Given):
                    indices.setdefault(taken.index, len(indices))
        given = [self._tape.given[index] for index in indices]
        changed = sum(self._tape.is_changed(index) for index in indices)
        if changed:
            unexplained.append(f"{changed} of the tensors that entered it were written to afterwards")
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in given):
            unexplained.append("a tensor that entered it hangs on what was not recorded, and gives no gradient on")
        calls = [one for one in chosen if isinstance(one, Call)]
        if any(self._before[id(call)][1] != self._version_of_weights() for call in calls):
            unexplained.append("weights have changed since one of its calls, which is run with what they are now")
        if not calls:
            unexplained.append("no call of a model was recorded")
        buffers = self._before[id(calls[0])][0] if calls else {}
        now = dict(model.named_buffers())
        return Program(
            model=model,
            optimizer=optimizer,
            optimizer_name=name,
            scaler=scaler,
            instructions=tuple(_renumbered(one, indices) for one in chosen),
            given=tuple(given),
            buffers={key: value for key, value in buffers.items() if key in now and not _same(now[key], value)},
            step=step,
            line=user_line(),
            unexplained=(*self.models.unseen, *unexplained),
        )

    def _wanted(self, optimizer: Any, model: nn.Module) -> list[int]:
        """The places of the backwards that an optimizer's gradients come of, and of what was done to them."""
        instructions = self._tape.instructions
        if optimizer is None:
            last = max(self._stepped.values(), default=0)
            return [
                place
                for place, one in enumerate(instructions)
                if isinstance(one, Backward) and self._order[id(one)] >= last
            ]
        held = {id(p) for p in _parameters_of(optimizer) if p.requires_grad}
        modules = dict(model.named_modules())

        def holds(call: Call) -> bool:
            return any(id(p) in held for p in modules[call.model].parameters())

        begun = self._begun(held, optimizer)
        wanted = []
        for place, one in enumerate(instructions):
            if self._order[id(one)] < begun:
                continue
            if (isinstance(one, Backward) and leads_to(instructions[:place], one, self._tape.grad, holds)) or (
                isinstance(one, Unscaled | Clipped) and self._of[id(one)] in (None, id(optimizer))
            ):
                wanted.append(place)
        return wanted

    @_harmless
    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or was held back: what nobody can use any more is forgotten."""
        self._tape.close()
        self._updates += 1
        self._stepped[id(optimizer)] = self._count
        self.losses.clear()
        self.backwards = self._calls = 0
        oldest = self._updates - _RING
        self._keep([one for one in self._tape.instructions if self._ages[id(one)] > oldest])

    @_harmless
    def _zeroed(self, owner: Any) -> None:
        """A model's, or an optimizer's, gradients were cleared."""
        self._cleared[id(owner)] = weakref.ref(owner), self._count

    def _begun(self, held: set[int], optimizer: Any) -> int:
        """How many instructions were recorded when these parameters' gradients began to add up."""
        begun = self._stepped.get(id(optimizer), 0)
        for owner, count in self._cleared.values():
            there = owner()
            if there is None or count <= begun:
                continue
            cleared = there.parameters() if isinstance(there, nn.Module) else _parameters_of(there)
            if held <= {id(p) for p in cleared}:
                begun = count
        return begun

    def _forget_unused(self) -> None:
        """Let go of calls that led to no backward and whose results the loop has dropped."""
        instructions = self._tape.instructions
        used = sliced(instructions, [place for place, one in enumerate(instructions) if isinstance(one, Backward)])
        kept = {id(one) for one in used}
        self._keep([one for one in instructions if id(one) in kept or self._lives(one)])

    def _keep(self, instructions: list[Instruction]) -> None:
        """Keep, of these, what a living tensor was made of, and what gradients that still add up came of."""
        first = min(self._stepped.values(), default=0)
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


def _buffers_of(root: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields name, buffer, and whether it is written to without a trace: batch norm's kernel raises no version."""
    seen: set[int] = set()
    for name, module in root.named_modules():
        silent = module.training and isinstance(module, _NormBase)
        for last, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{name}.{last}" if name else last, buffer, silent


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _prefixed(roots: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the models with what their names begin with in `together`."""
    if len(roots) == 1:
        yield "", roots[0][1]
        return
    taken: set[str] = set()
    for name, root in roots:
        free = name.replace(".", "_") or "model"
        while free in taken or hasattr(nn.Module, free):
            free += "_"
        taken.add(free)
        yield free, root


def together(roots: list[tuple[str, nn.Module]]) -> nn.Module:
    """Returns the model, or a module that is never called and has several as children, under their names."""
    named = list(_prefixed(roots))
    if len(named) == 1:
        return named[0][1]
    holder = nn.Module()
    for name, root in named:
        holder.add_module(name, root)
    return holder


def _renumbered(instruction: Instruction, indices: Mapping[int, int]) -> Instruction:
    """The instruction, with given tensors by their place in the program."""

    def other(reference: Any) -> Any:
        return Given(indices[reference.index]) if isinstance(reference, Given) else reference

    if isinstance(instruction, Call | Op):
        args, kwargs = (map_kind(Given, other, part) for part in (instruction.args, instruction.kwargs))
        return replace(instruction, args=args, kwargs=kwargs)
    if isinstance(instruction, Scaled):
        return replace(instruction, loss=other(instruction.loss))
    if isinstance(instruction, Backward):
        roots, seeds, inputs = (
            tuple(map(other, p)) for p in (instruction.roots, instruction.seeds, instruction.inputs)
        )
        return replace(instruction, roots=roots, seeds=seeds, inputs=inputs)
    return instruction


def _same(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)


@contextmanager
def _told_of_zeroed(told: Callable[[Any], None]) -> Iterator[None]:
    """Inside, a model's or an optimizer's `zero_grad` is told, whatever it is to set gradients to."""
    with ExitStack() as stack:
        for owner in (nn.Module, torch.optim.Optimizer):
            original = owner.zero_grad

            def zero_grad(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                told(self)
                return _original(self, *args, **kwargs)

            owner.zero_grad = zero_grad  # type: ignore[method-assign]
            stack.callback(setattr, owner, "zero_grad", original)
        yield
