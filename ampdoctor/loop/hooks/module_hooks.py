"""What copies, pickles and scripts of a model are without: the hooks that a watch has put on it."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ampdoctor.loop.torch_internals import seen_scripting

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
        _LIVING.add(self)

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
                return *made[:2], (_without_hooks(state[0], self._keys), state[1]), *made[3:]
            return *made[:2], _without_hooks(state, self._keys), *made[3:]

        return reduced

    @staticmethod
    @contextmanager
    def left_out_of_scripts() -> Iterator[None]:
        """Inside, `torch.jit.script` compiles a module without the hooks that are here: it cannot compile them."""

        def scripted(module: Any, run: Callable[[], Any]) -> Any:
            keys = set[int]().union(*(one._keys for one in list(_LIVING)))  # noqa: SLF001 - of this class
            parts = list(nn.Module.modules(module)) if isinstance(module, nn.Module) else []
            before = [(vars(part), {name: vars(part)[name] for name in _HOOKS if name in vars(part)}) for part in parts]
            try:
                for held, _ in before:
                    held.update(_without_hooks(held, keys))
                return run()
            finally:
                for held, hooks in before:
                    held.update(hooks)

        with seen_scripting(scripted):
            yield


_LIVING: weakref.WeakSet[UncopiedHooks] = weakref.WeakSet()


def _without_hooks(state: Any, keys: set[int]) -> Any:
    """A module's state, changed only where it has hooks of these numbers: their dicts are copies without them."""
    if not isinstance(state, dict):
        return state
    others = {}
    for name in _HOOKS:
        hooks = state.get(name)
        if isinstance(hooks, dict) and not keys.isdisjoint(hooks):
            others[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in keys)
    return {**state, **others} if others else state
