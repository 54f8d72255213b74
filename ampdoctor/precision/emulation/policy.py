"""Autocast policies: the CPU's own, and CUDA's on the CPU.

CUDA's and the CPU's autocast cast different ops (on the CPU `exp`, `softmax`, `layer_norm`, `sum` stay fp16; on CUDA
they run in fp32), so a plain CPU replay of a CUDA run fails elsewhere. Under `autocast_policy("cuda")` the CPU's
autocast key behaves as CUDA's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ampdoctor.errors import UsageError
from ampdoctor.precision.emulation.casts import WeightCache, policy_kernels
from ampdoctor.precision.emulation.half_kernels import half_kernels
from ampdoctor.precision.emulation.overlay import LOCK, Overlay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PolicyName = Literal["cuda", "native"]
"""`cuda`: CUDA's op lists on the CPU; `native`: the CPU's own."""


class AutocastPolicy:
    """A policy in force.

    Attributes:
        name: Which one.
    """

    __slots__ = ("_emulated", "name")

    def __init__(self, name: PolicyName) -> None:
        self.name = name
        self._emulated: dict[str, None] = {}

    @property
    def emulated_ops(self) -> tuple[str, ...]:
        """Ops ("aten.avg_pool3d") that ran in fp32 and were rounded for want of a half kernel, in order of use."""
        return tuple(self._emulated)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each way in which the replay departs from what a GPU does."""
        return tuple(
            f"{op} has no half kernel on the CPU: it ran in fp32 and its result was rounded to fp16."
            for op in self._emulated
        )

    def _note(self, op: str) -> None:
        self._emulated.setdefault(f"aten.{op}")


class _Installed:
    """What is laid over the dispatcher for the policy on top of the stack of active ones."""

    def __init__(self) -> None:
        self.active: list[AutocastPolicy] = []
        self.overlay: Overlay | None = None
        self.cache = WeightCache()
        self.clear_autocast_cache: Callable[[], None] | None = None

    def enter(self, policy: AutocastPolicy) -> None:
        with LOCK:
            self.active.append(policy)
            self._settle()

    def leave(self, policy: AutocastPolicy) -> None:
        with LOCK:
            self.active.remove(policy)
            self._settle()

    def _settle(self) -> None:
        wanted = bool(self.active) and self.active[-1].name == "cuda"
        if wanted and self.overlay is None:
            self.overlay = Overlay([*policy_kernels(self.cache), *half_kernels(self._note)])
            self._hook_cache()
        elif not wanted and self.overlay is not None:
            self.overlay.remove()
            self.overlay = None
            self._unhook_cache()

    def _note(self, op: str) -> None:
        for policy in tuple(self.active):
            policy._note(op)  # noqa: SLF001 - its own class's keeper

    def _hook_cache(self) -> None:
        # torch.autocast empties the C++ weight cache with this call when its outermost region ends; it is the one
        # place that says that ours ends as well.
        original = self.clear_autocast_cache = torch.clear_autocast_cache

        def clear_autocast_cache() -> None:
            self.cache.clear()
            original()

        torch.clear_autocast_cache = clear_autocast_cache

    def _unhook_cache(self) -> None:
        self.cache.clear()
        if self.clear_autocast_cache is not None:
            torch.clear_autocast_cache = self.clear_autocast_cache
            self.clear_autocast_cache = None


_INSTALLED = _Installed()


def policy_in_force() -> PolicyName:
    """Returns the policy that autocast on the CPU follows now."""
    return _INSTALLED.active[-1].name if _INSTALLED.active else "native"


@contextmanager
def autocast_policy(name: PolicyName = "cuda") -> Iterator[AutocastPolicy]:
    """Make autocast on the CPU follow a policy.

    Kernels belong to the process: while one thread is inside, autocast in every thread follows the policy that was
    entered last and not left yet. Entering twice installs once; the CPU's own kernels are back when the last one is
    left, also after an exception. Tensors on other devices are not concerned. Under "cuda" ops without a half kernel
    on the CPU run in fp32 and are rounded, with and without autocast.

    Measured on one core: an op of the fp32 or promote list takes about 6 microseconds more than the same op with an
    explicit cast; ops that both devices cast alike (linear, matmul, conv) and ops that neither casts cost nothing
    more; a step of a 4-layer transformer took the same time under both. Entering and leaving takes 8 ms.

    Args:
        name: "cuda", or "native" for the CPU's own policy (also inside a region of "cuda").

    Yields:
        The policy; its notes say which ops had to be emulated.

    Raises:
        UsageError: No such policy.
    """
    if name not in get_args(PolicyName):
        raise UsageError(f"no autocast policy is called {name!r}: choose cuda or native")
    policy = AutocastPolicy(name)
    _INSTALLED.enter(policy)
    try:
        yield policy
    finally:
        _INSTALLED.leave(policy)
