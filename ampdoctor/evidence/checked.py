"""Records from JSON values that nobody vouches for: what does not fit a field's type is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ampdoctor.evidence.codec import Form

T = TypeVar("T")
_Read = Callable[[Any], Any]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST = 2**63


def checked(record: type[T], data: Mapping[str, Any]) -> T:
    """Returns the record that these values are. Other keys are passed by; a missing one has its default.

    Raises:
        ValueError: A value is not of its field's type or range, or a field without a default has none.
    """
    return cast("T", _reader(cast("Any", record))(data))


def _refuse(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{repr(value)[:60]} is not {wanted}")


@cache
def _reader(hint: Any) -> _Read:
    kind, note = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
    read = _of_type(kind)
    return _within(read, dict(note.keywords)) if isinstance(note, Form) else read


def _of_type(kind: Any) -> _Read:
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(cast("type", kind))
    if origin in (Union, UnionType):
        inner = _reader(next(part for part in parts if part is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: value if value in parts else _raise(value, f"one of {parts}")
    if origin in (tuple, Sequence):
        return _items(_reader(parts[0]))
    if origin is Mapping:
        each = _reader(parts[1])
        return lambda value: (
            {key: each(item) for key, item in value.items()} if isinstance(value, dict) else _raise(value, "an object")
        )
    return _PLAIN[kind]


def _record(record: type) -> _Read:
    parts: list[tuple[str, str, _Read, bool]] = []

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _refuse(data, "an object")
        if not parts:  # a record may hold others of its own class
            hints = get_type_hints(record, include_extras=True)
            parts.extend(
                (f.name, f.name.rstrip("_"), _reader(hints[f.name]), f.default is f.default_factory is MISSING)
                for f in fields(record)
                if f.metadata.get("written", True)
            )
        for _, key, _, needed in parts:
            if needed and key not in data:
                raise ValueError(f"{key} is missing")
        return record(**{name: each(data[key]) for name, key, each, _ in parts if key in data})

    return read


def _items(each: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _refuse(value, "a list")
        return tuple(map(each, value))

    return read


def _within(read: _Read, keywords: Mapping[str, Any]) -> _Read:
    least, most = keywords.get("minimum", -math.inf), keywords.get("maximum", math.inf)

    def bounded(value: Any) -> Any:
        found = read(value)
        if isinstance(found, int | float) and not least <= found <= most:
            raise _refuse(value, "in its range")
        return found

    return bounded


def _raise(value: Any, wanted: str) -> Any:
    raise _refuse(value, wanted)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) >= _MOST:
        raise _refuse(value, "an integer")
    return value


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _NONFINITE:
        return _NONFINITE[value]
    if type(value) is float:
        return value
    return float(_integer(value))


def _of(kind: type) -> _Read:
    return lambda value: value if type(value) is kind else _raise(value, f"of type {kind.__name__}")


_PLAIN: Mapping[Any, _Read] = {int: _integer, float: _float, str: _of(str), bool: _of(bool), Any: lambda value: value}
