"""Refuses JSON objects that have one key twice, because readers disagree on which of the two counts."""

from __future__ import annotations

from typing import Any


class DuplicateKeyError(ValueError):
    """An object has one key twice.

    Attributes:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        super().__init__("a key stands twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; an `object_pairs_hook` for `json.loads`.

    Raises:
        DuplicateKeyError: One key occurs twice.
    """
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise DuplicateKeyError(key)
        table[key] = value
    return table
