"""Numbers at the edges of modules: the batch that enters a model, what modules return, gradients that come back."""

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
from ampdoctor.numerics import extremes_of_each
from ampdoctor.numerics.tensors import Unseen, is_plain

MOST_ACTIVATIONS = 256
"""Modules that are looked at in a step; of a model with more, another part each time."""
MOST_CALLS = 4
"""Calls of one module in a step: a recurrent cell is called once a token."""
HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a module has returned.

    Attributes:
        part: "output", with the path in it of the first tensor.
        call: Number of the module's call in the step, from 0.
        sampled: What stands for it in `values`; its name is the module's.
        values: A copy of its sampled elements, one-dimensional and on its device.
        extremes: Its smallest and largest element, on its device.
        norm: L2 norm of all elements, likewise.
    """

    part: str
    call: int
    sampled: Sampled
    values: Tensor
    extremes: tuple[Tensor, Tensor]
    norm: Tensor


class Activations:
    """Hangs on the parts of a model during one of its calls, and takes a copy of what they return.

    Hooks are there in these calls alone, and in none that is compiled: there they would become a part of its graph.
    What the model itself returns is told by whoever hangs on it already.

    Args:
        fail: Told what went wrong; nothing is raised into the model.

    Attributes:
        taken: Of the running step.
    """

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self.taken: list[Returned] = []
        self._fail = fail
        self._hooks = UncopiedHooks()
        self._calls: Counter[str] = Counter()
        self._models: list[weakref.ref[nn.Module]] = []
        self._open: weakref.ref[nn.Module] | None = None
        self._last: weakref.ref[Tensor] | None = None
        self._thread = 0
        self._turn = 0

    def begin_step(self) -> None:
        """A step begins; what an earlier one has left is forgotten."""
        self.detach()
        self.taken = []
        self._turn += bool(self._models)
        self._models.clear()
        self._calls.clear()

    def attach(self, name: str, model: nn.Module) -> None:
        """A model is about to run; of its calls in a step the first is looked at.

        Args:
            name: Its name; "" is the model itself.
            model: The model.
        """
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
        """No hook is left."""
        self._hooks.remove()

    def returned(self, name: str, model: nn.Module, output: Any) -> None:
        """A model has returned; where it was not attached to in this step, that is no first call."""
        if self._open is not None and self._open() is model:
            self._take(name, output)
        self._open = self._last = None

    def _hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def returned(_module: nn.Module, _args: Any, output: Any) -> None:
            here = threading.get_ident() == self._thread  # replicas on other devices run on threads of their own
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
        if self._last is not None and self._last() is tensor:  # its last part has returned the same
            return
        self._last = weakref.ref(tensor)
        (samples,), (norms,) = sample([(path, tensor)]), norms_of([(path, tensor)])
        found = Returned(
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
    """The parts of a model, each once, without those that are inside a compiled one, which is not run as Python."""
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


# The gradients that come back to models' outputs, of which half loses some before any layer has seen them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A gradient that has come back to an output.

    Attributes:
        module: Name of the module; "" is the model itself.
        part: "output" or "input".
        call: Number of the module's call in the step, from 0.
        sampled: What stands for it in `values`.
        values: A copy of its sampled elements, one-dimensional and on its device. They carry the loss scale.
    """

    module: str
    part: str
    call: int
    sampled: Sampled
    values: Tensor


def arrived(module: str, gradient: Tensor, *, part: str = "output", call: int = 0) -> Arrived | None:
    """Returns a copy of a few thousand elements, without waiting for the device; None where there is nothing to count.

    Args:
        module: Name of the module.
        gradient: Any shape, layout and device; as the backward delivers it.
        part: "output" or "input".
        call: Number of the module's call.
    """
    if not (gradient.is_floating_point() or gradient.is_complex()) or gradient.is_meta or not gradient.numel():
        return None
    (samples,) = sample([(module, gradient)])
    return Arrived(module=module, part=part, call=call, sampled=samples.plan[0], values=samples.buffer)


# What a batch is like: drawn when a model is called with it, told when the step's numbers have arrived.


MOST = 512
"""Elements of a batch: the root mean square of normal ones is known within 6 % at 95 % (1.96 / sqrt(2 * 512))."""
_IDS = frozenset({torch.int64, torch.int32, torch.int16})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReading:
    """What a step's batches are like; None where none was seen, or of ids.

    Attributes:
        elements: Number of their elements, of all micro-steps.
        rms: Root mean square.
        zero_share: Share that is zero.
        fingerprint: CRC-32.
    """

    elements: int | None = None
    rms: float | None = None
    zero_share: float | None = None
    fingerprint: int | None = None


NO_BATCH = BatchReading()


def drawn_from(batch: Tensor) -> Tensor | None:
    """Returns at most `MOST` elements, evenly over memory, in float32 on the batch's device; None where it has none.

    Args:
        batch: Any; a copy is drawn of one that is dense and has numbers or ids.
    """
    if not is_plain(batch) or batch.is_meta or batch.layout is not torch.strided or not batch.numel():
        return None
    if batch.is_complex() or batch.dtype is torch.bool:
        return None
    with Unseen(batch):
        return strided(batch.detach(), MOST).to(torch.float32, copy=True)


def is_numbers(batch: Tensor) -> bool:
    """Whether a batch has numbers, of which one may be larger than another; ids may not."""
    return batch.dtype not in _IDS


def batch_of(drawn: Sequence[Tensor], *, elements: int, numbers: bool) -> BatchReading:
    """Returns what the batches of a step are like.

    Args:
        drawn: Of each, on the CPU.
        elements: That the batches have.
        numbers: They have numbers, and no ids.
    """
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
