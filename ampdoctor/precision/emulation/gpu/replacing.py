"""Functions of torch replaced around each piece of user code, each replacement made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampdoctor.precision.emulation.patches import Patches


class _Wanted:
    """An attribute that is replaced, and what its last original was replaced by."""

    __slots__ = ("details", "made", "make", "name", "original", "owner", "replacement")

    def __init__(self, owner: Any, name: str, make: Callable[..., Any], details: tuple[Any, ...]) -> None:
        self.owner, self.name, self.make, self.details = owner, name, make, details
        self.made: dict[Any, Any] = {}
        self.original: Any = None
        self.replacement: Any = None

    def replace(self, original: Any) -> None:
        if original not in self.made:
            self.made[original] = self.make(original, *self.details)
        self.original, self.replacement = original, self.made[original]


class Replacements:
    """What is replaced, and by what.

    A replaced function that user code has bound by name (`from torch import zeros`) outlives its patch: it asks whether
    anything is emulated and hands on to the original when nothing is. Each is made once and installed many times,
    around every piece of user code, so that what a run holds stays what is there.
    """

    __slots__ = ("_wanted",)

    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []

    def want(self, owner: Any, name: str, make: Callable[..., Any], *details: Any) -> None:
        """Have `owner.name` replaced by what `make` makes of it; what this torch lacks stays away.

        Args:
            owner: A module or class.
            name: Of its attribute.
            make: Called with the original and the details, once for each original.
            details: Further arguments of `make`.
        """
        if hasattr(owner, name):
            self._wanted.append(_Wanted(owner, name, make, details))

    def install(self, patches: Patches) -> None:
        """Replace them all, until the patches are undone."""
        for wanted in self._wanted:
            original = getattr(wanted.owner, wanted.name)
            if original is not wanted.original:
                wanted.replace(original)
            patches.set(wanted.owner, wanted.name, wanted.replacement)
