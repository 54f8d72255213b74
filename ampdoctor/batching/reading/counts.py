"""Numbers of a configuration, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.errors import UsageError

_UNSAID = (None, "auto", -1)
"""What stands for "not said": DeepSpeed's and transformers' "auto", torchtitan's -1."""


def count(table: Mapping[str, Any], key: str, name: str) -> int | None:
    """Returns a whole number of at least 1, or None if nothing is said.

    Args:
        table: What was read.
        key: Its key.
        name: Of the file.

    Raises:
        UsageError: It is another value.
    """
    value = table.get(key)
    if isinstance(value, bool) or (value not in _UNSAID and not _whole(value)):
        raise UsageError(f"{name}: {key} is a whole number of at least 1, not {value!r}")
    return None if value in _UNSAID else int(value)


def table_in(table: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Returns a table inside; {} if it is not there.

    Raises:
        UsageError: It is no table.
    """
    value = table.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: {key} is a table, not {value!r}")
    return value


def _whole(value: Any) -> bool:
    """Whether it is one; YAML and flags give text where somebody has written quotes."""
    return (isinstance(value, int) and value >= 1) or (isinstance(value, str) and value.isdecimal() and int(value) >= 1)
