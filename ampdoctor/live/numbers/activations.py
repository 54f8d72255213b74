"""What the modules of a model return in half, in a step whose tensors are looked at one by one."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.hooks.callbacks import UncopiedHooks
from ampdoctor.hooks.nested import iter_tensors
from ampdoctor.hooks.torch_internals import in_backward, transforms
from ampdoctor.live.numbers.norms import norms_of
from ampdoctor.live.numbers.sampling import Sampled, sample
from ampdoctor.numerics import extremes_of_each

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
