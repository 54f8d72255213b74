"""Functions of torch replaced around each piece of user code, each replacement made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampdoctor.precision.emulation.patches import Patches


class Replacements:
    """Replacements by what they replace.

    A replaced function that user code has bound by name (`from torch import zeros`) outlives its patch: it asks whether
    anything is emulated and hands on to the original when nothing is.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def put(self, patches: Patches, owner: Any, name: str, make: Callable[..., Any], *details: Any) -> None:
        """Replace `owner.name` by what `make` makes of it; what this torch lacks stays away.

        Args:
            patches: What undoes it.
            owner: A module or class.
            name: Of its attribute.
            make: Called with the original and the details, once for each original.
            details: Hashable.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        key = (make, original, *details)
        if key not in self._made:
            self._made[key] = make(original, *details)
        patches.set(owner, name, self._made[key])
