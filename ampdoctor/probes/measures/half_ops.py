"""Whether a step computes in a half format at all, and which line of the user's decides that it does not.

The path of a GPU is easily left: `nullcontext()` in autocast's place where the device is "cpu", `enabled=False`, or
autocast on a device whose default is bf16. What was then replayed says nothing about the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.probes.measures.halves import HALVES
from ampdoctor.probes.ops.source import called_by_user, own_line
from ampdoctor.probes.ops.tensors import tensors_in

if TYPE_CHECKING:
    from ampdoctor.hooks.interfaces import Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A context that was open when the step first called a module.

    Attributes:
        autocast: It is autocast; else `nullcontext`, which does nothing.
        enabled: It casts.
        dtype: What it casts to.
        unnamed: Its dtype was left to the device's default.
        line: File and line that made it in the step; where that was before the step, that entered it.
    """

    autocast: bool
    enabled: bool = False
    dtype: torch.dtype | None = None
    unnamed: bool = False
    line: tuple[str, int] | None


class HalfOps:
    """Looks at the formats of a step's results, and at the contexts around its modules; for one replay of a step.

    Attributes:
        formats: Half formats that some op of the step made.
        around: The contexts that were open when a module was first called, or at the first op outside of all modules
            where none was; the innermost last.
    """

    def __init__(self) -> None:
        self.formats: set[torch.dtype] = set()
        self.around: tuple[Region, ...] = ()
        self._open: list[tuple[Any, Region]] = []
        self._thread = threading.get_ident()
        self._made: dict[int, tuple[Any, bool, tuple[str, int] | None]] = {}
        self._called = False

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks on every module: the first that is called tells where the model's forward begins."""
        with ExitStack() as stack:
            for module in run.model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(self._on_call).remove)
            yield

    @contextmanager
    def during(self, step: int) -> Iterator[None]:  # noqa: ARG002 - the seam's signature
        """Watch every op, and both kinds of contexts, whose classes are changed in place for as long as that.

        What other threads enter meanwhile is none of the step's.
        """
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            for kind in (torch.autocast, nullcontext):
                for name, around in (
                    ("__init__", self._making),
                    ("__enter__", self._entering),
                    ("__exit__", self._leaving),
                ):
                    stack.callback(setattr, kind, name, getattr(kind, name))
                    setattr(kind, name, around(getattr(kind, name)))
            stack.enter_context(_Formats(self.formats, self._on_op))
            yield

    def finish(self, step: int, loss: Any) -> None:  # noqa: ARG002 - the seam's signature
        """Let go of the contexts."""
        self._made.clear()
        self._open.clear()

    def _on_call(self, _module: Any, _args: Any) -> None:
        if not self._called:
            self._called = True
            self.around = tuple(region for _, region in self._open)

    def _on_op(self) -> None:
        if not self._called and len(self._open) > len(self.around):
            self.around = tuple(region for _, region in self._open)

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        def made(context: Any, *args: Any, **kwargs: Any) -> None:
            original(context, *args, **kwargs)
            if threading.get_ident() != self._thread:
                return
            unnamed = kwargs.get("dtype", args[1] if len(args) > 1 else None) is None
            self._made[id(context)] = context, unnamed, own_line()

        return made

    def _entering(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(context: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(context)
            _, unnamed, line = self._made.get(id(context), (None, False, None))
            if isinstance(context, torch.autocast):
                region = Region(
                    autocast=True,
                    enabled=context._enabled,
                    dtype=context.fast_dtype,
                    unnamed=unnamed,
                    line=line or own_line(),
                )
            else:
                region = Region(autocast=False, line=(line or own_line()) if called_by_user() else None)
            self._open.append((context, region))
            return original(context)

        return enter

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(context: Any, *raised: Any) -> Any:
            # one that was entered before the step, or on another thread, is not among them
            at = next((i for i in reversed(range(len(self._open))) if self._open[i][0] is context), None)
            if at is not None and threading.get_ident() == self._thread:
                del self._open[at]
            return original(context, *raised)

        return leave


class _Formats(TorchDispatchMode):
    def __init__(self, found: set[torch.dtype], told: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._found = found
        self._told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._told()
        self._found.update(tensor.dtype for tensor in tensors_in(made) if tensor.dtype in HALVES)
        return made
