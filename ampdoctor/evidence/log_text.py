"""A line of a run's log as text: writing it, reading it with every check, and reading it fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from functools import cache
from operator import attrgetter, itemgetter
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

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


# -- a faster parser for steps and details: about 2x faster than `line_of`, and several times with orjson --
#
# Lines of one kind mostly have the same keys in the same order, with values of the same types: their shape. For each
# shape, the field of each value is found once; for each line, only the ranges of its numbers are checked. Steps and
# details are made like this if each value is of its field's plain type and in its range, as in all that `text_of`
# writes of finite numbers. Any other line is parsed by `line_of`, which refuses or converts.

T = TypeVar("T")
_Bounds: TypeAlias = tuple[type, Any, Any]


def _parser() -> Callable[[str | bytes], Any]:
    """Returns the JSON parser: orjson, in a third of the time, if installed; `line_of` reads lines that it refuses."""
    try:
        import orjson
    except ImportError:
        return _parsed
    parse: Callable[[str | bytes], Any] = orjson.loads
    return parse


def _parsed(text: str | bytes) -> Any:
    """Does the same as `json.loads`, without other encodings and leading white space, which a line never has."""
    line = text.decode() if isinstance(text, bytes) else text
    values, end = _decoded(line)
    if end != len(line) and not line[end:].isspace():
        raise _OtherError
    return values


_decoded = json.JSONDecoder().raw_decode
_loads = _parser()
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text in JSON sorts after it, unless it begins with it."""
_MOST_SHAPES = 1000
_MOST_KEYS = 100
"""More shapes, or keys in one, than any writer of a log makes."""


class _OtherError(Exception):
    """A value that only `line_of` can handle."""


def parse_line_fast(text: str | bytes) -> LogRecord | None:
    """Does the same as `line_of`, faster."""
    try:
        values = _loads(text)
        shape = (values["kind"], values["schema_version"], *values, *map(type, values.values()))
        read = _LINES[shape] if shape in _LINES else _learned(_LINES, shape, _line_reader, values)
        if read is not None:
            return read(list(values.values()))
    except (_OtherError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    return line_of(text)


def _tensor(values: dict[str, Any]) -> TensorDetail:
    shape = (values["role"], *values, *map(type, values.values()))
    read = _TENSORS[shape] if shape in _TENSORS else _learned(_TENSORS, shape, _tensor_reader, values)
    if read is None:
        raise _OtherError
    return read(list(values.values()))


_Reader: TypeAlias = Callable[[list[Any]], T]
"""Makes a record from the values of a shape."""
_LINES: dict[tuple[Any, ...], _Reader[LogRecord] | None] = {}
_TENSORS: dict[tuple[Any, ...], _Reader[TensorDetail] | None] = {}
"""By shape; None for a shape that only `line_of` reads."""


def _learned(
    known: dict[tuple[Any, ...], _Reader[T] | None],
    shape: tuple[Any, ...],
    learn: Callable[[Mapping[str, Any]], _Reader[T]],
    values: Mapping[str, Any],
) -> _Reader[T] | None:
    if len(values) > _MOST_KEYS:
        return None
    if len(known) >= _MOST_SHAPES:
        known.clear()
    try:
        known[shape] = learn(values)
    except _OtherError:
        known[shape] = None
    return known[shape]


def _line_reader(values: Mapping[str, Any]) -> _Reader[LogRecord]:
    record = _QUICK.get(values["kind"])
    if record is None or values["schema_version"] != SCHEMA_VERSION:
        raise _OtherError
    stamp, line, stamped = _reader(Stamp, values), _reader(record, values), opened(LogRecord)

    def read(row: list[Any]) -> LogRecord:
        return stamped(stamp(row), line(row))

    return read


def _tensor_reader(values: Mapping[str, Any]) -> _Reader[TensorDetail]:
    if values["role"] not in _ROLES:
        raise _OtherError
    return _reader(TensorDetail, values)


def _reader(record: type[T], values: Mapping[str, Any]) -> _Reader[T]:
    """Returns a function that makes a record from the values of this shape.

    Raises _OtherError if a value is not of its field's plain type, or is missing.
    """
    of_record = fields(cast("Any", record))
    defaults = {one.name: one.default for one in of_record if one.name not in values}
    if MISSING in defaults.values():
        raise _OtherError
    places = {name: at for at, name in enumerate((*values, *defaults))}
    limits, several = [], []
    for name in values.keys() & _BOUNDS[record].keys():
        plain, least, most = _BOUNDS[record][name]
        if type(values[name]) is not plain:
            raise _OtherError
        if least is not None:
            limits.append((places[name], least, most))
        if name in _SEVERAL:
            several.append((places[name], _SEVERAL[name]))
    pick, make, rest = itemgetter(*[places[one.name] for one in of_record]), opened(record), list(defaults.values())

    def read(row: list[Any]) -> T:
        for place, least, most in limits:
            if not least <= row[place] <= most:
                raise _OtherError
        for place, of in several:
            row[place] = of(row[place])
        return make(*pick(row + rest))

    return read


def opened(record: type[T]) -> Callable[..., T]:
    """Returns a fast constructor of a frozen class, whose own constructor sets each field by a call.

    A twin class with the same slots is filled, and the record's class is assigned to it. All fields are given, in
    order.
    """
    twin = _TWINS[record]

    def make(*values: Any) -> T:
        made: Any = twin(*values)
        made.__class__ = record
        return made  # type: ignore[no-any-return]  # cast() is a call, and this one is made for every line

    return make


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    for value in values:
        if type(value) is not float:
            raise _OtherError
    return tuple(values)


def _tensors(values: Sequence[Any]) -> tuple[TensorDetail, ...]:
    return tuple(map(_tensor, values))


def _bounds(hint: Any) -> _Bounds:
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
    if get_origin(hint) is Literal:  # part of the shape
        return str, None, None
    return {bool: bool, tuple: list}.get(get_origin(hint) or hint, dict), None, None


_BOUNDS: Mapping[type, Mapping[str, _Bounds]] = {
    record: {name: _bounds(hint) for name, hint in get_type_hints(record, include_extras=True).items()}
    for record in (Stamp, StepLine, DetailLine, TensorDetail)
}
_TWINS: Mapping[type, Any] = {
    record: make_dataclass(f"_{record.__name__}", [one.name for one in fields(cast("Any", record))], slots=True)
    for record in (*_BOUNDS, LogRecord)
}
_ROLES = frozenset(get_args(get_type_hints(TensorDetail)["role"]))
_QUICK: Mapping[str, type[StepLine | DetailLine]] = MappingProxyType({"step": StepLine, "detail": DetailLine})
_SEVERAL: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"learning_rates": _floats, "weight_decays": _floats, "tensors": _tensors}
)
