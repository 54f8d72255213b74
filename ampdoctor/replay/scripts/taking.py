"""One step of a run: the body of the user's loop, once for each item of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ampdoctor.hooks.backwards import scaled_within
from ampdoctor.hooks.torch_internals import Backward, seen_backwards, unseen
from ampdoctor.replay.scripts.anew import SCALER_EACH_ROUND
from ampdoctor.replay.scripts.files import Files
from ampdoctor.replay.scripts.header import bound_by
from ampdoctor.replay.scripts.seam import Body, Turn, entered


@dataclass(slots=True, eq=False)
class Stepping:
    """What the steps of a run have in common, of ours.

    Attributes:
        scalers: The run's own.
        files: What it writes.
        seen: Variables of the functions that the loop was left in: what they hold lives as long as this.
        anew: Makes anew what each round of the loop makes before it.
        over: Has an entry once the loop would have ended.
    """

    scalers: tuple[Any, ...]
    files: Files
    seen: Any
    anew: Callable[[], None]
    over: list[bool]


def take(body: Body, around: Sequence[Callable[[], Any]], stepping: Stepping, batch: Any) -> Any:
    """Take one step.

    The body and what stands around it are arguments of their own: what they reach counts as reached by the step.

    Args:
        body: The body of the loop.
        around: Make the contexts around it.
        stepping: The rest.
        batch: The items of the step.

    Returns:
        What the step called `backward` on, before it was scaled; where that were several, the sum, or the first that is
        not finite: a sum would not lead to where it was born. Of a step without a backward, as where a loss that is not
        finite is passed over, the last loss among the variables of the body.
    """
    losses: list[Any] = []
    with _backwards_in(losses, stepping), stepping.files.saving_nothing(), entered(around):
        for item in batch:
            if item is Turn.NEXT_ROUND:
                stepping.anew()
                continue
            said = body(item)
            if said is not None:
                stepping.over.append(True)
                break
    if len(losses) < 2:
        return losses[0] if losses else _loss_among(bound_by(body))
    with unseen():
        numbers = [float(loss) for loss in losses]
        ill = next((loss for loss, number in zip(losses, numbers, strict=True) if not math.isfinite(number)), None)
        return sum(numbers) if ill is None else ill


def _loss_among(variables: Iterable[Any]) -> Any:
    """Returns the last number that a gradient could be taken of; None if there is none."""
    numbers = [
        one for one in variables if isinstance(one, torch.Tensor) and one.grad_fn is not None and _is_scalar(one)
    ]
    return numbers[-1].detach() if numbers else None


@contextmanager
def _backwards_in(losses: list[Any], stepping: Stepping) -> Iterator[None]:
    """Inside, each loss that a backward begins with is added."""
    unscaled: dict[int, tuple[Any, Any]] = {}
    depth = 0

    def seen(backward: Backward, run: Callable[[], Any]) -> Any:
        nonlocal depth
        if backward.accumulated and not depth:
            losses.extend(_loss(root, unscaled) for root in backward.roots if _is_scalar(root))
        depth += 1
        try:
            return run()
        finally:
            depth -= 1

    with ExitStack() as stack:
        stack.enter_context(seen_backwards(seen))
        for owner in (torch.amp.GradScaler, *stepping.scalers):
            _keep_unscaled(owner, unscaled, stack)
        stack.enter_context(_told_of_new_scalers(stepping))
        yield


@contextmanager
def _told_of_new_scalers(stepping: Stepping) -> Iterator[None]:
    """Inside, a note says that a scaler is made."""
    original = torch.amp.GradScaler.__init__

    def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            stepping.files.note("scaler", SCALER_EACH_ROUND)

    torch.amp.GradScaler.__init__ = init  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler.__init__ = original  # type: ignore[method-assign]


def _keep_unscaled(owner: Any, unscaled: dict[int, tuple[Any, Any]], stack: ExitStack) -> None:
    """Note what is scaled: by any scaler, and by one whose own method stands before its class's."""
    if not isinstance(owner, type) and "scale" not in vars(owner):
        return
    original = owner.scale

    def scale(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        if args and isinstance(outputs, torch.Tensor):
            unscaled[id(outputs)] = (outputs, args[-1])
        return outputs

    owner.scale = scale
    stack.callback(setattr, owner, "scale", original)


def _is_scalar(root: Any) -> bool:
    return isinstance(root, torch.Tensor) and root.numel() == 1


def _loss(root: Any, unscaled: dict[int, tuple[Any, Any]]) -> Any:
    if id(root) in unscaled:
        return unscaled[id(root)][1].detach()
    if unscaled and scaled_within(root):  # computed further from what was scaled
        outputs, loss = next(reversed(unscaled.values()))
        with unseen():
            scaled = float(outputs)
            return float(root) * (float(loss) / scaled) if scaled and math.isfinite(scaled) else float(loss)
    return root.detach()
