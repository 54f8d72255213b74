"""A line of the log as text, and back.

The text is strict JSON: NaN and the infinities are strings, floats have 6 significant digits as in every report, and
what has its default is left out. It begins with the kind and the stamp: a line need not be parsed to be told apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, cast

from ampdoctor.evidence.checked import checked
from ampdoctor.evidence.codec import plain_float, to_plain
from ampdoctor.evidence.run_log.lines import KINDS, SCHEMA_VERSION, Line, Stamp, Stamped

_KIND_OF = {record: kind for kind, record in KINDS.items()}
_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode
_KIND = re.compile(rb'^\s*\{\s*"kind"\s*:\s*"([a-z_]{1,32})"')


def text_of(whole: Stamped) -> str:
    """Returns the line as one line of ASCII with its end.

    Raises:
        TypeError: A value in it has no form in JSON.
    """
    values = {"kind": _KIND_OF[type(whole.line)], **_record(whole.stamp), **_record(whole.line)}
    values["schema_version"] = SCHEMA_VERSION
    return _ENCODE(values) + "\n"


def line_of(text: str | bytes) -> Stamped | None:
    """Returns the line that a text says; None if it is of a kind or a version that this reader does not know.

    Raises:
        ValueError: It is no line of a run's log: cut off, or not of the form that the classes say.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise ValueError("no object with a kind")  # noqa: TRY004 - the text is wrong, not the caller
    kind = KINDS.get(values["kind"])
    if kind is None or values.get("schema_version") != SCHEMA_VERSION:
        return None
    return Stamped(stamp=checked(Stamp, values), line=cast("Line", checked(kind, values)))


def kind_of(text: bytes) -> str | None:
    """Returns the kind of a line that `text_of` wrote, without reading it; None where it does not begin like one."""
    found = _KIND.match(text[:64])
    return None if found is None else found[1].decode()


def _record(record: Any) -> dict[str, Any]:
    return {
        key: write(value)
        for key, get, default, write in _parts(cast("Any", type(record)))
        if (value := get(record)) is not default and value != default
    }


@cache
def _parts(record: type) -> tuple[tuple[str, Callable[[Any], Any], Any, Callable[[Any], Any]], ...]:
    """Of each field that is written its key, what gets it, its default, and what makes JSON values of it."""
    return tuple(
        (
            f.name.rstrip("_"),
            attrgetter(f.name),
            f.default if f.default_factory is MISSING else f.default_factory(),
            dict if f.metadata.get("plain") else _plain,
        )
        for f in fields(record)
        if f.metadata.get("written", True)
    )


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is float:
        return plain_float(value)
    if value is None or kind is int or kind is str or kind is bool:
        return value
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return _record(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return to_plain(value, "line")
