"""The instructions on a loop's tape: how long they are kept, their gradients and names, and one step's part of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from ampdoctor.hooks.backwards import parameters_of
from ampdoctor.hooks.nested import map_kind
from ampdoctor.hooks.program import (
    Backward,
    Call,
    InputRef,
    Instruction,
    Op,
    ParamRef,
    Reference,
    ResultRef,
    Scaled,
    Unscaled,
    references,
    results,
)
from ampdoctor.hooks.torch_internals import unseen, version_of
from ampdoctor.live.recording.models import OutermostModels
from ampdoctor.live.recording.tape import Links, Tape, is_lost, links_of

# -- gradients --


class Gradients:
    """The owners of gradients, and what was done to these. A moment is a count of instructions recorded before."""

    def __init__(self, models: OutermostModels) -> None:
        self._models = models
        self._stepped: dict[int, tuple[weakref.ref[Any], int]] = {}  # by optimizer: the moment of its last update
        self._cleared: dict[int, tuple[weakref.ref[Any], int]] = {}  # by owner: the moment of the last clearing
        self._filled: set[int] = set()  # owners that held gradients after the last backward
        self._as_left: dict[int, _Stamps] = {}  # by owner
        self._edited: set[int] = set()  # parameters whose gradient the loop's own code has changed since

    # -- events ------------------------------------------------------------------------------------------------------

    def filled(self) -> None:
        """Called after a backward has added to the gradients."""
        held = {id(owner): _gradients_of(owner) for owner in self.owners()}
        self._filled = {key for key, gradients in held.items() if _any_filled(gradients.values())}
        self._as_left = {key: _stamps_of(gradients) for key, gradients in held.items()}

    def left(self) -> None:
        """Called after a scaler has written to the gradients."""
        self._as_left = {id(owner): _stamps_of(_gradients_of(owner)) for owner in self.owners()}

    def unreadable(self) -> None:
        """Called where the gradients must not be read now."""
        self._filled.clear()
        self._as_left.clear()

    def clipped(self, gradients: Collection[int]) -> None:
        """Called before a recorded clipping writes to these gradients (`id`s)."""
        for stamps in self._as_left.values():
            both = zip(stamps.gradients, stamps.versions, strict=True)
            stamps.versions = [version + (gradient in gradients) for gradient, version in both]

    def updated(self, optimizer: torch.optim.Optimizer, at: int) -> None:
        """Called after an optimizer has used its gradients."""
        self._stepped[id(optimizer)] = weakref.ref(optimizer), at
        self._filled.clear()
        self._forget(optimizer)

    def cleared(self, owner: Any, at: int) -> None:
        """Called when a model's, or an optimizer's, gradients are cleared."""
        self._cleared[id(owner)] = weakref.ref(owner), at
        self._filled.discard(id(owner))
        self._forget(owner)

    def _forget(self, owner: Any) -> None:
        if self._as_left or self._edited:
            gone = set(map(id, parameters_of(owner)))
            rests = ((key, left.without(gone)) for key, left in self._as_left.items())
            self._as_left = {key: rest for key, rest in rests if rest.parameters}
            self._edited -= gone

    def find_edited(self) -> None:
        """Notes the parameters whose gradients have changed since."""
        for owner in self.owners() if self._as_left else ():
            now = _stamps_of(_gradients_of(owner))
            if now != self._as_left.get(id(owner)):
                before = {key: stamp for left in self._as_left.values() for key, stamp in left.by_parameter().items()}
                self._edited |= {key for key, stamp in now.by_parameter().items() if before.get(key, stamp) != stamp}

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def are_updated(self) -> bool:
        """Whether an optimizer of torch's has made an update."""
        return bool(self._stepped)

    def is_edited(self, parameter: int) -> bool:
        """Whether the loop's own code has changed the gradient of the parameter with this `id`."""
        return parameter in self._edited

    def emptied(self) -> Iterator[Any]:
        """Yields the owners that held gradients after the last backward and hold none now."""
        for owner in self.owners():
            if id(owner) in self._filled and not _any_filled(_gradients_of(owner).values()):
                yield owner

    def owners(self) -> list[Any]:
        """Returns the owners of gradients: the optimizers, or before the first update the models."""
        optimizers = [there for reference, _ in self._stepped.values() if (there := reference()) is not None]
        return optimizers or [root for _, root in self._models.roots]

    def oldest_update(self) -> int:
        """Returns the earliest of the optimizers' last updates: older backwards add up to nothing any more."""
        return min((count for there, count in self._stepped.values() if there() is not None), default=0)

    def were_cleared_after(self, moment: int) -> bool:
        """Whether any gradients were cleared after this moment."""
        return any(count > moment for _, count in self._cleared.values())

    def began(self, held: set[int], optimizer: Any) -> int:
        """Returns the moment since which these parameters' gradients add up; `optimizer` uses them, None for any."""
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
        """Whether an optimizer has updated one of these parameters (`id`s) after a moment."""
        return any(
            count > since
            and (optimizer := there()) is not None
            and any(id(p) in held for p in parameters_of(optimizer))
            for there, count in self._stepped.values()
        )


@dataclass(slots=True)
class _Stamps:
    """The gradients of an owner at one moment: lists, of which two are compared in a microsecond."""

    parameters: list[int]  # `id` of those with a gradient
    gradients: list[int]  # `id` of each
    versions: list[int]  # counters of their writes

    def by_parameter(self) -> dict[int, tuple[int, int]]:
        return dict(zip(self.parameters, zip(self.gradients, self.versions, strict=True), strict=True))

    def without(self, parameters: set[int]) -> _Stamps:
        if parameters.issuperset(self.parameters):
            return _Stamps([], [], [])
        kept = {key: stamp for key, stamp in self.by_parameter().items() if key not in parameters}
        return _Stamps(list(kept), *map(list, zip(*kept.values(), strict=True)))


def _gradients_of(owner: Any) -> dict[int, torch.Tensor]:
    """Returns the gradients of a model or of an optimizer, by the `id` of their parameter."""
    return {id(p): gradient for p in parameters_of(owner) if (gradient := p.grad) is not None}


def _stamps_of(gradients: dict[int, torch.Tensor]) -> _Stamps:
    held = gradients.values()
    return _Stamps(list(gradients), list(map(id, held)), list(map(version_of, held)))


def _any_filled(gradients: Collection[torch.Tensor]) -> bool:
    """Whether gradients are not all zeros; on a device, to avoid waiting, any gradient counts."""
    with unseen():
        return any(
            gradient.device.type != "cpu"
            or type(gradient) is not torch.Tensor
            or gradient.layout != torch.strided
            or bool(gradient.any())
            for gradient in sorted(gradients, key=torch.Tensor.numel)
        )


# -- names --


def prefixed(roots: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields each model with its prefix in `together`; of several of a name, the newest gets it, as in the loop."""
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
    """Returns the only model, or a module that holds several as children and is never called."""
    named = list(prefixed(roots))
    if len(named) == 1:
        return named[0][1]
    holder = nn.Module()
    for name, root in named:
        holder.add_module(name, root)
    return holder


def renumbered(instruction: Instruction, indices: Mapping[int, int]) -> Instruction:
    """Returns the instruction with each given tensor's index replaced by its place in the program."""
    return _with_references(instruction, lambda one: InputRef(indices[one.index]) if isinstance(one, InputRef) else one)


def spoken(instruction: Instruction, renamed: Callable[[str], str]) -> Instruction:
    """Returns the instruction with models, parameters and buffers renamed; the same object where it has none."""
    if isinstance(instruction, Call):
        instruction = replace(instruction, model=renamed(instruction.model))
    if any(isinstance(reference, ParamRef) for reference in references(instruction)):
        return _with_references(
            instruction, lambda one: ParamRef(renamed(one.name)) if isinstance(one, ParamRef) else one
        )
    return instruction


_TAKES = frozenset({"args", "kwargs", "loss", "value", "parameters", "roots", "seeds", "inputs"})
"""Fields of instructions that hold references to what they take."""


def _with_references(instruction: Instruction, other: Callable[[Any], Any]) -> Instruction:
    taken = (field.name for field in fields(instruction) if field.name in _TAKES)
    return replace(instruction, **{name: map_kind(Reference, other, getattr(instruction, name)) for name in taken})


def named_groups(optimizer_name: str, optimizer: Any, names: Mapping[int, str]) -> list[list[tuple[str, torch.Tensor]]]:
    """Returns each parameter of each of an optimizer's groups, named by `names` (by id) or by `optimizer_name`."""
    return [
        [(names.get(id(p)) or f"{optimizer_name}.group{g}.param{i}", p) for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


# -- one step's part of the tape --


def leads_to(
    instructions: Sequence[Instruction], backward: Backward, grad: set[int], holds: Callable[[Call], bool]
) -> bool:
    """Whether a backward, through tensors that require a gradient (`grad`), reaches a call that `holds` accepts."""
    needed = grad.intersection(links_of(backward).results)
    for one in reversed(instructions):
        links = links_of(one)
        if not needed.isdisjoint(links.made):
            if isinstance(one, Call) and holds(one):
                return True
            needed |= grad.intersection(links.results)
    return False


MOST = 4096
"""Instructions without a backward that are kept: a training loop has far fewer between two updates."""
_MOST_BYTES = 512 * 1024**2
"""Limit for the tensors that entered calls: 512 micro-batches of tokens are far below, and a GPU that accumulates
pictures has a hundred times as much."""
_IN_A_ROW = 64
"""Calls without a backward, as in an evaluation, after which calls are dropped whose results the loop has dropped."""
_BEHIND = 8
"""Tensors that are searched behind a number that the loop reads: a check is two or three functions."""
_RING = 4
"""Updates for which the instructions behind a tensor that the loop still holds are kept: a GAN makes two a turn."""


@dataclass(slots=True)
class _Entry:
    """The circumstances of an instruction on the tape."""

    order: int  # instructions before it
    age: int  # updates before it
    optimizer: int | None  # `id` of the one that it unscales for
    buffers: dict[str, torch.Tensor]  # of a call: those before it
    links: Links


class RecordedInstructions:
    """Adds to the tape, and drops instructions that cannot be used any more; errors of ours go to `failed`."""

    def __init__(
        self,
        gradients: Gradients,
        failed: Callable[[Exception], None],
        asked: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        self.tape = Tape(self.add, failed, asked)
        self.count = 0  # instructions ever recorded
        self.dropped = 0  # backwards dropped since the last update, to save memory
        self._gradients = gradients
        self._updates = 0
        self._few, self._light = MOST, _MOST_BYTES  # above these, unused instructions are searched for
        self._in_a_row, self._patience = 0, _IN_A_ROW
        self._entries: dict[int, _Entry] = {}  # by id(instruction)

    # -- recording ---------------------------------------------------------------------------------------------------

    def add(
        self,
        instruction: Instruction,
        links: Links | None = None,
        *,
        optimizer: int | None = None,
        buffers: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Records an instruction; `optimizer`: `id` of the one that it unscales for, `buffers`: those before a call."""
        self.tape.instructions.append(instruction)
        links = links or links_of(instruction)
        self._entries[id(instruction)] = _Entry(self.count, self._updates, optimizer, buffers or {}, links)
        self.count += 1
        if isinstance(instruction, Backward):
            self._in_a_row = 0
        if self.count % MOST == 0 and len(self.tape.instructions) > MOST:
            self._forget_unused()

    def spare(self) -> None:
        """Drops unused instructions where the tape holds much, or after many calls without a backward."""
        if len(self.tape.instructions) > self._few or self.tape.held_bytes > self._light:
            self._forget_unused()
        self._in_a_row += 1
        if self._in_a_row > self._patience:
            self._keep(self.tape.instructions)
            self._in_a_row, self._patience = 0, max(_IN_A_ROW, 2 * len(self.tape.instructions))

    def updated(self) -> None:
        """Called after an optimizer has stepped or was held back; drops what cannot be used any more."""
        self._updates += 1
        self.dropped = 0
        oldest = self._updates - _RING
        self._keep([one for one in self.tape.instructions if self._entries[id(one)].age > oldest])

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Renames models, parameters and buffers in the recorded instructions."""
        before = self.tape.instructions
        self.tape.instructions = [spoken(one, renamed) for one in before]
        renewed = zip(before, self.tape.instructions, strict=True)
        self._entries = {id(one): self._entries[id(was)] for was, one in renewed}
        for entry in self._entries.values():
            entry.buffers = {renamed(name): value for name, value in entry.buffers.items()}

    # -- queries -----------------------------------------------------------------------------------------------------

    def moment(self, instruction: Instruction) -> int:
        """Returns how many instructions were recorded before it."""
        return self._entries[id(instruction)].order

    def unscales(self, instruction: Instruction, optimizer: Any) -> bool:
        """Whether an instruction unscales this optimizer's gradients."""
        return isinstance(instruction, Unscaled) and self._entries[id(instruction)].optimizer == id(optimizer)

    def buffers_before(self, call: Call) -> dict[str, torch.Tensor]:
        """Returns the buffers as they were before a call."""
        return self._entries[id(call)].buffers

    def last_nonfinite(self, *, signed: bool) -> torch.Tensor | None:
        """The last non-finite tensor since the last update that a model, or an op under autograd, has returned."""
        for one in reversed(self.tape.instructions):
            if self._entries[id(one)].age != self._updates:
                break
            for made in results(one):
                value = self.tape.lives(made.index)
                if (
                    value is not None
                    and (isinstance(one, Call) or value.requires_grad)
                    and is_lost(value, signed=signed)
                ):
                    return value
        return None

    def lost_behind(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The NaN or +Inf from which a number that the loop reads was computed; None without one."""
        if not self.tape.is_live(tensor):
            return None
        waiting = [self.tape.reference(tensor)]
        for _ in range(_BEHIND):
            made = waiting.pop(0) if waiting else None
            value = self.tape.lives(made.index) if isinstance(made, ResultRef) else None
            if value is not None and value.requires_grad:  # not the magnitude of a mask's -inf, that is only looked at
                if is_lost(value, signed=False):
                    return value
            elif isinstance(made, ResultRef):  # the tensor itself may be gone: search its inputs
                maker = next((one for one in reversed(self.tape.instructions) if made in results(one)), None)
                waiting += [] if maker is None or isinstance(maker, Call) else references(maker)
        return None

    def calls_behind(self, tensor: torch.Tensor) -> list[Call]:
        """Returns the calls from which a tensor of the tape was computed."""
        made = self.tape.reference(tensor)
        places = [place for place, one in enumerate(self.tape.instructions) if made in results(one)]
        return [one for one in self.sliced(places) if isinstance(one, Call)]

    def sliced(self, wanted: Iterable[int], instructions: list[Instruction] | None = None) -> list[Instruction]:
        """Returns the instructions at the places `wanted`, all that they depend on, and writes to these, in order."""
        instructions = self.tape.instructions if instructions is None else instructions
        needed: set[int] = set()
        places = set(wanted)
        for place in range(len(instructions) - 1, -1, -1):
            one = instructions[place]
            entry = self._entries.get(id(one))
            links = links_of(one) if entry is None else entry.links  # an `Ended` is not on the tape
            written = not links.made and isinstance(one, Op) and not needed.isdisjoint(links.results[:1])
            if place in places or written or not needed.isdisjoint(links.made):
                places.add(place)
                needed.update(links.results)
        return [instructions[place] for place in sorted(places)]

    def clear(self) -> None:
        """Drops everything."""
        self._keep([])

    # -- dropping ----------------------------------------------------------------------------------------------------

    def _forget_unused(self) -> None:
        """Drops calls without a backward whose results the loop has dropped; then the oldest backwards."""
        self._keep(self.tape.instructions)
        backwards = [one for one in self.tape.instructions if isinstance(one, Backward)]
        while len(backwards) > 1 and (
            len(self.tape.instructions) > MOST // 2 or self.tape.held_bytes > _MOST_BYTES // 2
        ):
            half = len(backwards) // 2
            gone = {id(one) for one in backwards[:half]}
            self.dropped += half
            backwards = backwards[half:]
            self._keep([one for one in self.tape.instructions if id(one) not in gone])
        self._few = max(MOST, 2 * len(self.tape.instructions))
        self._light = max(_MOST_BYTES, 2 * self.tape.held_bytes)

    def _keep(self, instructions: list[Instruction]) -> None:
        """Keeps, of these, the instructions that living tensors, and gradients that still add up, came from."""
        first, entries = self._gradients.oldest_update(), self._entries
        places = [
            place
            for place, one in enumerate(instructions)
            if (
                self.tape.lives_on(entries[id(one)].links.made)
                if isinstance(one, Call | Op | Scaled)
                else entries[id(one)].order >= first
            )
        ]
        kept = self.sliced(places, instructions)
        self._entries = {id(one): entries[id(one)] for one in kept}
        links = [entry.links for entry in self._entries.values()]
        made = {number for one in links for number in one.made}
        self.tape.keep(kept, made, {number for one in links for number in one.given})
