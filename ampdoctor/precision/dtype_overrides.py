"""Another autocast dtype than the one in the user's code, and fp32 in place of the user's own casts to half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.precision.casting import REDUCED


class AutocastOverride:
    """Every autocast region that is entered computes in `dtype` (None: is off), also one that names another.

    It lasts until `remove()`, or as long as a `with` block around it; the latest wins.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        if not _HOLDING:
            torch.autocast.__enter__ = _enter  # type: ignore[method-assign]
        _HOLDING.append(self)

    def remove(self) -> None:
        """Regions entered from now on compute in their own dtype; a second call does nothing."""
        if self in _HOLDING:
            _HOLDING.remove(self)
            if not _HOLDING and torch.autocast.__enter__ is _enter:  # else another patch wraps it
                torch.autocast.__enter__ = _ENTER  # type: ignore[method-assign]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.remove()


class _AsNamed(AutocastOverride):
    """Every autocast region computes in the dtype that it names."""

    __slots__ = ()


_HOLDING: list[AutocastOverride] = []
_ENTER = torch.autocast.__enter__


def computes_in(region: torch.autocast) -> torch.dtype | None:
    """The dtype that an autocast region computes in if it is entered now; None: it is off."""
    if not region._enabled:
        return None
    dtype: torch.dtype = region.fast_dtype
    if not _HOLDING or dtype not in REDUCED or isinstance(_HOLDING[-1], _AsNamed):
        return dtype
    return _HOLDING[-1].dtype


def _enter(region: Any) -> Any:
    kept = region._enabled, region.fast_dtype
    dtype = computes_in(region)
    region._enabled, region.fast_dtype = dtype is not None, dtype or region.fast_dtype
    try:
        return _ENTER(region)  # type: ignore[no-untyped-call]
    finally:
        region._enabled, region.fast_dtype = kept


def without_overrides() -> AutocastOverride:
    """A context in which regions compute in the dtype that they name, despite overrides outside (a change applied).

    Autocast stays patched inside, also without an override: user code runs between patches that come and go (CUDA's
    emulation), and a change that it applies there must last.
    """
    return _AsNamed(None)


def overrides() -> Callable[[], None]:
    """Returns a function that removes the overrides which were added since."""
    before = _HOLDING[:]

    def restore() -> None:
        for override in _HOLDING[::-1]:
            if override not in before:
                override.remove()

    return restore


# -- fp32 in place of casts to half in user code: for a reference that is fp32 throughout --

_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)  # no dispatched cast of numbers: 0.999 in bf16 is 1
_AS_WRITTEN = ContextVar("_AS_WRITTEN", default=False)


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, casts are not replaced: random draws made there are used in other precisions as well."""
    before = _AS_WRITTEN.set(True)
    try:
        yield
    finally:
        _AS_WRITTEN.reset(before)


def wide_numbers(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call; float32 if `func` would make a tensor in half from numbers."""
    narrow = not _AS_WRITTEN.get() and func in _MADE_OF_NUMBERS and kwargs.get("dtype") in REDUCED
    return {**kwargs, "dtype": torch.float32} if narrow else kwargs


class WideNumbers(TorchFunctionMode):
    """`torch.tensor(0.999, dtype=torch.bfloat16)` makes float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **wide_numbers(func, kwargs or {}))


class UpcastHalf(TorchDispatchMode):
    """Ops that would make float16 or bfloat16 make float32; FP8 stays, as a cast to it is part of the computation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") in REDUCED and not _AS_WRITTEN.get():
            options["dtype"] = torch.float32
        return func(*args, **options)
