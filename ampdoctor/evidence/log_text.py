"""A line of a run's log as text: writing it, reading it with every check, and reading it fast."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from itertools import groupby, islice, repeat
from operator import attrgetter, call, ge, itemgetter, le, methodcaller
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
    if kind is tuple or kind is list or kind is TensorTable:
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
_Make = Callable[[Mapping[str, Any]], T]


def _parser() -> Callable[[str | bytes], Any]:
    """Returns the JSON parser: orjson, in a third of the time, if installed; `line_of` reads lines that it refuses."""
    try:
        import orjson
    except ImportError:
        return json.loads
    parse: Callable[[str | bytes], Any] = orjson.loads
    return parse


_loads = _parser()
_AT_ONCE = 256  # most lines that are parsed together
_BLANKS = b" \t\r\n"  # of JSON
_BEGINS_STEP = methodcaller("startswith", b'{"kind":"step",')
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text in JSON sorts after it, unless it begins with it."""


class _OtherError(Exception):
    """A value that only `line_of` can handle."""


def parse_lines(texts: Iterable[bytes]) -> Iterator[tuple[bytes, LogRecord | ValueError | None]]:
    """Yields each text with what `line_of` returns or raises for it; a text has no line end but at its own end."""
    texts = iter(texts)
    while some := list(islice(texts, _AT_ONCE)):
        for are_steps, several in groupby(some, _BEGINS_STEP):
            group = list(several)
            for text, values in zip(group, _values_of(group) if are_steps else map(_value_of, group), strict=True):
                yield text, _record_of(text, values)


def _values_of(texts: Sequence[bytes]) -> Iterable[Any]:
    """Returns the JSON values of texts, parsed as one where each is certainly an object without another inside it."""
    # A line end inside a text cannot be part of a string. So where as many braces open and close as there are texts,
    # and each text begins and ends with one, they are the texts' own.
    joined, count = b",\n".join([text.rstrip(_BLANKS) for text in texts]), len(texts)
    if joined.count(b"},\n{") == count - 1 and joined.count(b"{") == joined.count(b"}") == count and joined[-1:] == b"}":
        values = _value_of(b"[" + joined + b"]")
        if values is not None:
            return cast("Iterable[Any]", values)
    return map(_value_of, texts)


def _value_of(text: bytes) -> Any:
    """Returns the JSON value of a text; None if it has none."""
    try:
        return _loads(text)
    except (ValueError, RecursionError):
        return None


def _record_of(text: bytes, values: Any) -> LogRecord | ValueError | None:
    try:
        if values["schema_version"] == SCHEMA_VERSION:
            make = _makers(values["kind"], tuple(values), tuple(map(type, values.values())))
            if make is not None:
                return LogRecord(make[0](values), make[1](values))
    except (_OtherError, AttributeError, KeyError, TypeError):
        pass
    try:
        return line_of(text)
    except ValueError as error:
        return error


@lru_cache(maxsize=256)
def _makers(kind: str, keys: Sequence[str], types: Sequence[type]) -> tuple[_Make[Stamp], _Make[Line]] | None:
    """Returns what makes stamp and line of objects with these keys and types; None where only `line_of` can."""
    found = dict(zip(keys, types, strict=True))
    try:
        return _maker(Stamp, found), _maker(_QUICK[kind], found)
    except (_OtherError, KeyError):
        return None


def _maker(record: type[T], types: Mapping[str, type]) -> _Make[T]:
    """Returns what makes a record of an object; raises _OtherError if a type is not its field's, or a key is missing.

    Setting a slot by its descriptor takes half as long as what a frozen class does for it.
    """
    by_name = {f.name: f for f in fields(cast("Any", record))}
    given = [name for name in by_name if name in types]
    others = [name for name in by_name if name not in types]
    bounds = [_BOUNDS[record][name] for name in given]
    defaults = [by_name[name].default for name in others]
    if MISSING in defaults or any(types[name] is not bound[0] for name, bound in zip(given, bounds, strict=True)):
        raise _OtherError
    values_of = itemgetter("kind", *given)
    setters = [getattr(record, name).__set__ for name in (*given, *others)]
    bounded = [(at, least, most) for at, (_, least, most, _) in enumerate(bounds) if least is not None]
    several = [(at, convert) for at, (*_, convert) in enumerate(bounds) if convert is not None]

    def make(values: Mapping[str, Any]) -> T:
        _, *found = values_of(values)
        for at, least, most in bounded:
            if not least <= found[at] <= most:
                raise _OtherError
        for at, convert in several:
            found[at] = convert(found[at])
        made = object.__new__(record)
        any(map(call, setters, repeat(made), found + defaults))  # which all return None
        return made

    return make


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    if any(type(value) is not float for value in values):
        raise _OtherError
    return tuple(values)


def _tensors(values: Sequence[Any]) -> TensorTable:
    """Returns tensors by columns; raises _OtherError as a `_maker` does."""
    present = {name for keys in set(map(tuple, values)) for name in keys}
    columns: dict[str, Sequence[Any]] = {}
    for name, (plain, least, most, _) in _BOUNDS[TensorDetail].items():
        default = _DEFAULTS[name]
        if name not in present and default is not MISSING:
            columns[name] = [default] * len(values)
            continue
        column = columns[name] = [value.get(name, default) for value in values]
        known = [value for value in column if value is not None] if default is None else column
        if not set(map(type, known)) <= {plain} or (
            least is not None and not (all(map(le, repeat(least), known)) and all(map(ge, repeat(most), known)))
        ):
            raise _OtherError
    if not _ROLES.issuperset(columns["role"]):
        raise _OtherError
    return TensorTable(columns)


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


_QUICK: Mapping[str, type[StepLine | DetailLine]] = MappingProxyType({"step": StepLine, "detail": DetailLine})
_DEFAULTS = {f.name: f.default for f in fields(TensorDetail)}
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
