"""Tries a script's loop once, to learn what its steps are made of; the run that it was tried on is thrown away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.hooks.torch_internals import Backward, seen_backwards
from ampdoctor.replay.scripts.anew import Anew
from ampdoctor.replay.scripts.copies import Copies
from ampdoctor.replay.scripts.made import Made
from ampdoctor.replay.scripts.seam import Body, Items, entered
from ampdoctor.replay.scripts.source.finding import told_of_steps, told_of_training_calls

ENOUGH = 8
"""Items of a loop that is worth replaying: as many as `bisect-nan` replays steps. What ends before is a part of one."""
_MOST_TOGETHER = 1024
"""Iterations from the first backward on in which an optimizer has to step: what accumulates more is none."""
_MOST_BEFORE = 100_000
"""Iterations in which a first backward has to come: what fills a buffer of experience takes some ten thousand."""
_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a loop's first step has shown.

    Attributes:
        items: How many the loop has, up to `ENOUGH`.
        before: Iterations without a backward before the first one (a buffer is filled): a part of no step.
        together: Iterations that one optimizer step takes.
        updates: Optimizer steps in which all that can go wrong with them shows. Two, where a region of autocast is
            around the loop: it keeps its half copies of the weights, and the second step's are old.
        optimizers: Places, among what the script makes, of the optimizers that it steps.
        scalers: Places of the loss scalers that it asks.
        autocast: The format of its autocast regions; None without one.
        ended: The loop has ended within its first step.
    """

    items: int
    before: int
    together: int
    updates: int
    optimizers: tuple[int, ...]
    scalers: tuple[int, ...]
    autocast: str | None
    ended: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that a run of the script has come to.

    Attributes:
        items: Makes what it runs over; None for a `while`.
        body: Its body.
        seen: The variables that it sees.
        anew: Makes anew what each round makes before the loop.
        copies: Of the model's weights among that.
    """

    items: Items | None
    body: Body
    seen: list[tuple[str, Any]]
    anew: Anew
    copies: Copies


def tried(  # noqa: C901 one loop, and its listeners
    loop: Loop, around: Sequence[Callable[[], Any]], made: Made, *, never_steps: bool = False
) -> Lesson:
    """Runs a loop's body until an optimizer has stepped.

    Args:
        loop: The loop.
        around: Make the contexts around it.
        made: What the script has made.
        never_steps: The script has ended before a step: what it calls a model for is taken for one.
    """
    stepped: dict[int, None] = {}
    scalers: dict[int, None] = {}
    regions: set[torch.dtype] = set()

    casts_kept = False

    def step(optimizer: Any, _frame: Any) -> None:
        nonlocal casts_kept
        casts_kept |= torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        place = made.place_of(optimizer)
        if place is not None:
            stepped[place] = None

    def scaling(scaler: Any) -> None:
        place = made.place_of(scaler)
        if place is not None and scaler.is_enabled():
            scalers[place] = None

    backwards = 0

    def backward(seen: Backward, run: Callable[[], Any]) -> Any:
        nonlocal backwards
        backwards += seen.accumulated
        return run()

    source: Iterator[Any] = itertools.repeat(None) if loop.items is None else iter(loop.items())
    count, before, said = 0, 0, None
    with ExitStack() as stack:
        for told in (told_of_steps(step), _told_of_scaling(scaling), _told_of_regions(regions.add)):
            stack.enter_context(told)
        stack.enter_context(_calls_as_steps(made, stepped, scalers) if never_steps else nullcontext())
        stack.enter_context(seen_backwards(backward))
        stack.enter_context(entered(around))
        for item in source:
            count += 1
            try:
                said = loop.body(item)
            except (Exception, SystemExit):  # as where a loss is not finite: the replay comes to it, and says why
                if not stepped:
                    raise
            if not (backwards or stepped):
                before = count
            if said is not None or stepped or before == _MOST_BEFORE or count - before == _MOST_TOGETHER:
                break
    ended = said is not None
    more = 0 if ended or not stepped else sum(1 for _ in itertools.islice(source, max(0, ENOUGH - count)))
    return Lesson(
        items=count + more,
        before=before,
        together=max(count - before, 1),
        updates=2 if around and casts_kept else 1,
        optimizers=tuple(stepped),
        scalers=tuple(scalers),
        autocast=next((name for dtype, name in _FORMATS.items() if dtype in regions), None),
        ended=ended,
    )


def _calls_as_steps(made: Made, stepped: dict[int, None], scalers: dict[int, None]) -> AbstractContextManager[None]:
    """Inside, a call of a model counts as a step of the optimizers that train it, with all scalers that there are."""

    def call(module: torch.nn.Module, _frame: Any) -> None:
        stepped.update(dict.fromkeys(made.training(module)))
        scalers.update(dict.fromkeys(made.scalers()))

    return told_of_training_calls(call)


@contextmanager
def _told_of_scaling(tell: Callable[[Any], None]) -> Iterator[None]:
    original = torch.amp.GradScaler.scale

    def scale(scaler: Any, outputs: Any) -> Any:
        tell(scaler)
        return original(scaler, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original  # type: ignore[method-assign]


@contextmanager
def _told_of_regions(tell: Callable[[torch.dtype], None]) -> Iterator[None]:
    original = torch.autocast.__enter__

    def enter(region: Any) -> Any:
        if region._enabled:  # noqa: SLF001 torch has no public name for it
            tell(region.fast_dtype)
        return original(region)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = original  # type: ignore[method-assign]
