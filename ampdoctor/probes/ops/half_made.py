"""Where a program makes parameters in float16: its own line that casts, loads or builds the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ampdoctor.evidence.where import Source
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.probes.ops.source import as_source, own_line

_CASTS = ("half", "to")
"""Methods of a module that put half values into the parameters that it has."""


class HalfMade:
    """Notes for each float16 parameter the line that has made it so; nothing of the program's is kept alive."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[weakref.ref[torch.Tensor], Source | None]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> Source | None:
        """Return the line that made the first of these parameters of which one is known."""
        for parameter in parameters:
            there, line = self._lines.get(id(parameter), (None, None))
            if there is not None and there() is parameter and line is not None:
                return line
        return None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, lines are noted; nothing is left in place afterwards."""
        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(self._registered).remove)
            for method in _CASTS:
                stack.enter_context(replaced(nn.Module, method, self._casting(getattr(nn.Module, method))))
            yield

    def _registered(self, _module: nn.Module, _name: str, parameter: Any) -> None:
        with suppress(Exception):  # a training is never harmed
            if isinstance(parameter, torch.Tensor) and parameter.dtype is torch.float16:
                self._note(parameter)

    def _casting(self, original: Any) -> Any:
        def cast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = original(module, *args, **kwargs)
            with suppress(Exception):
                for parameter in module.parameters():
                    if parameter.dtype is torch.float16 and self.of([parameter]) is None:
                        self._note(parameter)
            return result

        cast.__wrapped__ = original  # type: ignore[attr-defined]  # functions take attributes
        return cast

    def _note(self, parameter: torch.Tensor) -> None:
        self._lines[id(parameter)] = weakref.ref(parameter), as_source(own_line())
