"""Hooks on every optimizer's step, which a program may clear together with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerHooks:
    """Hooks before and after the `step` of every optimizer, as long as they are not removed.

    Args:
        before: Called as torch calls `register_optimizer_step_pre_hook`'s.
        after: The same of `register_optimizer_step_post_hook`.
    """

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._hung = (
            (register_optimizer_step_pre_hook, before),
            (register_optimizer_step_post_hook, after),
        )
        self._handles: list[Any] = []

    def hang(self) -> None:
        """Put in place what is not, or is there no more: a program that clears the table of such hooks clears ours."""
        if not self._handles or not all(map(is_in_place, self._handles)):
            self.remove()
            self._handles = [register(hook) for register, hook in self._hung]

    def remove(self) -> None:
        """No hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def is_in_place(handle: Any) -> bool:
    """Whether the hook that a handle of torch's (`RemovableHandle`) stands for is in its table still."""
    table = handle.hooks_dict_ref()
    return table is not None and handle.id in table
