"""Whether a loop has asked a tensor for a number: without one it cannot decide anything by what it has computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from ampdoctor.loop.torch_internals import put_outermost, take_away

READS = frozenset(
    {
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
    }
)
"""Functions of torch's that give Python a number, or bring a tensor to where NumPy reads it."""


class NumberReads:
    """Listens between two calls of a loop's, on the thread that makes them.

    Attributes:
        any: A number was asked for since the last `listen`.
    """

    def __init__(self) -> None:
        self.any = False
        self._mode = _Listening(self)

    def listen(self) -> None:
        """Functions are told from now on, and none was before."""
        self.any = False
        take_away(self._mode)
        put_outermost(self._mode)

    def rest(self) -> None:
        """Functions are told no more."""
        take_away(self._mode)


class _Listening(TorchFunctionMode):
    def __init__(self, reads: NumberReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._reads.any = True
        return func(*args, **(kwargs or {}))
