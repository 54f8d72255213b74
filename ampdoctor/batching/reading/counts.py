"""Numbers of a configuration, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdoctor.batching.settings import Precision
from ampdoctor.errors import UsageError

_UNSAID = (None, "auto", -1)
"""What stands for "not said": DeepSpeed's and transformers' "auto", torchtitan's -1."""
_DIGITS = 20
"""Of a number in quotes: no batch has more."""
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_SHOWN = 60
"""Characters of a value in a sentence."""


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
        raise UsageError(f"{name}: {key} is a whole number of at least 1, not {shown(value)}")
    return None if value in _UNSAID else int(value)


def yes(table: Mapping[str, Any], key: str, name: str) -> bool | None:
    """Returns whether something is switched on; not, if nothing is said, and None for "auto": another file says it.

    Args:
        table: What was read.
        key: Its key.
        name: Of the file.

    Raises:
        UsageError: It is neither yes nor no.
    """
    value = table.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text == "auto":
        return None
    if text not in _WORDS:
        raise UsageError(f"{name}: {key} is true or false, not {shown(value)}")
    return _WORDS[text]


def half_of(name: str, *, fp16: bool | None, bf16: bool | None) -> Precision | None:
    """Returns the format of two switches of which one may be on; None if nobody knows.

    Raises:
        UsageError: Both are on, with which no framework starts.
    """
    if fp16 and bf16:
        raise UsageError(f"{name}: fp16 and bf16 are both on, and a job has one of them")
    return "fp16" if fp16 else "bf16" if bf16 else None if None in (fp16, bf16) else "fp32"


def table_in(table: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Returns a table inside; {} if it is not there.

    Raises:
        UsageError: It is no table.
    """
    value = table.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: {key} is a table, not {shown(value)}")
    return value


def word(table: Mapping[str, Any], key: str, default: str) -> str:
    """Returns a word in small letters; what is none, as its kind."""
    value = table.get(key)
    return default if value is None else value.lower() if isinstance(value, str) else shown(value)


def shown(value: Any) -> str:
    """Returns a value for a sentence. Only the kind of a list or table: YAML's aliases make small ones enormous."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:_SHOWN]
    return "a table" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else type(value).__name__


def _whole(value: Any) -> bool:
    """Whether it is one; YAML and flags give text where somebody has written quotes."""
    if isinstance(value, str):
        return value.isdecimal() and len(value) < _DIGITS and int(value) >= 1
    return isinstance(value, int) and value >= 1
