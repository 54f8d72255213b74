"""Which modules compute something themselves: the candidates for a smallest set of fp32 modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ampdoctor.probes.modules import ModuleStack
from ampdoctor.probes.op_overrides import calling_line
from ampdoctor.probes.ops import FunctionNames

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import ObservedRun


class OwnOps(FunctionNames):
    """Notes the modules whose own forward calls a torch function, while it is attached."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = ModuleStack()
        self._first: dict[str, int] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """Clean names, in the order of execution; a parent before its children, as fp32 there applies to them too."""
        entered: dict[str, int] = {}
        for name, order in self._first.items():
            parts = name.split(".")
            for depth in range(len(parts) + 1):
                ancestor = ".".join(parts[:depth])
                entered[ancestor] = min(entered.get(ancestor, order), order)
        return tuple(sorted(self._first, key=lambda name: (entered[name], name.count(".") + bool(name))))

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        """Watch the session's steps."""
        self._modules.clear()
        with self._modules.attach(run), self.watching():
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        running = self._modules.current
        if running is not None and running[0] not in self._first and calling_line() is not None:
            self._first[running[0]] = len(self._first)
        return func(*args, **(kwargs or {}))
