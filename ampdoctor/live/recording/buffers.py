"""The buffers of a loop's models as they were before each call: a call may write to what it reads."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ampdoctor.hooks.torch_internals import version_of


class Buffers:
    """Copies buffers, each once for each time that it was written to."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}  # by id: its version, a copy

    def watch(self, model: nn.Module) -> None:
        """The buffers are those of this model from now on, and go by the names that they have in it."""
        self._modules = [(name, weakref.ref(part)) for name, part in model.named_modules() if _own(part)]

    def now(self) -> dict[str, torch.Tensor]:
        """Returns what they are, by their names."""
        found: dict[str, torch.Tensor] = {}
        for module_name, there in self._modules:
            module = there()
            silent = module is not None and module.training and isinstance(module, _NormBase)
            for last, buffer in () if module is None else _own(module).items():
                if buffer is None:
                    continue
                known = self._copies.get(id(buffer))
                version = version_of(buffer)
                # batch norm's kernel writes to its buffers and raises no version
                if silent or known is None or known[0]() is not buffer or known[1] != version:
                    known = weakref.ref(buffer), version, buffer.detach().clone()
                    self._copies[id(buffer)] = known
                found[f"{module_name}.{last}" if module_name else last] = known[2]
        return found


def _own(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Those that a module has registered itself; `buffers()` walks its children too, which costs at each call."""
    return module._buffers  # noqa: SLF001
