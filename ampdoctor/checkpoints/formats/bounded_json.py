"""JSON from a checkpoint: refused before it is parsed if its objects would fill memory.

A list takes 56 bytes of memory and two of text, so 60 MB of brackets would take gigabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.json_records import unique_keys

MAX_VALUE_BYTES = 160 * 1024 * 1024
"""Maximum memory for the values of a JSON text: enough for a safetensors header of 160,000 tensors, or a log of 200,000
entries."""

_COSTS = ((b"{", 232), (b"[", 88), (b",", 48), (b":", 40))
"""Bytes of memory for each mark of objects, lists and items. Marks in strings count, too; names hold few."""


def parse_json(raw: bytes, name: str, *, strict: bool) -> Any:
    """Returns the value of a JSON text.

    Args:
        raw: UTF-8.
        name: The file's name in errors.
        strict: Refuse what JSON itself does not allow (NaN, infinities), duplicate keys and halves of surrogate pairs.

    Raises:
        DuplicateKeyError: With `strict`, an object has one key twice.
        ValueError: It is not JSON, not UTF-8, nested a thousand times, or a number has thousands of digits.
        LimitExceededError: Its values would take more memory than allowed.
    """
    # text takes up to four bytes per character, even if few need them; it is held twice, whole and in pieces
    cost = (2 if raw.isascii() else 8) * len(raw) + sum(each * raw.count(mark) for mark, each in _COSTS)
    if cost > MAX_VALUE_BYTES:
        raise LimitExceededError(f"{name}: bytes of JSON values", MAX_VALUE_BYTES, cost)
    constant: Callable[[str], Any] | None = _no_constant if strict else None
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique_keys if strict else None, parse_constant=constant
        )
        if strict and b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nesting") from None
    return value


def _no_constant(token: str) -> NoReturn:
    raise ValueError(token)
