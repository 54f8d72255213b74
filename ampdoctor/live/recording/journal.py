"""What a loop's tape holds, and for how long: instructions, gradients that add up, names, and one step's part of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.nested import map_kind
from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Ended,
    Given,
    Held,
    Instruction,
    Made,
    Op,
    Reference,
    Scaled,
    Unscaled,
    references,
    results,
)
from ampdoctor.hooks.torch_internals import unseen, version_of
from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.live.recording.tape import Tape, is_lost

# Whose gradients add up, since when, and whether they are still what a backward has left.


def parameters_of(owner: Any) -> list[torch.Tensor]:
    """Returns those of a model, or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]


class Gradients:
    """Who holds gradients, and what was done to them. Moments are counts: of what was recorded before.

    Args:
        models: The loop's.
    """

    def __init__(self, models: OutermostModels) -> None:
        self._models = models
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # by optimizer: when its last update was
        self._cleared: dict[int, tuple[weakref.ref[Any], int]] = {}  # by owner: when they were cleared
        self._filled: set[int] = set()  # owners that held some after the last backward
        self._as_left: dict[int, tuple[int, int]] = {}  # by parameter: its gradient, and how often that was written to
        self._edited: set[int] = set()  # parameters whose gradient the loop itself has changed since

    # -- what happens to them ----------------------------------------------------------------------------------------

    def filled(self) -> None:
        """A backward has added to them."""
        self._filled = {id(owner) for owner in self.owners() if _hold_gradients(owner)}
        self.left()

    def left(self) -> None:
        """They are as a backward, or a scaler, has left them."""
        self._as_left = {
            id(p): (id(gradient), version_of(gradient))
            for owner in self.owners()
            for p in parameters_of(owner)
            if (gradient := p.grad) is not None
        }

    def unreadable(self) -> None:
        """Nobody may read them now."""
        self._filled.clear()
        self._as_left.clear()

    def clipped(self, gradients: Collection[int]) -> None:
        """These are about to be written to by what is recorded.

        Args:
            gradients: The `id` of each.
        """
        self._as_left = {
            key: (gradient, version + (gradient in gradients)) for key, (gradient, version) in self._as_left.items()
        }

    def updated(self, optimizer: torch.optim.Optimizer, at: int) -> None:
        """An optimizer has used its own."""
        self._stepped[id(optimizer)] = weakref.ref(optimizer), at
        self._filled.clear()
        self._forget(optimizer)

    def cleared(self, owner: Any, at: int) -> None:
        """A model's, or an optimizer's, were cleared."""
        self._cleared[id(owner)] = weakref.ref(owner), at
        self._filled.discard(id(owner))
        self._forget(owner)

    def _forget(self, owner: Any) -> None:
        for p in parameters_of(owner):
            self._as_left.pop(id(p), None)
            self._edited.discard(id(p))

    def find_edited(self) -> None:
        """Notes whose gradients are no more as they were left."""
        for owner in self.owners() if self._as_left else ():
            for p in parameters_of(owner):
                left, gradient = self._as_left.get(id(p)), p.grad
                if left is not None and gradient is not None and left != (id(gradient), version_of(gradient)):
                    self._edited.add(id(p))

    # -- what is known of them ---------------------------------------------------------------------------------------

    def is_edited(self, parameter: int) -> bool:
        """Whether the loop itself has changed a parameter's gradient.

        Args:
            parameter: Its `id`.
        """
        return parameter in self._edited

    def emptied(self) -> Iterator[Any]:
        """Yields who held some after the last backward and holds none now."""
        for owner in self.owners():
            if id(owner) in self._filled and not _hold_gradients(owner):
                yield owner

    def owners(self) -> list[Any]:
        """Who holds gradients: the optimizers, or before the first update the models."""
        optimizers = [there for reference, _ in self._stepped.values() if (there := reference()) is not None]
        return optimizers or [root for _, root in self._models.roots]

    def oldest_update(self) -> int:
        """Returns the earliest of the optimizers' last updates: what was recorded before it adds up no more."""
        return min((count for there, count in self._stepped.values() if there() is not None), default=0)

    def were_cleared_after(self, moment: int) -> bool:
        """Whether anybody's were cleared after this moment."""
        return any(count > moment for _, count in self._cleared.values())

    def began(self, held: set[int], optimizer: Any) -> int:
        """Returns when these parameters' gradients began to add up: they were used or cleared then.

        Args:
            held: The `id` of each.
            optimizer: Who uses them; None for any.
        """
        if optimizer is None:
            begun = max((count for _, count in self._stepped.values()), default=0)
        else:
            begun = self._stepped[id(optimizer)][1] if id(optimizer) in self._stepped else 0
        for owner, count in self._cleared.values():
            there = owner()
            if there is None or count <= begun:
                continue
            if held <= {id(p) for p in parameters_of(there)}:
                begun = count
        return begun

    def have_moved(self, held: set[int], since: int) -> bool:
        """Whether an optimizer has updated one of these parameters after a moment.

        Args:
            held: The `id` of each.
            since: The moment.
        """
        return any(
            count > since
            and (optimizer := there()) is not None
            and any(id(p) in held for p in parameters_of(optimizer))
            for there, count in self._stepped.values()
        )


def _hold_gradients(owner: Any) -> bool:
    """Whether an owner's gradients are there, and are not all zeros, which a device would have to be waited for."""
    with unseen():
        return any(
            (gradient := p.grad) is not None
            and (gradient.device.type != "cpu" or type(gradient) is not torch.Tensor or _any(gradient))
            for p in reversed(parameters_of(owner))
        )


def _any(gradient: torch.Tensor) -> bool:
    return gradient.layout != torch.strided or bool(gradient.any())


# The names of a loop's models in one module that holds them, and instructions that speak of tensors by other names.


def prefixed(roots: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the models with what their names begin with in `together`.

    Of several by one name the newest has it: the loop's variable, as that of a function that trains twice, is that one.
    """
    if len(roots) == 1:
        yield "", roots[0][1]
        return
    taken: list[str] = []
    for name, _ in reversed(roots):
        free = name.replace(".", "_") or "model"
        while free in taken or hasattr(nn.Module, free):
            free += "_"
        taken.append(free)
    yield from zip(reversed(taken), (root for _, root in roots), strict=True)


def together(roots: list[tuple[str, nn.Module]]) -> nn.Module:
    """Returns the model, or a module that is never called and has several as children, under their names."""
    named = list(prefixed(roots))
    if len(named) == 1:
        return named[0][1]
    holder = nn.Module()
    for name, root in named:
        holder.add_module(name, root)
    return holder


def renumbered(instruction: Instruction, indices: Mapping[int, int]) -> Instruction:
    """The instruction, with given tensors by their place in the program."""

    def other(reference: Any) -> Any:
        return Given(indices[reference.index]) if isinstance(reference, Given) else reference

    return _with_references(instruction, other)


def spoken(instruction: Instruction, renamed: Callable[[str], str]) -> Instruction:
    """The instruction, with models, parameters and buffers by other names; itself where it speaks of none."""
    if isinstance(instruction, Call):
        instruction = replace(instruction, model=renamed(instruction.model))
    if any(isinstance(reference, Held) for reference in references(instruction)):
        return _with_references(instruction, lambda one: Held(renamed(one.name)) if isinstance(one, Held) else one)
    return instruction


def _with_references(instruction: Instruction, other: Callable[[Any], Any]) -> Instruction:
    if isinstance(instruction, Call | Op):
        args, kwargs = (map_kind(Reference, other, part) for part in (instruction.args, instruction.kwargs))
        return replace(instruction, args=args, kwargs=kwargs)
    if isinstance(instruction, Scaled):
        return replace(instruction, loss=other(instruction.loss))
    if isinstance(instruction, Ended):
        return replace(instruction, value=other(instruction.value))
    if isinstance(instruction, Clipped):
        return replace(instruction, parameters=tuple(map(other, instruction.parameters)))
    if isinstance(instruction, Backward):
        roots, seeds, inputs = (
            tuple(map(other, p)) for p in (instruction.roots, instruction.seeds, instruction.inputs)
        )
        return replace(instruction, roots=roots, seeds=seeds, inputs=inputs)
    return instruction


def named_groups(optimizer_name: str, optimizer: Any, names: Mapping[int, str]) -> list[list[tuple[str, torch.Tensor]]]:
    """Each parameter of each of an optimizer's groups, with its name.

    Args:
        optimizer_name: Which names those of a parameter that has none.
        optimizer: The optimizer.
        names: Of parameters, by their id.
    """
    return [
        [(names.get(id(p), f"{optimizer_name}.group{g}.param{i}"), p) for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


# The part of a tape that one optimizer's step hangs on.


def sliced(instructions: Sequence[Instruction], wanted: Iterable[int]) -> list[Instruction]:
    """Returns the instructions at the places `wanted` and those that they hang on, in order.

    A function that returns nothing (an assignment into a tensor) belongs to what it writes to.
    """
    needed: set[int] = set()
    places = set(wanted)
    for place in range(len(instructions) - 1, -1, -1):
        one = instructions[place]
        makes = {made.index for made in results(one)}
        written = isinstance(one, Op) and not makes and bool({made.index for made in _made(one)[:1]} & needed)
        if place in places or makes & needed or written:
            places.add(place)
            needed |= {made.index for made in _made(one)}
    return [instructions[place] for place in sorted(places)]


def leads_to(
    instructions: Sequence[Instruction], backward: Backward, grad: set[int], holds: Callable[[Call], bool]
) -> bool:
    """Whether a backward reaches one of the calls that `holds` is true of.

    Args:
        instructions: All that were recorded.
        backward: One of them.
        grad: The numbers of the tensors that require a gradient: it flows through no others.
        holds: Of a call.
    """
    needed = {made.index for made in _made(backward)} & grad
    for one in reversed(instructions):
        if {made.index for made in results(one)} & needed:
            if isinstance(one, Call) and holds(one):
                return True
            needed |= {made.index for made in _made(one)} & grad
    return False


def _made(instruction: Instruction) -> list[Made]:
    return [reference for reference in references(instruction) if isinstance(reference, Made)]


MOST = 4096
"""Instructions without a backward that are kept: a loop that trains has far fewer between two updates."""
_MOST_BYTES = 512 * 1024**2
"""What the tensors that entered calls may take besides: 512 micro-batches of tokens are far below, and a GPU on which
pictures are accumulated has a hundred times as much."""
_IN_A_ROW = 64
"""Calls without a backward after which those are let go of whose results the loop has dropped, as an evaluation's."""
_MAGNITUDES = frozenset({"abs", "absolute", "square", "norm", "pow", "vector_norm", "__abs__", "__pow__"})
"""Functions of torch's that make +Inf of the -inf of a mask."""
_BEHIND = 8
"""Tensors that are looked at behind a number that the loop asks for: a check is two or three functions."""
_RING = 4
"""Updates for which a tensor that the loop still holds keeps what it was made of: a GAN has two a turn."""


class Journal:
    """Adds to the tape, and lets go of what nobody can use any more.

    Args:
        gradients: Whose gradients add up.
        failed: Told of an error of ours, which must not reach the loop.
        asked: As of `Tape`.

    Attributes:
        tape: The instructions.
        count: How many were ever recorded.
        dropped: How many backwards were let go of since the last update, to spare memory.
    """

    def __init__(
        self,
        gradients: Gradients,
        failed: Callable[[Exception], None],
        asked: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self.tape = Tape(self.add, failed, asked)
        self.count = 0
        self.dropped = 0
        self._gradients = gradients
        self._updates = 0
        self._few, self._light = MOST, _MOST_BYTES  # what the tape may hold until the unused is looked for
        self._in_a_row, self._patience = 0, _IN_A_ROW
        self._before: dict[int, dict[str, torch.Tensor]] = {}  # by id(call): buffers
        self._ages: dict[int, int] = {}  # by id(instruction): updates before it
        self._order: dict[int, int] = {}  # by id(instruction): instructions before it
        self._of: dict[int, int | None] = {}  # by id(instruction): the optimizer that it unscales for

    # -- what is recorded --------------------------------------------------------------------------------------------

    def add(self, instruction: Instruction, optimizer: int | None = None) -> None:
        """Records an instruction.

        Args:
            instruction: The newest.
            optimizer: The `id` of the one whose gradients it unscales.
        """
        self.tape.instructions.append(instruction)
        self._ages[id(instruction)] = self._updates
        self._order[id(instruction)] = self.count
        self._of[id(instruction)] = optimizer
        self.count += 1
        if isinstance(instruction, Backward):
            self._in_a_row = 0
        if self.count % MOST == 0 and len(self.tape.instructions) > MOST:
            self._forget_unused()

    def called(self, call: Call, buffers: dict[str, torch.Tensor]) -> None:
        """Records a call.

        Args:
            call: The newest.
            buffers: As they were before it.
        """
        self._before[id(call)] = buffers
        self.add(call)

    def spare(self) -> None:
        """Lets go of the unused where much is held, or where many calls came without a backward."""
        if len(self.tape.instructions) > self._few or self.tape.held_bytes > self._light:
            self._forget_unused()
        self._in_a_row += 1
        if self._in_a_row > self._patience:
            self._keep(self.tape.instructions)
            self._in_a_row, self._patience = 0, max(_IN_A_ROW, 2 * len(self.tape.instructions))

    def updated(self) -> None:
        """An optimizer has stepped, or was held back: what nobody can use any more is forgotten."""
        self._updates += 1
        self.dropped = 0
        oldest = self._updates - _RING
        self._keep([one for one in self.tape.instructions if self._ages[id(one)] > oldest])

    def rename(self, renamed: Callable[[str], str]) -> None:
        """What was recorded speaks of models, parameters and buffers by other names from now on."""
        before = self.tape.instructions
        self.tape.instructions = [spoken(one, renamed) for one in before]
        tables: tuple[dict[int, Any], ...] = (self._before, self._ages, self._order, self._of)
        for was, one in zip(before, self.tape.instructions, strict=True):
            for table in tables:
                if was is not one and id(was) in table:
                    table[id(one)] = table.pop(id(was))
        for key, buffers in self._before.items():
            self._before[key] = {renamed(name): value for name, value in buffers.items()}

    # -- what is known of it -----------------------------------------------------------------------------------------

    def placed(self) -> Iterator[tuple[int, Instruction]]:
        """Yields the instructions with their places on the tape, oldest first."""
        return iter(enumerate(self.tape.instructions))

    def moment(self, instruction: Instruction) -> int:
        """Returns how many instructions were recorded before it."""
        return self._order[id(instruction)]

    def unscales(self, instruction: Instruction, optimizer: Any) -> bool:
        """Whether an instruction unscales this optimizer's gradients."""
        return isinstance(instruction, Unscaled) and self._of[id(instruction)] == id(optimizer)

    def buffers_before(self, call: Call) -> dict[str, torch.Tensor]:
        """Returns the buffers as they were before a call."""
        return self._before[id(call)]

    def last_nonfinite(self, *, signed: bool) -> torch.Tensor | None:
        """The last tensor that a model has returned since the last update, or an op under autograd, and is not finite.

        Only what the loop still holds can be asked.

        Args:
            signed: Infinities of one sign alone count as well.
        """
        for one in reversed(self.tape.instructions):
            if self._ages[id(one)] != self._updates:
                break
            for made in results(one):
                value = self.tape.lives(made)
                if (
                    value is not None
                    and (isinstance(one, Call) or value.requires_grad)
                    and is_lost(value, signed=signed)
                ):
                    return value
        return None

    def lost_behind(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The NaN, or +Inf, that a number hangs on which the loop has asked for; None without one.

        Of `torch.isfinite(loss).all()` it is the loss. A device has been waited for.

        Args:
            tensor: What was asked.
        """
        if not self.tape.is_live(tensor):
            return None
        waiting = [self.tape.reference(tensor)]
        for _ in range(_BEHIND):
            made = waiting.pop(0) if waiting else None
            value = self.tape.lives(made) if isinstance(made, Made) else None
            if isinstance(made, Made) and value is not None and value.is_floating_point():
                if is_lost(value, signed=False):
                    return None if self._is_size_of_mask(made, value) else value
            elif isinstance(made, Made):  # what it was made of, though it is gone itself
                maker = next((one for one in reversed(self.tape.instructions) if made in results(one)), None)
                waiting += [] if maker is None or isinstance(maker, Call) else references(maker)
        return None

    def _is_size_of_mask(self, made: Made, value: torch.Tensor) -> bool:
        """Whether a +Inf is the magnitude of a mask's -inf, which no gradient passes: `scores.detach().abs().max()`."""
        with unseen():
            if bool(value.detach().isnan().any()):
                return False
        measured = False
        for _ in range(_BEHIND):
            maker = next((one for one in reversed(self.tape.instructions) if made in results(one)), None)
            behind = [one for one in references(maker) if isinstance(one, Made)] if isinstance(maker, Op) else []
            if not isinstance(maker, Op) or len(behind) != 1:
                return False
            name = getattr(maker.function, "__name__", "")
            measured |= name in _MAGNITUDES and made.index not in self.tape.grad
            (made,) = behind
            source = self.tape.lives(made)
            if measured and source is not None and is_lost(source, signed=True):
                return not is_lost(source, signed=False)
        return False

    def calls_behind(self, tensor: torch.Tensor) -> list[Call]:
        """The calls that a tensor of the tape comes of."""
        made, instructions = self.tape.reference(tensor), self.tape.instructions
        places = [place for place, one in enumerate(instructions) if made in results(one)]
        return [one for one in sliced(instructions, places) if isinstance(one, Call)]

    def last_value(self) -> torch.Tensor | None:
        """The last number on the tape that the loop still holds and that is not finite; None without one."""
        for one in reversed(self.tape.instructions):
            for made in results(one):
                value = self.tape.lives(made)
                if value is not None and value.numel() == 1 and value.is_floating_point():
                    with unseen():
                        finite = bool(value.isfinite())
                    if not finite:
                        return value
        return None

    def clear(self) -> None:
        """Let go of everything."""
        self._keep([])

    # -- what is let go of -------------------------------------------------------------------------------------------

    def _forget_unused(self) -> None:
        """Let go of calls that led to no backward and whose results the loop has dropped; then of the oldest backwards.

        What the loop itself holds stays, and is not looked for again until there is twice as much.
        """
        self._keep(self.tape.instructions)
        backwards = [one for one in self.tape.instructions if isinstance(one, Backward)]
        while len(backwards) > 1 and self._holds_much():
            half = len(backwards) // 2
            gone = {id(one) for one in backwards[:half]}
            self.dropped += half
            backwards = backwards[half:]
            self._keep([one for one in self.tape.instructions if id(one) not in gone])
        self._few = max(MOST, 2 * len(self.tape.instructions))
        self._light = max(_MOST_BYTES, 2 * self.tape.held_bytes)

    def _holds_much(self) -> bool:
        return len(self.tape.instructions) > MOST // 2 or self.tape.held_bytes > _MOST_BYTES // 2

    def _keep(self, instructions: list[Instruction]) -> None:
        """Keep, of these, what a living tensor was made of, and what gradients that still add up came of."""
        first = self._gradients.oldest_update()
        places = [
            place
            for place, one in enumerate(instructions)
            if (self._order[id(one)] >= first if isinstance(one, Unscaled | Clipped | Backward) else self._lives(one))
        ]
        kept = sliced(instructions, places)
        self.tape.keep(kept, [taken for one in kept for taken in references(one)])
        ids = {id(one) for one in kept}
        for table in (self._before, self._ages, self._order, self._of):
            for key in [key for key in table if key not in ids]:
                del table[key]

    def _lives(self, instruction: Instruction) -> bool:
        return any(
            (tensor := self.tape.lives(made)) is not None and tensor.requires_grad for made in results(instruction)
        )
