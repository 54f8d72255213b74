"""A line of a run's log as text: writing it, reading it with every check, and reading it fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from ampdoctor.evidence.json_records import Form, from_plain, plain_float, to_plain
from ampdoctor.evidence.log_records import (
    KINDS,
    SCHEMA_VERSION,
    DetailLine,
    Line,
    LogRecord,
    Stamp,
    StepLine,
    TensorDetail,
)

_KIND_OF = {record: kind for kind, record in KINDS.items()}
_ENCODE = json.JSONEncoder(allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode
_KIND = re.compile(rb'^\s*\{\s*"kind"\s*:\s*"([a-z_]{1,32})"')


def text_of(whole: LogRecord) -> str:
    """Returns the line as one line of ASCII with its end; raises TypeError for a value that has no form in JSON."""
    values = {"kind": _KIND_OF[type(whole.line)], **_record(whole.stamp), **_record(whole.line)}
    values["schema_version"] = SCHEMA_VERSION
    return _ENCODE(values) + "\n"


def line_of(text: str | bytes) -> LogRecord | None:
    """Returns the line in a text; None for a kind or a version that this reader does not support.

    Raises ValueError if it is no line of a run's log: cut off, or of another form than the classes.
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
    return LogRecord(stamp=from_plain(Stamp, values), line=cast("Line", from_plain(kind, values)))


def kind_of(text: bytes) -> str | None:
    """Returns the kind of a line that `text_of` wrote, without parsing it; None if it does not begin like one."""
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
    """Returns key, getter, default and JSON converter of each written field."""
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


# -- a faster parser for steps and details --
#
# They are made without `from_plain` if each value is of its field's plain type and in its range, as in all that
# `text_of` writes of finite numbers. Any other line is parsed by `line_of`, which refuses or converts.

T = TypeVar("T")


def _parser() -> Callable[[str | bytes], Any]:
    """Returns the JSON parser: orjson, in a third of the time, if installed; `line_of` reads lines that it refuses."""
    try:
        import orjson
    except ImportError:
        return json.loads
    parse: Callable[[str | bytes], Any] = orjson.loads
    return parse


_loads = _parser()
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text in JSON sorts after it, unless it begins with it."""


class _OtherError(Exception):
    """A value that only `line_of` can handle."""


def parse_line_fast(text: str | bytes) -> LogRecord | None:
    """Does the same as `line_of`, faster."""
    try:
        values = _loads(text)
        if values["schema_version"] == SCHEMA_VERSION and (record := _QUICK.get(values["kind"])) is not None:
            return LogRecord(_made(Stamp, values), _made(record, values))
    except (_OtherError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    return line_of(text)


def _made(record: type[T], values: Mapping[str, Any]) -> T:
    """Returns a record; raises _OtherError if a value is not of its field's plain type or range, or is missing."""
    made, bounds = {}, _BOUNDS[record]
    for name, value in values.items():
        if name not in bounds:
            continue
        plain, least, most, several = bounds[name]
        if type(value) is not plain or (least is not None and not least <= value <= most):
            raise _OtherError
        made[name] = value if several is None else several(value)
    return record(**made)


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    if any(type(value) is not float for value in values):
        raise _OtherError
    return tuple(values)


def _tensors(values: Sequence[Any]) -> tuple[TensorDetail, ...]:
    if any(value["role"] not in _ROLES for value in values):
        raise _OtherError
    return tuple(_made(TensorDetail, value) for value in values)


def _bounds(hint: Any) -> tuple[type, Any, Any]:
    """Returns the JSON type of a field's value, and its least and greatest allowed value; None for any."""
    within: dict[str, Any] = {}
    if get_origin(hint) not in (Annotated, Literal, tuple) and get_args(hint):  # a union with None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Annotated:
        hint, note = get_args(hint)[:2]
        within = dict(note.keywords) if isinstance(note, Form) else {}
    if hint is float:
        return float, within.get("minimum"), within.get("maximum")
    if hint is int:
        return int, within.get("minimum", -_LARGEST), within.get("maximum", _LARGEST)
    if hint is str:
        return str, " " if within.get("minLength") else None, _LAST_LETTER
    if get_origin(hint) is Literal:
        return str, None, None
    return {bool: bool, tuple: list}.get(get_origin(hint) or hint, dict), None, None


_QUICK: Mapping[str, type[StepLine | DetailLine]] = MappingProxyType({"step": StepLine, "detail": DetailLine})
_ROLES = frozenset(get_args(get_type_hints(TensorDetail)["role"]))
_SEVERAL: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"learning_rates": _floats, "weight_decays": _floats, "tensors": _tensors}
)
_BOUNDS: Mapping[type, Mapping[str, tuple[Any, ...]]] = {
    record: {
        name: (*_bounds(hint), None if record is TensorDetail else _SEVERAL.get(name))
        for name, hint in get_type_hints(record, include_extras=True).items()
    }
    for record in (Stamp, StepLine, DetailLine, TensorDetail)
}
