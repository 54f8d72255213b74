"""Numbers at the edges of modules: a model's batch, the outputs of modules, and the gradients of outputs."""

from __future__ import annotations

import math
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.hooks.callbacks import UncopiedHooks
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.hooks.torch_internals import in_backward, transforms
from ampdoctor.live.numbers.norms_and_samples import Sampled, norms_of, sample, strided
from ampdoctor.numerics.tensors import Unseen, extremes_of_each, is_plain

MOST_ACTIVATIONS = 256
"""Modules that are sampled in a step; a larger model is sampled in parts, another one each time."""
MOST_CALLS = 4
"""Sampled calls of one module in a step: a recurrent cell is called once a token."""
HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class AtModule:
    """A sampled tensor at a module's edge, on its device: the gradient of its output or input, or the output."""

    part: str  # "output", with the path in it of the first tensor, or "input"
    call: int  # number of the module's call in the step, from 0
    sampled: Sampled  # describes `values`; its name is the module's
    values: Tensor  # a copy of its sampled elements, one-dimensional; a gradient's carry the loss scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation(AtModule):
    """The output of a module."""

    extremes: tuple[Tensor, Tensor]  # its smallest and largest element
    norm: Tensor  # L2 norm of all elements


class Activations:
    """Hooks the uncompiled parts of a model during one of its calls, and samples their outputs; errors go to `fail`."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self.taken: list[Activation] = []  # in the running step
        self.in_fp16 = False  # an output in fp16 was sampled in any step
        self._fail = fail
        self._hooks = UncopiedHooks()
        self._calls: Counter[str] = Counter()
        self._models: list[weakref.ref[nn.Module]] = []
        self._open: weakref.ref[nn.Module] | None = None
        self._last: weakref.ref[Tensor] | None = None
        self._thread = 0
        self._turn = 0

    def begin_step(self) -> None:
        """Begins a step, and drops the samples of earlier ones."""
        self.detach()
        self.taken = []
        self._turn += bool(self._models)
        self._models.clear()
        self._calls.clear()

    def attach(self, name: str, model: nn.Module) -> None:
        """Called before a model runs; only its first call in a step is sampled. The name "" is the model itself."""
        self.detach()
        self._open = self._last = None
        if any(known() is model for known in self._models):
            return
        self._open = weakref.ref(model)
        self._models.append(self._open)
        self._thread = threading.get_ident()
        parts = _uncompiled(name, model)[1:]
        stride = max(-(-len(parts) // MOST_ACTIVATIONS), 1)
        for path, part in parts[self._turn % stride :: stride]:
            self._hooks.add(part, part.register_forward_hook(self._hook(path)))

    def detach(self) -> None:
        """Removes all hooks."""
        self._hooks.remove()

    def returned(self, name: str, model: nn.Module, output: Any) -> None:
        """Samples a model's output; without `attach` it is not the first call of the step, and is ignored."""
        if self._open is not None and self._open() is model:
            self._take(name, output)
        self._open = self._last = None

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def returned(_module: nn.Module, _args: Any, output: Any) -> None:
            here = threading.get_ident() == self._thread  # replicas on other devices run on other threads
            if not here or torch.compiler.is_compiling() or in_backward() or transforms():
                return
            try:
                self._take(path, output)
            except Exception as error:  # noqa: BLE001 - a watched training is never harmed
                self._fail(error)

        return returned

    def _take(self, path: str, output: Any) -> None:
        if len(self.taken) >= MOST_ACTIVATIONS or self._calls[path] >= MOST_CALLS:
            return
        inner, tensor = ("", output) if isinstance(output, Tensor) else next(iter_tensors(output), ("", None))
        if tensor is None or tensor.dtype not in HALF or tensor.is_meta or not tensor.numel():
            return
        if self._last is not None and self._last() is tensor:  # its last submodule has returned the same tensor
            return
        self._last = weakref.ref(tensor)
        self.in_fp16 |= tensor.dtype is torch.float16
        (samples,), (norms,) = sample([(path, tensor)]), norms_of([(path, tensor)])
        found = Activation(
            part=f"output.{inner}" if inner else "output",
            call=self._calls[path],
            sampled=samples.plan[0],
            values=samples.buffer,
            extremes=extremes_of_each([tensor])[0],
            norm=norms.vector,
        )
        self._calls[path] += 1
        self.taken.append(found)


def _uncompiled(name: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the parts of a model, each once, without those inside a compiled module, which does not run as Python."""
    found: dict[int, tuple[str, nn.Module]] = {}

    def walk(path: str, part: nn.Module) -> None:
        compiled = hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        if id(part) in found or compiled or isinstance(part, torch.jit.ScriptModule):
            return
        found[id(part)] = path, part
        for key, child in part.named_children():
            walk(f"{path}.{key}" if path else key, child)

    walk(name, model)
    return list(found.values())


# -- gradients of outputs: a half format loses some of their values before they reach a layer --


def arrived(module: str, gradient: Tensor, *, part: str = "output", call: int = 0) -> AtModule | None:
    """Samples a gradient of any shape, layout and device, without waiting; None where there is nothing to count."""
    if not (gradient.is_floating_point() or gradient.is_complex()) or gradient.is_meta or not gradient.numel():
        return None
    (samples,) = sample([(module, gradient)])
    return AtModule(part=part, call=call, sampled=samples.plan[0], values=samples.buffer)


# -- batches --

MOST = 512
"""Elements of a batch: the root mean square of normal ones is known within 6 % at 95 % (1.96 / sqrt(2 * 512))."""
_IDS = frozenset({torch.int64, torch.int32, torch.int16})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReading:
    """Figures of a step's batches; None where no batch was seen, or where they are ids."""

    elements: int | None = None  # in all micro-steps
    rms: float | None = None  # root mean square
    zero_share: float | None = None  # share of zeros
    fingerprint: int | None = None  # CRC-32


NO_BATCH = BatchReading()


def drawn_from(batch: Tensor) -> Tensor | None:
    """Returns at most `MOST` elements in float32 on the batch's device; None for one without dense numbers or ids."""
    if not is_plain(batch) or batch.is_meta or batch.layout is not torch.strided or not batch.numel():
        return None
    if batch.is_complex() or batch.dtype is torch.bool:
        return None
    with Unseen(batch):
        return strided(batch.detach(), MOST).to(torch.float32, copy=True)


def is_numbers(batch: Tensor) -> bool:
    """Whether a batch holds numbers that can be compared by size, not ids."""
    return batch.dtype not in _IDS


def batch_of(drawn: Sequence[Tensor], *, elements: int, numbers: bool) -> BatchReading:
    """Returns the figures of a step's batches from their drawn elements on the CPU; `numbers`: they are not ids."""
    if not drawn:
        return NO_BATCH
    fingerprint, squares, zeros, counted = 0, 0.0, 0, 0
    for one in drawn:
        fingerprint = zlib.crc32(one.numpy().tobytes(), fingerprint)
        if numbers:
            squares += float(one.double().square().sum())
            zeros += int((one == 0).sum())
            counted += one.numel()
    if not counted:
        return BatchReading(elements=elements, fingerprint=fingerprint)
    return BatchReading(
        elements=elements, rms=math.sqrt(squares / counted), zero_share=zeros / counted, fingerprint=fingerprint
    )
