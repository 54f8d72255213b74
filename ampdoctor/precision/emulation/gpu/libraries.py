"""What the libraries that hear of a GPU remember of the answer."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

_ASK: Final = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")
"""Modules whose functions ask about CUDA once in a process, and keep the answer."""
_STATES: Final = ("PartialState", "AcceleratorState", "GradientState")
_ABOUT: Final = frozenset({"cuda", "accelerator"})


def forget_what_was_heard() -> None:
    """Let them ask again: the answer is another inside and outside of an emulation."""
    for name in _ASK:
        module = sys.modules.get(name)
        if module is not None:
            for forget in _forgetting(module):
                forget()


def what_is_shared() -> Callable[[], None]:
    """Returns what puts Accelerate's idea of the process back, which it makes once: its device, its precision."""
    before = {name: dict(shared) for name, shared in _shared().items()}

    def put_back() -> None:
        for name, shared in _shared().items():
            shared.clear()
            shared.update(before.get(name, {}))

    return put_back


def _shared() -> dict[str, dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    states = {name: getattr(module, name, None) for name in _STATES}
    return {name: state._shared_state for name, state in states.items() if state is not None}


@functools.cache
def _forgetting(module: ModuleType) -> tuple[Callable[[], None], ...]:
    """Returns what clears the caches of the functions that ask, or ask one that asks."""
    kept = {name: value for name, value in vars(module).items() if hasattr(value, "cache_clear")}
    asked: set[str] = set()
    while True:
        more = {name for name, value in kept.items() if _names(value) & (_ABOUT | asked)} - asked
        if not more:
            return tuple(kept[name].cache_clear for name in sorted(asked))
        asked |= more


def _names(function: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()
