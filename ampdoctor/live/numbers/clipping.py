"""Hears the norm that `clip_grad_norm_` computes anyway, however a program has imported that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

_NORM, _CLIP = "_get_total_norm", "_clip_grads_with_norm_"
"""What `clip_grad_norm_` asks for in its own module (torch 2.6 and later; without them no clipping is heard)."""
_DOORS = ((clip_grad, _NORM, _CLIP), (utils, "get_total_norm", "clip_grads_with_norm_"))
"""Where they hang. The second pair is public; a program that imported those by name before the watch is not heard."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """A clipping by norm that is about to be made.

    Attributes:
        total: The norm before, 0-dim, on its device; may be a DTensor.
        gradients: `id` of each gradient that is clipped.
        max_norm: What the norm is cut to.
        norm_type: 2.0 for L2; None where the program computed the norm by itself.
    """

    total: torch.Tensor
    gradients: frozenset[int]
    max_norm: float
    norm_type: float | None


Hears = Callable[[Clip], None]
"""Told of each clipping before it is made; must not raise."""


@contextmanager
def hearing(hears: Hears) -> Iterator[bool]:
    """Clippings are heard inside, and nothing of this is left in torch afterwards.

    Gives whether this torch lets them be heard. Nothing is computed, and nothing waits for a device.
    """
    if not all(hasattr(clip_grad, name) for name in (_NORM, _CLIP)):
        yield False
        return
    ear = _Ear(hears)
    put: list[tuple[ModuleType, str, Any, Any]] = []
    for module, norm, clip in _DOORS:
        for name, wrap in ((norm, ear.norm), (clip, ear.clip)):
            original = getattr(module, name, None)
            if original is not None:
                put.append((module, name, original, wrap(original)))
    for module, name, _, wrapped in put:
        setattr(module, name, wrapped)
    try:
        yield True
    finally:
        ear.close()  # whoever has wrapped the wrapper keeps it
        for module, name, original, wrapped in put:
            if getattr(module, name) is wrapped:
                setattr(module, name, original)


class _Ear:
    def __init__(self, hears: Hears) -> None:
        self.hears: Hears | None = hears
        self._last: tuple[Any, float] | None = None  # the norm computed last, and its type

    def close(self) -> None:
        self.hears = self._last = None

    def norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            found = original(tensors, norm_type, *args, **kwargs)
            if self.hears is not None and not torch.compiler.is_compiling():
                self._last = found, float(norm_type)
            return found

        return get_total_norm

    def clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grads_with_norm(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if self.hears is None or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator can be asked only once
            self._tell([parameters] if isinstance(parameters, torch.Tensor) else parameters, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **kwargs)

        return clip_grads_with_norm

    def _tell(self, parameters: list[torch.Tensor], max_norm: Any, total: Any) -> None:
        hears = self.hears
        norm_type = self._last[1] if self._last is not None and self._last[0] is total else None
        self._last = None
        gradients = frozenset(id(p.grad) for p in parameters if p.grad is not None)
        on_device = isinstance(max_norm, torch.Tensor) and max_norm.device.type != "cpu"
        if hears is not None and gradients and isinstance(total, torch.Tensor) and not on_device:
            hears(Clip(total=total, gradients=gradients, max_norm=float(max_norm), norm_type=norm_type))
