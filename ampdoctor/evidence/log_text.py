"""A line of a run's log as text: writing it, reading it with every check, and reading it fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import chain, groupby, islice
from math import isnan
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from ampdoctor.evidence.json_records import Form, from_plain, plain_float, to_plain, unique_keys
from ampdoctor.evidence.log_records import (
    KINDS,
    SCHEMA_VERSION,
    DetailLine,
    Line,
    LogRecord,
    Stamp,
    StepLine,
    TensorDetail,
    TensorTable,
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

    Raises ValueError if it is no line of a run's log: cut off, of another form than the classes, or with a key twice
    (DuplicateKeyError).
    """
    try:
        values = json.loads(text, object_pairs_hook=unique_keys)
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
    if kind in (tuple, list, TensorTable):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return _record(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return to_plain(value, "line")


# -- a faster parser for many lines --
#
# Steps and details are made without `from_plain` if each value is of its field's plain type and in its range, as in all
# that `text_of` writes of finite numbers. Any other line is parsed by `line_of`, which refuses or converts.

T = TypeVar("T")


try:
    import orjson
except ImportError:
    _loads = json.loads
else:
    _loads = orjson.loads  # in a third of the time; `line_of` reads what it refuses
_AT_ONCE, _SHORT = 64, 4096  # most steps that are parsed together, if their lines are shorter than this
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text in JSON sorts after it, unless it begins with it."""


class _OtherError(Exception):
    """A value that only `line_of` can handle."""


def parse_lines(texts: Iterable[bytes]) -> Iterator[tuple[bytes, LogRecord | ValueError | None]]:
    """Yields each text with what `line_of` returns or raises for it; a text has no line end but at its own end."""
    for short, several in groupby(texts, lambda text: len(text) < _SHORT and text.startswith(b'{"kind":"step",')):
        while group := list(islice(several, _AT_ONCE if short else 1)):
            yield from zip(group, _records_of([text.rstrip(b" \t\r\n") for text in group]), strict=True)


def _records_of(texts: Sequence[bytes]) -> Sequence[LogRecord | ValueError | None]:
    """Returns the records of texts, parsed as one where each is certainly an object without another inside it."""
    # No string goes on after a line end. So where as many braces open and close as there are texts, and each text
    # begins and ends with one, they are the texts' own.
    joined = b",\n".join(texts)
    flat = len(texts) == joined.count(b"{") == joined.count(b"}") == joined.count(b"},\n{") + 1
    try:
        together = flat and joined[:1] + joined[-1:] == b"{}"
        values = _loads(b"[" + joined + b"]") if together else list(map(_loads, texts))
        ((kind, version),) = {(value["kind"], value["schema_version"]) for value in values}
        # no fewer keys than colons: no key stands twice
        if version == SCHEMA_VERSION and joined.count(b":") == sum(map(_keys_in, values)):
            given, count = _by_key(values), len(values)
            parts = [_made(part, _columns(part, given, count), count) for part in (Stamp, KINDS[kind])]
            return _made(LogRecord, dict(zip(("stamp", "line"), parts, strict=True)), count)
    except (_OtherError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    if len(texts) > 1:
        half = len(texts) // 2
        return [*_records_of(texts[:half]), *_records_of(texts[half:])]
    try:
        return [line_of(texts[0])]
    except ValueError as error:
        return [error]


def _keys_in(value: Mapping[str, Any]) -> int:
    """Returns how many keys a line has, those of its tensors and their histograms included."""
    tensors = value.get("tensors", ())
    return len(value) + sum(len(one) + len(one.get("histogram") or ()) for one in tensors)


def _made(record: type[T], columns: Mapping[str, Sequence[Any]], count: int) -> Sequence[T]:
    """Returns `count` records, made field by field: a slot's descriptor takes a third of a frozen class's way."""
    made = [object.__new__(record) for _ in range(count)]
    for name, column in columns.items():
        any(map(getattr(record, name).__set__, made, column))  # which all return None
    return made


def _by_key(values: Sequence[dict[str, Any]]) -> Mapping[str, Sequence[Any]]:
    """Returns the values of objects by their keys; MISSING where an object lacks one."""
    layouts = set(map(tuple, values))
    if len(layouts) == 1:
        return dict(zip(layouts.pop(), zip(*map(dict.values, values), strict=True), strict=True))
    return {key: [value.get(key, MISSING) for value in values] for key in set().union(*layouts)}


def _columns(record: type[Any], given: Mapping[str, Sequence[Any]], count: int) -> Mapping[str, Sequence[Any]]:
    """Returns each field's values; raises _OtherError if one is not of its field's plain type or range, or missing."""
    columns: dict[str, Sequence[Any]] = {}
    for name, (plain, least, most, several, default) in _BOUNDS[record].items():
        if name not in given and (default is not MISSING or not count):
            columns[name] = [default] * count
            continue
        column = known = given[name]
        if set(map(type, column)) - {plain}:
            column = known = [default if value is MISSING else value for value in column]
            if default is None:
                known = [value for value in column if value is not None]
            if set(map(type, known)) - {plain}:
                raise _OtherError
        outside = least is not None and known and not least <= min(known) <= max(known) <= most
        if outside or (least is not None and plain is float and any(map(isnan, known))):
            raise _OtherError
        columns[name] = column if several is None else several(column)
    return columns


def _floats(column: Sequence[Sequence[Any]]) -> Sequence[tuple[float, ...]]:
    if not set(map(type, chain.from_iterable(column))) <= {float}:
        raise _OtherError
    return list(map(tuple, column))


def _tensors(column: Sequence[Sequence[Any]]) -> Sequence[TensorTable]:
    tables = [TensorTable(_columns(TensorDetail, _by_key(values), len(values))) for values in column]
    if not all(_ROLES.issuperset(table.columns["role"]) for table in tables):
        raise _OtherError
    return tables


def _bounds(hint: Any) -> tuple[type, Any, Any]:
    """Returns the JSON type of a field's value, and its least and greatest allowed value; None for any."""
    within: dict[str, Any] = {}
    if get_origin(hint) not in (Annotated, Literal, tuple, Sequence) and get_args(hint):  # a union with None
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
    return {bool: bool, tuple: list, Sequence: list}.get(get_origin(hint) or hint, dict), None, None


_ROLES = frozenset(get_args(get_type_hints(TensorDetail)["role"]))
_SEVERAL: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"learning_rates": _floats, "weight_decays": _floats, "tensors": _tensors}
)
_BOUNDS: Mapping[type, Mapping[str, tuple[Any, ...]]] = {
    record: {
        f.name: (*_bounds(hints[f.name]), None if record is TensorDetail else _SEVERAL.get(f.name), f.default)
        for f in fields(record)
    }
    for record in (Stamp, StepLine, DetailLine, TensorDetail)
    for hints in [get_type_hints(record, include_extras=True)]
}
"""Of each record's fields: JSON type, least and greatest value, how lists are converted, the default."""
