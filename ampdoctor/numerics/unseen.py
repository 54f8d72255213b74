"""Runs tensor ops that no trace sees, no autocast changes and no autograd graph records."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch._C import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    _disabled_torch_dispatch_impl,
    _ExcludeDispatchKeyGuard,
)
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from types import TracebackType

    import torch


def _keys(*names: str) -> DispatchKeySet:
    keys = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | DispatchKeySet(getattr(DispatchKey, name))
    return keys


_BELOW_AUTOGRAD = _keys(
    "AutocastCPU",
    "AutocastCUDA",
    "AutogradFunctionality",
    "AutogradOther",
    "AutogradNestedTensor",
    "ADInplaceOrView",
)
_BELOW_MODES = _BELOW_AUTOGRAD | _keys("Python", "PythonTLSSnapshot")


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor's ops run in ATen, False for a wrapper with its own (FakeTensor, DTensor, nested)."""
    return type(tensor).__torch_dispatch__ is _disabled_torch_dispatch_impl


class Unseen:
    """Context manager: ops inside are hidden from function and dispatch modes, autocast and autograd.

    It masks dispatch keys (1 microsecond), because `no_grad` with `_disable_current_modes` costs 8: the non-finite
    check enters it once per module output. A wrapper tensor needs the Python key itself and takes the slower way.

    Args:
        tensor: The tensor that the ops will read.
    """

    __slots__ = ("_functions", "_keys", "_modes", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> None:
        plain = is_plain(self._tensor)
        self._functions = DisableTorchFunction()
        self._functions.__enter__()
        self._keys = _ExcludeDispatchKeyGuard(_BELOW_MODES if plain else _BELOW_AUTOGRAD)
        self._keys.__enter__()
        self._modes: ExitStack | None = None
        if not plain:
            self._modes = ExitStack()
            self._modes.enter_context(_disable_current_modes())
            own_mode = getattr(self._tensor, "fake_mode", None)
            if own_mode is not None:  # new tensors beside a fake tensor must be fake as well
                self._modes.enter_context(own_mode)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._modes is not None:
            self._modes.close()
        self._keys.__exit__(kind, error, trace)
        self._functions.__exit__(kind, error, trace)
