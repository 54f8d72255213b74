"""What each module computes, and in which format autocast lets it: read off one half-precision step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.evidence.of_runs.modules import OVERFLOWED, ModuleFacts
from ampdoctor.numerics.tensors import Unseen
from ampdoctor.probes.measures.attention import attention_logits, softmax_logits
from ampdoctor.probes.ops.naming import UNINITIALISED, is_cast, kernel_name
from ampdoctor.probes.ops.sites import Sites
from ampdoctor.probes.ops.tensors import is_watched, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from ampdoctor.hooks.interfaces import Watched

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_WIDTH = tuple(FORMATS)
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"})
_ATTENTION = "scaled_dot_product"
_PRODUCTS = {"mm": 0, "addmm": 1}
"""Matrix products of two dimensions, and the place of their first factor: what a linear layer comes down to."""
_MATRICES = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "convolution", "mkldnn_convolution"})
_HALF = frozenset({torch.float16, torch.bfloat16})
_MOVES = frozenset({"clone", "_unsafe_view", "copy_"})
_ENGINE = frozenset({"backward", "grad"})
"""What autograd itself computes before its first node: the ones that a backward starts from."""


@dataclass(slots=True)
class _Seen:
    ops: dict[str, str] = field(default_factory=dict)
    logits: float | None = None
    product: float | None = None
    multiples: bool | None = None
    smallest: int | None = None


class ModuleFactsProbe(TorchDispatchMode):
    """Watches the forward and the loss of the steps that run while it is attached; one step is enough.

    It stands below autocast, so an op's floating-point inputs have the format that it computes in; where they differ,
    type promotion makes that the widest. Casts, views and copies are no ops of note.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._sites = Sites()
        self._seen: dict[str, _Seen] = {}

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Module hooks, to know who is running."""
        modules = {run.module_names.get(name, name): module for name, module in run.model.named_modules()}
        self._types = {name: type(module).__name__ for name, module in modules.items()}
        self._parameters = {
            name: sum(p.numel() for p in module.parameters(recurse=False)) for name, module in modules.items()
        }
        with self._sites.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:  # noqa: ARG002 - the seam's signature
        """The dispatch mode and the function mode are on."""
        self._sites.clear()
        with self, self._sites.functions.watching():
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Forget where the step was."""
        self._sites.clear()

    def facts(self) -> tuple[ModuleFacts, ...]:
        """The modules in the order in which they first computed something."""
        return tuple(
            ModuleFacts(
                name=name,
                type=self._types.get(name, ""),
                parameters=self._parameters.get(name, 0),
                ops=dict(seen.ops),
                logits_amax=seen.logits,
                product_amax=seen.product,
                gemm_multiple_of_16=seen.multiples,
                gemm_smallest=seen.smallest,
            )
            for name, seen in self._seen.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            kernel = kernel_name(func)
            site = self._sites.of(kernel)
            result = func(*args, **kwargs)
            watched = site.phase in ("forward", "loss") and not site.recompute and site.op not in _ENGINE
            if watched and not (func.is_view or is_cast(kernel) or kernel in UNINITIALISED | _MOVES):
                name = "scaled_dot_product_attention" if _ATTENTION in kernel else site.op
                self._note(site.module, name, func, args, kwargs, result)
            return result

    def _note(self, module: str, op: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:  # noqa: PLR0917 - a call
        kernel = kernel_name(func)
        values = [t for t in tensors_in([args, kwargs]) if t.dtype in FORMATS]
        computed = max((_WIDTH.index(t.dtype) for t in values), default=None)
        if computed is None or not any(t.dtype in FORMATS for t in tensors_in(result)):
            return
        seen = self._seen.setdefault(module, _Seen())
        known = seen.ops.get(op)
        narrowest = computed if known is None else min(computed, tuple(FORMATS.values()).index(known))
        seen.ops[op] = FORMATS[_WIDTH[narrowest]]
        if not all(is_watched(t) for t in values):
            return
        if kernel in _SOFTMAX:
            seen.logits = _larger(seen.logits, softmax_logits(args[0], int(args[1])))
        elif _ATTENTION in kernel and not kernel.endswith("backward"):
            names = [argument.name for argument in func._schema.arguments]
            seen.logits = _larger(seen.logits, attention_logits({**dict(zip(names, args, strict=False)), **kwargs}))
        elif kernel in _MATRICES and result.dtype in _HALF:
            seen.product = _larger(seen.product, _made(result, values))
        if kernel in _PRODUCTS:
            self._note_product(seen, *args[_PRODUCTS[kernel] : _PRODUCTS[kernel] + 2])

    @staticmethod
    def _note_product(seen: _Seen, left: Tensor, right: Tensor) -> None:
        """Both factors are matrices: of rows by inner, and of inner by columns."""
        multiples = all(size % 16 == 0 for size in (*left.shape, right.shape[1]))
        seen.multiples = multiples and seen.multiples is not False
        smallest = min(right.shape)
        seen.smallest = smallest if seen.smallest is None else min(seen.smallest, smallest)


def _made(result: Tensor, operands: list[Tensor]) -> float | None:
    """Largest magnitude of a product; None where what is not finite was made of operands that were not either."""
    if not result.numel():
        return None
    with Unseen(result):
        amax = float(result.detach().abs().amax())
        if math.isfinite(amax):
            return amax
        return OVERFLOWED if all(bool(torch.isfinite(operand).all()) for operand in operands) else None


def _larger(known: float | None, other: float | None) -> float | None:
    return known if other is None else other if known is None else max(known, other)
