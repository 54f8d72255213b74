"""What a loop's tape holds, for how long, and what is known of each of its instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ampdoctor.hooks.program import (
    Backward,
    Call,
    Clipped,
    Instruction,
    Made,
    Op,
    Unscaled,
    references,
    results,
)
from ampdoctor.hooks.torch_internals import unseen
from ampdoctor.live.recording.errors import is_lost
from ampdoctor.live.recording.gradients import Gradients
from ampdoctor.live.recording.naming import spoken
from ampdoctor.live.recording.slicing import sliced
from ampdoctor.live.recording.tape import Tape

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
