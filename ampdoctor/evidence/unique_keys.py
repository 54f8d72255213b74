"""JSON objects that have one key twice: which of the two counts, readers do not agree on, so that both are refused."""

from __future__ import annotations

from typing import Any


class DuplicateKeyError(ValueError):
    """An object has one key twice.

    Attributes:
        key: It.
    """

    def __init__(self, key: str) -> None:
        super().__init__("a key stands twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; what `json.loads` takes as `object_pairs_hook`.

    Raises:
        DuplicateKeyError: One key is there twice.
    """
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise DuplicateKeyError(key)
        table[key] = value
    return table
