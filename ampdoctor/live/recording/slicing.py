"""The part of a tape that one optimizer's step hangs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ampdoctor.hooks.program import Backward, Call, Instruction, Made, Op, references, results


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
