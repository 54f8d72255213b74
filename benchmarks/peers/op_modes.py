"""Dispatch modes as people write them by hand: look at the result of every op, and keep the first bad one.

Read as an answer: the op's own name and the innermost running module, in forward and backward, from a stack of
module hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.peers.answer import Answer, Case
from benchmarks.peers.module_stack import ModuleStack

Bad = Callable[[torch.Tensor], torch.Tensor]


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Is there a NaN or an infinity?"""
    return ~tensor.isfinite().all()


def has_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Is there a NaN?"""
    return tensor.isnan().any()


class FirstBadOp(TorchDispatchMode):
    """Looks at the result of every op.

    Args:
        bad: What is asked of each floating-point result.
        modules: Told who runs; None where only the op is wanted.
    """

    def __init__(self, bad: Bad, modules: ModuleStack | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bad = bad
        self.modules = modules
        self.first: tuple[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, then look at what came out."""
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "empty" not in name:  # memory that nobody has written yet
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and self._is_bad(tensor):
                    self.first = self.first or (name, self.modules.innermost if self.modules else "")
        return out

    def _is_bad(self, tensor: torch.Tensor) -> bool:
        values = tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001
        return bool(self.bad(values.float() if values.itemsize == 1 else values))  # fp8 has no isfinite


def isfinite_of_every_op(case: Case) -> Answer | None:
    """Train under a mode that asks `isfinite`."""
    return _first(case, not_finite)


def isnan_of_every_op(case: Case) -> Answer | None:
    """Train under a mode that asks `isnan`."""
    return _first(case, has_nan)


def _first(case: Case, bad: Bad) -> Answer | None:
    loop = case.loop()
    modules = ModuleStack()
    with modules.attached(loop.model):
        for step, batch in loop.batches():
            modules.clear()
            with FirstBadOp(bad, modules) as mode:
                loop.step(batch)
            if mode.first is not None:
                op, module = mode.first
                return Answer(step=step, module=module, op=op, said=f"{op} in {module or 'no module'}")
    return None
