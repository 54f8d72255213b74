"""Formats in a step: which tensors and modules are in half, and whether any are."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.evidence.run_facts import OVERFLOWED, ModuleFacts
from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.numerics.tensors import Unseen
from ampdoctor.precision.casting import HALVES, REDUCED
from ampdoctor.probes.modules import (
    LowPrecisionTensors,
    is_watched,
    memory_of,
    observed_modules,
    owns_parameters,
    tensors_in,
)
from ampdoctor.probes.ops import CASTS, UNINITIALISED, OpProbe, Probe, Site, kernel_name
from ampdoctor.probes.user_code import own_line

# -- the autocast regions that a step enters --


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """An autocast region."""

    enabled: bool
    dtype: torch.dtype
    unnamed: bool  # no dtype was given: the device's default
    line: tuple[str, int] | None  # that made it in the step; if it was made before, that entered it


class AutocastProbe(Probe):
    """Lists the autocast regions that a step enters, in order; torch's class is patched during the step."""

    def __init__(self) -> None:
        self.entered: list[Region] = []

    @contextmanager
    def during(self, step: int) -> Iterator[None]:  # noqa: ARG002 - the seam's signature
        made: dict[int, tuple[Any, bool, tuple[str, int] | None]] = {}
        make, enter = torch.autocast.__init__, torch.autocast.__enter__

        def making(context: Any, *args: Any, **kwargs: Any) -> None:
            make(context, *args, **kwargs)
            unnamed = kwargs.get("dtype", args[1] if len(args) > 1 else None) is None
            made[id(context)] = context, unnamed, own_line()

        def entering(context: Any) -> Any:
            _, unnamed, line = made.get(id(context), (None, False, None))
            self.entered.append(
                Region(enabled=context._enabled, dtype=context.fast_dtype, unnamed=unnamed, line=line or own_line())
            )
            return enter(context)  # type: ignore[no-untyped-call]  # torch has no annotations for it

        with replaced(torch.autocast, "__init__", making), replaced(torch.autocast, "__enter__", entering):
            yield


# -- the largest unmasked logit of a softmax --

REACH = 104.0  # a logit further below its row's maximum has weight 0 in fp32: exp(-104) is below 2^-149 / 2
MASKED = -8192.0  # a row that stays below this is masked as a whole: masks are -1e4 or less, some added to scores


def softmax_logits(logits: Tensor, dim: int) -> float | None:
    """Largest logit magnitude of a softmax over `dim`; `OVERFLOWED` for +inf, None where all are masked."""
    if not logits.numel():
        return None
    with Unseen(logits):
        rows = logits.detach().movedim(dim, -1) if logits.dim() else logits.detach().reshape(1, 1)
        values = rows if rows.dtype == torch.float64 else rows.float()
        top = values.amax(-1, keepdim=True)
        counted = (values >= top - REACH) & (top > MASKED)
        found = float(torch.where(counted, values.abs(), -1.0).max())
    return min(found, OVERFLOWED) if found >= 0.0 else None


# -- which tensors are in half, and in which format each module computes, observed in one half-precision step --

FORMATS = {**HALVES, torch.float32: "fp32", torch.float64: "fp64"}
_WIDTH = tuple(FORMATS)
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"})
_ATTENTION = "scaled_dot_product"
_PRODUCTS = {"mm": 0, "addmm": 1}  # matrix products (of a linear layer), and the index of the first factor
_MATRICES = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "convolution", "mkldnn_convolution"})
_MOVES = frozenset({"clone", "_unsafe_view", "copy_"})
_CAST = torch.ops.aten._to_copy.default  # the op that a cast is
_ENGINE = frozenset({"backward", "grad"})  # run by autograd before its first node: the ones that start a backward


@dataclass(slots=True)
class _Seen:
    ops: dict[str, str] = field(default_factory=dict)
    logits: float | None = None
    product: float | None = None
    multiples: bool | None = None
    smallest: int | None = None


class FormatsProbe(OpProbe):
    """Records, below autocast, which tensors are half and the widest format of the inputs of each op of a module."""

    takes_apart = False

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[torch.dtype] = set()  # half formats that ops of the step made
        self.loss_in_half = False  # a loss in half with a dimension, which scaling does not promote to fp32
        self._outputs: set[str] = set()
        self._inputs: set[str] = set()
        self._parameters: set[str] = set()
        self._storages: dict[int, str] = {}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self._seen: dict[str, _Seen] = {}

    @property
    def plan(self) -> LowPrecisionTensors:
        """The tensors in half that were found so far."""
        return LowPrecisionTensors(frozenset(self._outputs), frozenset(self._inputs), frozenset(self._parameters))

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Install hooks on the observed modules; parameters that are half themselves need no cast."""
        modules = {run.module_names.get(name, name): module for name, module in run.model.named_modules()}
        self._types = {name: type(module).__name__ for name, module in modules.items()}
        self._sizes = {name: sum(p.numel() for p in one.parameters(recurse=False)) for name, one in modules.items()}
        names = run.parameter_names()
        for parameter in run.model.parameters():
            name = names[id(parameter)]
            if parameter.dtype in REDUCED:
                self._parameters.add(name)
            elif memory := memory_of(parameter):
                self._storages[memory] = name
        with super().attach(run), ExitStack() as stack:
            for name, module in observed_modules(run):
                stack.callback(module.register_forward_hook(self._hook(name), always_call=True).remove)
            yield

    def begin(self) -> None:
        self._made.clear()

    def finish(self, step: int, loss: Any) -> None:
        """A 0-dim half loss times the scale is fp32; one of shape [1] stays half (torch's type promotion)."""
        super().finish(step, loss)
        self._made.clear()
        if isinstance(loss, torch.Tensor):
            self.loss_in_half = self.loss_in_half or (loss.dtype in REDUCED and loss.dim() > 0)

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made = [tensor for tensor in tensors_in(output) if tensor.dtype in REDUCED]
            if not made:
                return
            self._outputs.add(name)
            if owns_parameters(module) and any(self._unseen(tensor) for tensor in tensors_in(args)):
                self._inputs.add(name)
            for tensor in made:
                self._made[id(tensor)] = weakref.ref(tensor)

        return hook

    def _unseen(self, tensor: Tensor) -> bool:
        """Wider than half (then the module casts it), or half but not made by a watched module."""
        if not tensor.is_floating_point() or not tensor.requires_grad:
            return False
        known = self._made.get(id(tensor))
        return tensor.dtype not in REDUCED or known is None or known() is not tensor

    def facts(self) -> tuple[ModuleFacts, ...]:
        """The modules in the order in which they first computed something."""
        return tuple(
            ModuleFacts(
                name=name,
                type=self._types.get(name, ""),
                parameters=self._sizes.get(name, 0),
                ops=dict(seen.ops),
                logits_amax=seen.logits,
                product_amax=seen.product,
                gemm_multiple_of_16=seen.multiples,
                gemm_smallest=seen.smallest,
            )
            for name, seen in self._seen.items()
        )

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        kernel = kernel_name(func)
        if func is _CAST and kwargs.get("dtype") in REDUCED and (name := self._storages.get(memory_of(args[0]))):
            self._parameters.add(name)
        result = func(*args, **kwargs)
        self.formats.update(tensor.dtype for tensor in tensors_in(result) if tensor.dtype in REDUCED)
        watched = site.phase in ("forward", "loss") and not site.recompute and site.op not in _ENGINE
        if watched and not (func.is_view or kernel in CASTS or kernel in UNINITIALISED | _MOVES):
            name = "scaled_dot_product_attention" if _ATTENTION in kernel else site.op
            self._note(site.module, name, kernel, args, kwargs, result)
        return result

    def _note(self, module: str, op: str, kernel: str, args: Any, kwargs: Any, result: Any) -> None:  # noqa: PLR0917 - a call
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
        elif kernel in _MATRICES and result.dtype in REDUCED:
            seen.product = _larger(seen.product, _made(result, values))
        if kernel in _PRODUCTS:
            self._note_product(seen, *args[_PRODUCTS[kernel] : _PRODUCTS[kernel] + 2])

    @staticmethod
    def _note_product(seen: _Seen, left: Tensor, right: Tensor) -> None:
        """Note the sizes of a product of a (rows, inner) and an (inner, columns) matrix."""
        multiples = all(size % 16 == 0 for size in (*left.shape, right.shape[1]))
        seen.multiples = multiples and seen.multiples is not False
        smallest = min(right.shape)
        seen.smallest = smallest if seen.smallest is None else min(seen.smallest, smallest)


def _made(result: Tensor, operands: list[Tensor]) -> float | None:
    """Largest magnitude of a product; None where it is non-finite because an operand is."""
    if not result.numel():
        return None
    with Unseen(result):
        amax = float(result.detach().abs().amax())
        if math.isfinite(amax):
            return amax
        return OVERFLOWED if all(bool(torch.isfinite(operand).all()) for operand in operands) else None


def _larger(known: float | None, other: float | None) -> float | None:
    return known if other is None else other if known is None else max(known, other)
