"""Base classes of the probes: what a probe leaves out of `hooks.interfaces.Probe`, and what all watchers of ops do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.hooks.interfaces import ObservedRun
from ampdoctor.probes.modules import takes_apart
from ampdoctor.probes.ops import Site, Sites, kernel_name


class Probe:
    """Observes a replay; a subclass overrides the parts that it needs."""

    def attach(self, run: ObservedRun) -> AbstractContextManager[None]:  # noqa: ARG002 - a subclass uses it
        return nullcontext()

    def begin(self) -> None:
        """Forget the last step."""

    def during(self, step: int) -> AbstractContextManager[None]:  # noqa: ARG002 - a subclass uses it
        self.begin()
        return nullcontext()

    def finish(self, step: int, loss: Any) -> None:
        """End a step that returned `loss`."""


class OpProbe(Probe, TorchDispatchMode):
    """Observes the ops of the steps that run while it is attached."""

    takes_apart: ClassVar[bool] = True  # ops on tensor subclasses are seen as the ops that they consist of

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's mode has no annotations
        self._sites = Sites()
        self._step = 0

    @contextmanager
    def attach(self, run: ObservedRun) -> Iterator[None]:
        with self._sites.attach(run):
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        self._sites.clear()
        self._step = step
        self.begin()
        with self, self._sites.functions.watching():
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - a subclass uses them
        self._sites.clear()

    def on_op(self, site: Site, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.takes_apart and takes_apart(types, (args, kwargs)):
            return NotImplemented
        with torch._C.DisableTorchFunction():
            return self.on_op(self._sites.of(kernel_name(func)), func, args, kwargs)
