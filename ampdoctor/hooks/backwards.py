"""The backwards of one step: the scale of each gradient, and which gradients were edited or used since."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FrameType
from typing import Any

import torch

from ampdoctor.hooks.callbacks import Clip, on_clip, on_gradient
from ampdoctor.hooks.torch_internals import Backward, replaced, seen_backwards, unseen, version_of

# -- gradients that an optimizer has already used: no value is read, and no device is waited for --

_SAMPLES = 16
"""Parameters of an optimizer that are checked: a backward gives nearly all of them a new gradient."""


@dataclass(slots=True)
class _Use:
    """An optimizer's last update."""

    optimizer: weakref.ref[Any]
    runs: int  # of autograd's engine before the update
    of_backward: bool  # the gradients come from a backward: the engine ran since the update before
    # by `id` of a parameter: its gradient and version counter
    held: dict[int, tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=dict)


class UsedGradients:
    """Compares each optimizer's gradients with those of its last update; gradients made by hand are not compared."""

    def __init__(self) -> None:
        self.runs = 0  # of autograd's engine
        self._uses: dict[int, _Use] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a replayed CUDA graph as a run of the engine inside: it may contain a backward."""
        graph = getattr(torch.cuda, "CUDAGraph", None)
        original: Any = getattr(graph, "replay", None)
        if original is None:
            yield
            return

        def replay(*args: Any, **kwargs: Any) -> Any:
            self.engine_runs()
            return original(*args, **kwargs)

        with replaced(graph, "replay", replay):
            yield

    def clear(self) -> None:
        """Forgets all updates."""
        self._uses.clear()

    def engine_runs(self) -> None:
        """Notes a run of autograd's engine, whatever it computes."""
        self.runs += 1

    def used(self, optimizer: Any) -> None:
        """Notes that the optimizer has stepped, or that a scaler has skipped its update."""
        before = self._use_of(optimizer)
        again = before is not None and before.runs == self.runs
        of_backward = before.of_backward if again and before is not None else self.runs > 0
        with suppress(TypeError):  # a wrapper without weak references
            self._uses[id(optimizer)] = _Use(weakref.ref(optimizer), self.runs, of_backward, _held_by(optimizer))

    def are_used(self, optimizer: Any) -> bool:
        """Returns whether the optimizer's present gradients are those of its last update."""
        use = self._use_of(optimizer)
        if use is None or not use.of_backward or use.runs != self.runs:
            return False
        now = _held_by(optimizer)
        return bool(now) and all(
            key in use.held and use.held[key][0]() is gradient() and use.held[key][1] == version
            for key, (gradient, version) in now.items()
        )

    def clipped(self, gradients: Collection[int]) -> None:
        """Notes that these gradients (`id`s) are about to be multiplied in place, once each."""
        for use in self._uses.values():
            for key, (there, version) in use.held.items():
                gradient = there()
                if gradient is not None and id(gradient) in gradients and version_of(gradient) == version:
                    use.held[key] = there, version + 1

    def unscaled(self, optimizer: Any) -> None:
        """Notes that a scaler has divided gradients which were used already."""
        use = self._use_of(optimizer)
        if use is not None:
            use.held = _held_by(optimizer)

    def _use_of(self, optimizer: Any) -> _Use | None:
        use = self._uses.get(id(optimizer))
        return use if use is not None and use.optimizer() is optimizer else None


def inside_own_step(optimizer: Any, *, known: int = 0) -> bool:
    """Returns whether an optimizer's `step` was called by its own; `known`: calls that surely run (1 in a closure)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is optimizer:
            known -= 1
        frame = frame.f_back
    return known < 0


def _held_by(optimizer: Any) -> dict[int, tuple[weakref.ref[torch.Tensor], int]]:
    parameters = list(parameters_of(optimizer))
    return {
        id(p): (weakref.ref(gradient), version_of(gradient))
        for p in parameters[:: max(len(parameters) // _SAMPLES, 1)]
        if (gradient := p.grad) is not None and not gradient.is_inference()
    }


# -- scales of gradients --

PLAIN = 1.0
"""Scale of a loss that no scaler scaled, and of gradients that were unscaled."""
_SCALED = "ampdoctor.scaled"
"""The key, in a node's metadata, of the list that marks a scaler's `scale`."""


class Backwards:
    """Records for each parameter the scales of the losses that its gradient is summed from; `grad` is no backward."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]], on_kept_graph: Callable[[], None]) -> None:
        self._parameters = parameters
        self._on_kept_graph = on_kept_graph
        self.scaled = False  # a scaler has scaled a loss, in any step
        self.used = UsedGradients()
        self.clear()

    def clear(self) -> None:
        """Forgets the last step."""
        self.used.clear()
        self._scaled_one = False  # where a step scales only once, no graph needs to be searched
        self._versions: dict[int, int] = {}
        self._written: dict[int, weakref.ref[torch.Tensor]] = {}  # by id(parameter): the gradient of that version
        self._parts: dict[int, set[float]] = {}  # by id(parameter): the scales of the parts of its gradient
        self._clips: dict[int, tuple[Any, float]] = {}  # by id(parameter), while scaled: norm before, most after
        self._depth = 0
        self._accumulates = False
        self.scale: float | None = None  # of the loss of the engine's last run, backward or not; None without a scale

    @property
    def inside(self) -> bool:
        """Whether a backward is running that adds to `.grad`."""
        return self._depth > 0 and self._accumulates

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Installs hooks, and removes them afterwards."""
        hooks = ExitStack()
        hooked: dict[int, torch.Tensor] = {}

        def hook() -> None:
            for parameter in self._watched_parameters():
                if id(parameter) not in hooked:
                    hooked[id(parameter)] = parameter
                    hooks.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)

        def seen(backward: Backward, run: Callable[[], Any]) -> Any:
            self.used.engine_runs()
            if not self._depth:  # a nested one (reentrant checkpointing) is part of the outer one
                self.scale = None
                self._accumulates = backward.accumulated
                if backward.accumulated:
                    hook()
                    self._forget_cleared()
            self._depth += 1
            try:
                return run()
            finally:
                self._depth = max(self._depth - 1, 0)

        with hooks:
            hook()
            hooks.enter_context(self.used.watching())
            hooks.enter_context(seen_backwards(seen))
            hooks.enter_context(on_clip(self._clipping))
            yield

    def watch_scaled(self, outputs: Any, scale: float) -> None:
        """Detects backwards through these tensors, which a scaler has just multiplied by its scale."""
        for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                self.scaled = self._scaled_one = True
                mark_scaled(output)
                on_gradient(output, partial(self._on_scaled, scale))

    def scaled_twice(self, outputs: Any) -> bool:
        """Returns whether a part of the tensors to be scaled was already scaled in this step."""
        return self._scaled_one and bool(scaled_within(outputs))

    def unscaled(self, optimizer: Any) -> None:
        """Notes that a scaler has divided the optimizer's gradients by its scale."""
        for parameter in parameters_of(optimizer):
            self._note_version(parameter)
            self._clips.pop(id(parameter), None)
            if id(parameter) in self._parts:
                self._parts[id(parameter)] = {PLAIN}

    def edited(self, optimizer: Any) -> int:
        """Returns how many of the optimizer's gradients were edited in place after a backward or scaler wrote them."""
        return sum(
            parameter.grad is not None and parameter.grad._version != self._versions.get(id(parameter), -1)
            for parameter in parameters_of(optimizer)
            if id(parameter) in self._versions
        )

    def scales(self, optimizer: Any) -> tuple[float, ...]:
        """Returns the scales of the losses that the optimizer's gradients come from, in ascending order."""
        return tuple(sorted({scale for parts in self._held_by(optimizer) for scale in parts}))

    def misscaled(self, optimizer: Any, scale: float) -> int:
        """Returns how many of the optimizer's gradients have a part with a scale other than this."""
        return sum(any(part != scale for part in parts) for parts in self._held_by(optimizer))

    def clipped(self, optimizer: Any) -> tuple[float, float] | None:
        """Returns the norm before, and the largest norm after, the last clipping of gradients that are still scaled."""
        clips = [self._clips[id(p)] for p in parameters_of(optimizer) if id(p) in self._clips]
        if not clips:
            return None
        before, most = clips[-1]
        with unseen():
            return float(before), most

    def _clipping(self, clip: Clip) -> None:
        self.used.clipped(clip.gradients)
        for parameter in self._watched_parameters():
            if id(parameter.grad) in clip.gradients and self._parts.get(id(parameter), {PLAIN}) != {PLAIN}:
                self._clips[id(parameter)] = clip.total, clip.max_norm

    def _held_by(self, optimizer: Any) -> Iterator[set[float]]:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and id(parameter) in self._parts:
                yield self._parts[id(parameter)]

    def _watched_parameters(self) -> Iterator[torch.Tensor]:
        return (p for p in self._parameters() if p.requires_grad and p.is_leaf)

    def _on_scaled(self, scale: float, _: torch.Tensor) -> None:
        self.scale = scale
        if not self.inside and torch.is_grad_enabled():  # the engine's mode is `create_graph`
            self._on_kept_graph()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._note_version(parameter)
        if self.inside:  # otherwise the engine's start was not seen, and its root is unknown
            self._parts.setdefault(id(parameter), set()).add(PLAIN if self.scale is None else self.scale)

    def _note_version(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._versions[id(parameter)] = gradient._version
            self._written[id(parameter)] = weakref.ref(gradient)

    def _is_as_written(self, parameter: torch.Tensor) -> bool:
        grad, written = parameter.grad, self._written.get(id(parameter))
        if grad is None or written is None or written() is not grad:
            return False
        return grad._version == self._versions[id(parameter)]

    def _forget_cleared(self) -> None:
        """Forgets the scales of gradients that were cleared or zeroed: they will hold only the next backward's."""
        for parameter in self._watched_parameters() if self._parts else ():
            if id(parameter) in self._parts and not self._is_as_written(parameter) and _is_zero(parameter.grad):
                del self._parts[id(parameter)]
                self._clips.pop(id(parameter), None)


def parameters_of(owner: Any) -> Iterator[torch.Tensor]:
    """Yields the parameters of a model or of an optimizer."""
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return chain.from_iterable(map(itemgetter("params"), owner.param_groups))


def _is_zero(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    with unseen():
        return not bool((grad if grad.layout is torch.strided else grad.to_dense()).any())


def mark_scaled(output: torch.Tensor) -> list[bool]:
    """Marks a scaled tensor, and returns the list that `scaled_within` finds in results computed from it."""
    node: Any = output.grad_fn
    found: list[bool] = node.metadata.setdefault(_SCALED, [])
    return found


def scaled_within(outputs: Any, *, most: int | None = None) -> list[list[bool]]:
    """Returns the marks of the scaled tensors behind a tensor, or a list of them, within `most` nodes of each graph."""
    if isinstance(outputs, list | tuple):
        return [marked for output in outputs for marked in scaled_within(output, most=most)]
    has_graph = isinstance(outputs, torch.Tensor) and outputs.grad_fn is not None
    ahead: deque[Any] = deque([outputs.grad_fn] if has_graph else [])
    seen, found = set(ahead), []
    while ahead and (most is None or len(seen) <= most):
        node: Any = ahead.popleft()
        if _SCALED in node.metadata:
            found.append(node.metadata[_SCALED])
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                ahead.append(before)
    return found
