"""Kernels that CUDA has and a CPU lacks: attention's, of which it has one that is fused, and counts of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from ampdoctor.precision.emulation.gpu.replacing import Replacements

_HERE: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class AttentionKernels:
    """The replaced switches: a kernel that is not here is answered by those that are.

    Args:
        active: Is anything emulated?
    """

    __slots__ = ("_active",)

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active

    def declare(self, replacements: Replacements) -> None:
        """Have them replaced; `torch.backends.cuda.sdp_kernel` goes through the first."""
        replacements.want(torch.nn.attention, "sdpa_kernel", self._chosen)
        replacements.want(torch.backends.cuda, "enable_math_sdp", self._kept)
        replacements.want(torch, "histc", self._counted)

    def _chosen(self, original: Any) -> Any:
        @functools.wraps(original)
        def sdpa_kernel(backends: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active() and backends not in (SDPBackend.MATH, [SDPBackend.MATH]):
                backends = _HERE
            return original(backends, *args, **kwargs)

        return sdpa_kernel

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def histc(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._active() or values.is_floating_point():
                return original(values, *args, **kwargs)
            return original(values.double(), *args, **kwargs).to(values.dtype)  # CUDA's takes integers, the CPU's none

        return histc

    def _kept(self, original: Any) -> Any:
        @functools.wraps(original)
        def enable_math_sdp(enabled: bool) -> None:
            original(enabled or self._active())

        return enable_math_sdp
