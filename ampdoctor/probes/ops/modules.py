"""Which module is running: a stack kept by hooks, also while activation checkpointing runs a forward again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampdoctor.hooks.torch_internals import in_backward

if TYPE_CHECKING:
    from torch import nn

    from ampdoctor.hooks.interfaces import Watched


class ModuleStack:
    """The modules whose forward is running, innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, int]] = []
        self._calls: Counter[tuple[str, bool]] = Counter()

    def clear(self) -> None:
        """A new step begins."""
        self._stack.clear()
        self._calls.clear()

    @property
    def current(self) -> tuple[str, int] | None:
        """(name, call) of the innermost running module; None outside the model."""
        return self._stack[-1] if self._stack else None

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:
        """Hooks on every module."""
        scripted: dict[int, str] = {}
        with ExitStack() as stack:
            for name, module in run.model.named_modules():
                clean = run.module_names.get(name, name)
                if isinstance(module, torch.jit.ScriptModule):
                    scripted[id(module)] = clean
                    continue
                stack.callback(module.register_forward_pre_hook(self._enter(clean, module), prepend=True).remove)
                # always_call: a checkpointed forward is left by an exception once it has recomputed what it needs
                stack.callback(module.register_forward_hook(self._leave(clean, module), always_call=True).remove)
            if scripted:
                self._attach_scripted(scripted, stack)
            yield

    def _attach_scripted(self, names: dict[int, str], stack: ExitStack) -> None:
        """A scripted module takes no hooks of its own; the global ones see it called from Python, its children not."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in names:
                self._enter(names[id(module)], module)(module, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in names:
                self._leave(names[id(module)], module)(module, args, output)

        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)

    def _enter(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any], None]:
        def hook(called: nn.Module, _args: Any) -> None:
            if called is not module:
                return  # a copy of the model (an EMA's deepcopy) has copies of its hooks
            again = in_backward()
            self._stack.append((name, self._calls[name, again]))
            self._calls[name, again] += 1

        return hook

    def _leave(self, name: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def hook(called: nn.Module, _args: Any, _output: Any) -> None:
            while called is module and self._stack:
                top, _ = self._stack.pop()
                if top == name:
                    return

        return hook


class CalledModules(ModuleStack):
    """The same where nobody knows beforehand which modules will be called: hooks on all that there are.

    Args:
        name_of: Name of a module that is called with some arguments, and whether no other is running; None for one that
            is to pass for a part of the module that calls it.
    """

    def __init__(self, name_of: Callable[[nn.Module, Any, bool], str | None]) -> None:
        super().__init__()
        self._name_of = name_of
        self._names: dict[int, str] = {}

    @contextmanager
    def attach(self, run: Watched) -> Iterator[None]:  # noqa: ARG002 - the modules are not the run's
        """Hooks on every module of the process."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._on_call).remove)
            stack.callback(register_module_forward_hook(self._on_return, always_call=True).remove)
            stack.callback(self._names.clear)
            yield

    def _on_call(self, module: nn.Module, args: Any) -> None:
        name = self._name_of(module, args, not self._stack)
        if name is not None:
            self._names[id(module)] = name
            self._enter(name, module)(module, args)

    def _on_return(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._leave(name, module)(module, args, output)
