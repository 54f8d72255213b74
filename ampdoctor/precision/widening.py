"""Casts to half that are written in user code, made wide: for a reference that is fp32 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.precision.nested import REDUCED

_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""What makes a tensor of Python's numbers below every dispatch: 0.999 in bfloat16 is 1."""


_AS_WRITTEN = ContextVar("_AS_WRITTEN", default=False)


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, casts are what they were written as: what is drawn there is used in other precisions as well."""
    before = _AS_WRITTEN.set(True)
    try:
        yield
    finally:
        _AS_WRITTEN.reset(before)


def wide_numbers(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call, in which a tensor that it makes of numbers in half becomes float32.

    Args:
        func: The function.
        kwargs: Its keyword arguments.
    """
    narrow = not _AS_WRITTEN.get() and func in _MADE_OF_NUMBERS and kwargs.get("dtype") in REDUCED
    return {**kwargs, "dtype": torch.float32} if narrow else kwargs


class WideNumbers(TorchFunctionMode):
    """`torch.tensor(0.999, dtype=torch.bfloat16)` makes float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **wide_numbers(func, kwargs or {}))


class WideCasts(TorchDispatchMode):
    """Every op that is told to make float16 or bfloat16 makes float32: `x.half()`, `x.to(torch.bfloat16)`, `zeros`.

    FP8 stays as it is: there is no arithmetic in it, so that a cast to it is part of what is computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("dtype") in REDUCED and not _AS_WRITTEN.get():
            options["dtype"] = torch.float32
        return func(*args, **options)
