"""Kernels laid over torch's own for a while, and taken away again.

One mechanism serves the autocast policy, the half kernels that the CPU lacks and TF32: `torch.library.Library`
with the namespace `aten`. The dispatcher keeps the kernels of an (op, key) pair as a stack, so that destroying the
library brings back exactly what was there. Registrations belong to the process, not to a thread; owners therefore
count their users and install once.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOCK = threading.RLock()
"""Held while registrations change: every overlay of the process, one at a time."""


class Kernel(NamedTuple):
    """A kernel to register.

    Attributes:
        op: Name without the namespace, with its overload ("sum.dim_IntList").
        key: Dispatch key ("AutocastCPU", "CPU", "AutogradCPU").
        fn: The kernel; `torch.library.fallthrough_kernel` skips the key.
        with_keyset: Whether `fn` takes the dispatch key set as its first argument.
    """

    op: str
    key: str
    fn: Callable[..., Any]
    with_keyset: bool = False


class Overlay:
    """Registered kernels; `remove()` brings the previous ones back."""

    __slots__ = ("_library",)

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # The dispatcher warns that a kernel is overridden, which is the purpose.
                warnings.simplefilter("ignore")
                for kernel in kernels:
                    self._library.impl(kernel.op, kernel.fn, kernel.key, with_keyset=kernel.with_keyset)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the kernels away; a second call does nothing."""
        self._library._destroy()  # noqa: SLF001
