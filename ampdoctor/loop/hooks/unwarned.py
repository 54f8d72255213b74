"""A watch gives no warnings, takes none away, and has none shown twice."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn.modules import module as modules

from ampdoctor.loop.torch_internals import replaced

_CHANGED = ("_filters_mutated", "_filters_mutated_lock_held")
"""What `warnings` calls when its filters have changed, up to Python 3.13 and from 3.14 on."""
_ANY_GLOBAL = "_has_any_global_hook"
"""Of `torch.nn.modules.module`: a compiled module asks it, and warns where there is one."""
_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


class _OnThisThread:
    """Of a filter, which asks it whether it is for a warning's text: any text, on one thread."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def match(self, _: str) -> bool:
        """As of a pattern."""
        return threading.get_ident() == self._thread


@contextmanager
def unwarned() -> Iterator[None]:
    """Inside, this thread's warnings are neither shown nor raised, and are not remembered as shown.

    Python shows most warnings once a line, until filters change: then each is shown once more. What runs inside may
    change filters, as much of torch does while it looks at itself (`warnings.catch_warnings`): the script's warnings
    do not begin anew for it.
    """
    ours = ("ignore", _OnThisThread(), Warning, None, 0)
    lists = [_filters()]
    with ExitStack() as stack:
        for name in _CHANGED:
            if hasattr(warnings, name):
                stack.enter_context(_unchanged(name))
        lists[0].insert(0, ours)
        try:
            yield
        finally:
            lists.append(_filters())  # another thread may have put a copy in its place
            for filters in lists:
                if ours in filters:
                    filters.remove(ours)


@contextmanager
def unwarned_of_hooks() -> Iterator[None]:
    """Inside, a compiled module warns of global hooks where there are others than ampdoctor's."""
    before = getattr(modules, _ANY_GLOBAL, None)
    if before is None:
        yield
        return
    with replaced(modules, _ANY_GLOBAL, _has_hooks_of_others):
        yield


class CallersOfForwards:
    """The two lines of torch's that call a forward: one where there are hooks, the other where there are none.

    A forward that warns of its caller (`stacklevel=2`) is remembered with that line, and would be shown once for each.
    """

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}
        if not any(getattr(modules, name, {}) for name in _GLOBAL):  # with which torch has one line for all
            plain, hooked = (_line_that_calls(hooked=hooked) for hooked in (False, True))
            self._lines = {plain: hooked, hooked: plain}

    def remember(self) -> None:
        """What was shown for one line has been shown for the other."""
        shown = vars(modules).get("__warningregistry__") or {}
        for key in list(shown):
            if isinstance(key, tuple) and key[-1] in self._lines:
                shown.setdefault((*key[:-1], self._lines[key[-1]]), shown[key])


def is_ours(hook: Any) -> bool:
    """Whether ampdoctor has made a hook."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _has_hooks_of_others() -> bool:
    return any(not is_ours(hook) for name in _GLOBAL for hook in getattr(modules, name, {}).values())


def _line_that_calls(*, hooked: bool) -> int:
    asked = _Asked()
    if hooked:
        asked.register_forward_pre_hook(lambda *_: None)
    line: int = asked()
    return line


class _Asked(modules.Module):
    def forward(self) -> int:
        """Returns the line of its caller."""
        return sys._getframe(1).f_lineno  # noqa: SLF001 - a traceback would be slow


def _filters() -> list[Any]:
    return warnings.filters  # type: ignore[return-value]  # a list, where the stubs have a sequence


@contextmanager
def _unchanged(name: str) -> Iterator[None]:
    changed, here, over = getattr(warnings, name), threading.get_ident(), False

    def told() -> None:
        if over or threading.get_ident() != here:
            changed()

    with replaced(warnings, name, told):
        try:
            yield
        finally:
            over = True
