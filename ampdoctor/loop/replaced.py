"""Puts something of ours in the place of an attribute of torch's, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, ours: Any) -> Iterator[None]:
    """Inside, `owner.name` is ours; afterwards it is what it was, unless somebody has put theirs there since.

    Theirs may call ours long afterwards, which must then only call on.
    """
    original = getattr(owner, name)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if getattr(owner, name, None) is ours:
            setattr(owner, name, original)
