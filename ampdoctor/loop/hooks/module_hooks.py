"""What copies and pickles of a model are without: the hooks that a watch has put on it."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The dicts in which a module has its forward hooks, each by the number of its handle."""


class UncopiedHooks:
    """Forward hooks that stay on the module they were put on: `copy`, `pickle` and `torch.save` do not see them.

    A loop copies its best model and saves whole ones, and would take the hooks along, and with them the watch. Copying
    and pickling look in `copyreg.dispatch_table` before they ask the object itself; while hooks are there, the classes
    of their modules have an entry in it. A class with a `__deepcopy__` of its own is not looked up there.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._keys: set[int] = set()
        self._entries: dict[type, tuple[Any, Any]] = {}

    def add(self, module: nn.Module, *handles: Any) -> None:
        """These are the handles of forward hooks that were put on a module."""
        self._handles += handles
        self._keys.update(handle.id for handle in handles)
        kind = type(module)
        if kind not in self._entries:
            before = copyreg.dispatch_table.get(kind)
            self._entries[kind] = before, self._reducer(before)
            copyreg.dispatch_table[kind] = self._entries[kind][1]

    def remove(self) -> None:
        """No hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._keys.clear()
        for kind, (before, ours) in self._entries.items():
            if copyreg.dispatch_table.get(kind) is not ours:  # somebody else's is around it
                continue
            if before is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.dispatch_table[kind] = before
        self._entries.clear()

    def _reducer(self, before: Callable[[Any], Any] | None) -> Callable[[nn.Module], Any]:
        def reduced(module: nn.Module) -> Any:
            # Protocols from 2 on take an object apart alike.
            made = module.__reduce_ex__(2) if before is None else before(module)
            if not isinstance(made, tuple) or len(made) < 3:
                return made
            state = made[2]
            if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
                return *made[:2], (self._without_hooks(state[0]), state[1]), *made[3:]
            return *made[:2], self._without_hooks(state), *made[3:]

        return reduced

    def _without_hooks(self, state: Any) -> Any:
        """A module's state, changed only where it has our hooks: their dicts are copies without them."""
        if not isinstance(state, dict):
            return state
        others = {}
        for name in _HOOKS:
            hooks = state.get(name)
            if isinstance(hooks, dict) and not self._keys.isdisjoint(hooks):
                others[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in self._keys)
        return {**state, **others} if others else state
