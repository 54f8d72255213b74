"""Which module runs, in forward and backward: what a debugging mode written by hand would have beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


class ModuleStack:
    """Names of the running modules.

    Attributes:
        running: Names in `named_modules()`, the innermost last; empty outside of all modules.
        spans: (first, past the last, name) of the autograd sequence numbers that each finished call took.
    """

    def __init__(self) -> None:
        self.running: list[str] = []
        self.spans: list[tuple[int, int, str]] = []
        self._started: list[int] = []
        self._ends_with_backward = False

    @property
    def innermost(self) -> str:
        """The running module; "" outside of all."""
        return self.running[-1] if self.running else ""

    def of_node(self, sequence: int) -> str:
        """Return the innermost module whose forward made the autograd node with this sequence number."""
        around = [(past - first, name) for first, past, name in self.spans if first <= sequence < past]
        return min(around, default=(0, ""))[1]

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Hooks are in place inside."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                for hook in (
                    module.register_forward_pre_hook(self._enter(name)),
                    module.register_forward_hook(self._leave(name)),
                ):
                    stack.callback(hook.remove)
            yield

    def clear(self) -> None:
        """Forget the last step."""
        self.running.clear()
        self.spans.clear()
        self._started.clear()

    def _enter(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            self.running.append(name)
            self._started.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # noqa: SLF001
            self._in_backward(inputs, lambda *_: self._pop(name))

        return hook

    def _leave(self, name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self._pop(name)
            past = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001
            self.spans.append((self._started.pop(), past, name))
            self._in_backward(outputs, lambda *_: self._enter_backward(name))

        return hook

    def _pop(self, name: str) -> None:
        if name in self.running:
            del self.running[len(self.running) - 1 - self.running[::-1].index(name)]

    def _enter_backward(self, name: str) -> None:
        if not self._ends_with_backward:
            # modules whose inputs need no gradient are never left
            torch.autograd.Variable._execution_engine.queue_callback(self._leave_backward)  # noqa: SLF001
            self._ends_with_backward = True
        place = len(self.running)
        # the hook of a module that returns its child's output fires after the child's
        while place and (not name or self.running[place - 1].startswith(f"{name}.")):
            place -= 1
        self.running.insert(place, name)

    def _leave_backward(self) -> None:
        self.running.clear()
        self._ends_with_backward = False

    @staticmethod
    def _in_backward(values: Any, action: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, action)
