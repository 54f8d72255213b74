"""Records to JSON and back, by their classes.

A `RecordReader` reads values from anybody, by the types of the fields; `unique_keys` refuses an object that has one key
twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")

_EXACT_INTEGERS = 2.0**53


@dataclass(frozen=True, slots=True)
class Form:
    """Keywords of JSON Schema for a value, beside its type; used in `Annotated`.

    `name` is that of the schema's part with these keywords; with "" they are written in place.
    """

    keywords: tuple[tuple[str, Any], ...]
    name: str = ""


def form(name: str = "", /, **keywords: Any) -> Form:
    """Return the form with these keywords."""
    return Form(tuple(keywords.items()), name)


@dataclass(frozen=True, slots=True)
class Shape:
    """The written form of a value, if it differs from the type before it in `Annotated`."""

    like: Any


UNWRITTEN: Mapping[str, bool] = MappingProxyType({"written": False})
"""Metadata of a field that is in no report."""

Count = Annotated[int, form(minimum=0)]
Positive = Annotated[int, form(minimum=1)]
Finite = Annotated[float, form(type="number")]
"""Any other float may be NaN or infinite."""
Fraction = Annotated[float, form("fraction", description="A fraction, 0 to 1.", type="number", minimum=0, maximum=1)]
Text = Annotated[str, form(minLength=1)]
Hexadecimal = Annotated[
    str,
    form(
        "hexadecimal",
        description="A float without rounding, as Python and C write it.",
        pattern=r"^(inf|0x[01](\.[0-9a-f]{1,13})?p[+-](102[0-3]|10[01][0-9]|[0-9]{1,3}))$",
    ),
]


def to_plain(value: Any, path: str = "report") -> Any:
    """Return `value` as JSON values; raises TypeError, with the path, for a value that has no form in JSON.

    Floats keep 6 significant digits; whole numbers below 2^53 and powers of two stay exact, because loss scales and the
    limits of formats are such and are meant to be copied. Non-finite floats become "NaN", "Infinity" and "-Infinity".
    Records become objects, sets sorted lists; NumPy scalars count as numbers.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else plain_float(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {key: to_plain(getattr(value, name), f"{path}.{key}") for name, key in _keys(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, AbstractSet):
        value = sorted(value, key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [  # a curve's floats are most of a report
            plain_float(item) if type(item) is float else to_plain(item, f"{path}[{index}]")
            for index, item in enumerate(value)
        ]
    raise TypeError(f"{path} is a {type(value).__name__}, which JSON has no form for")


def plain_float(value: float) -> float | str:
    """Return a float as `to_plain` does."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    whole = abs(value) < _EXACT_INTEGERS and value.is_integer()
    if whole or abs(math.frexp(value)[0]) == 0.5:  # frexp gives a power of two the mantissa 0.5
        return value
    return float(f"{value:.6g}")


@cache
def _keys(record: type) -> tuple[tuple[str, str], ...]:
    return tuple((f.name, f.name.rstrip("_")) for f in fields(record) if f.metadata.get("written", True))


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record, include_extras=True)


def _split(hint: Any) -> tuple[Any, Any]:
    return get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)


def _members(record: type, *, sparse: bool) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """The written attributes of a record with their types, by key, and the keys that have to be there."""
    hints = _hints(record)
    if is_typeddict(record):
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        members = {name: (name, get_args(hint)[0] if name in optional else hint) for name, hint in hints.items()}
        total = getattr(record, "__total__", True)
        return members, [name for name in members if name not in optional] if total else []
    members = {key: (name, hints[name]) for name, key in _keys(record)}
    if not sparse:
        return members, list(members)
    given = {f.name for f in fields(record) if f.default is f.default_factory is MISSING}
    return members, [key for key, (name, _) in members.items() if name in given]


# -- records from JSON values: a value that does not fit its field's type is refused --

_Read = Callable[[Any], Any]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST = 2**63


class MismatchError(ValueError):
    """A value does not fit the type of its field; `path` leads to it."""

    def __init__(self, sentence: str, path: str = "") -> None:
        super().__init__(sentence)
        self.path = path

    def __str__(self) -> str:
        """The sentence, which begins with the path."""
        return f"{self.path or 'the whole'} {self.args[0]}"

    def below(self, part: str) -> None:
        """Puts a key or an index before the path."""
        self.path = f"{part}.{self.path}" if self.path and self.path[0] != "[" else part + self.path


class RecordReader:
    """Makes records from JSON values, by the types of their fields.

    Without `more`, other keys are ignored, and a missing key has its default. With it, every key has to be there and no
    other, as in `schema_of` with the same `more`, whose keys are read and dropped.
    """

    def __init__(self, more: Mapping[type, type] | None = None) -> None:
        self._whole = more is not None
        self._more = more or {}
        self._known: dict[tuple[Any, bool], _Read] = {}
        self._records: dict[tuple[type, bool], tuple[Mapping[str, tuple[str, _Read]], Sequence[str]]] = {}

    def read(self, record: type[T], data: Any) -> T:
        """Returns the record with these values; raises MismatchError where one does not fit its field."""
        return cast("T", self._of(record, plain=False)(data))

    def _of(self, hint: Any, *, plain: bool) -> _Read:
        """Returns the reader of a type; `plain`: it makes objects and lists in place of records and tuples."""
        if (hint, plain) not in self._known:
            kind, note = _split(hint)
            if isinstance(note, Shape) and self._whole:
                read = self._of(note.like, plain=True)
            else:
                read = self._of_type(kind, plain=plain)
            if isinstance(note, Form):  # of a log, what texts are like is not asked
                asked = {key: one for key, one in note.keywords if self._whole or key in ("minimum", "maximum")}
                read = _within(read, asked)
            self._known[hint, plain] = read
        return self._known[hint, plain]

    def _of_type(self, kind: Any, *, plain: bool) -> _Read:
        origin, parts = get_origin(kind), get_args(kind)
        if is_dataclass(kind) or is_typeddict(kind):
            return self._record(cast("type", kind), plain=plain)
        if origin in (Union, UnionType):
            inner = self._of(next(part for part in parts if part is not NoneType), plain=plain)
            return lambda value: None if value is None else inner(value)
        if origin is Literal:
            named = f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else repr(parts[0])
            return lambda value: value if value in parts else _refuse(f"is {value!r}, not {named}")
        if origin in (tuple, Sequence):
            length = None if origin is Sequence or parts[1:] == (...,) else len(parts)
            return _items(self._of(parts[0], plain=plain), length, list if plain else tuple)
        if origin is Mapping:
            return _mapping(self._of(parts[0], plain=plain), self._of(parts[1], plain=plain))
        return _PLAIN[kind] if self._whole else _OF_A_LOG.get(kind, _PLAIN[kind])

    def _record(self, record: type, *, plain: bool) -> _Read:
        closed = self._whole and not is_typeddict(record)
        others: _Read = (lambda _: _refuse("is not known")) if closed else (lambda value: value)

        def read(data: Any) -> Any:
            if not isinstance(data, dict):
                _refuse("is not of type object")
            readers, needed = self._members_of(record, plain=plain)
            missing = next((key for key in needed if key not in data), None)
            if missing is not None:
                raise MismatchError("is missing", missing)
            found = {}
            for key, value in data.items():
                name, each = readers.get(key, (key if plain else "", others))
                made = _below(key, each, value)
                if name:
                    found[key if plain else name] = made
            return found if plain else record(**found)

        return read

    def _members_of(self, record: type, *, plain: bool) -> tuple[Mapping[str, tuple[str, _Read]], Sequence[str]]:
        """Returns name and reader by key, at the first value only: a record may hold others of its own class."""
        if (record, plain) not in self._records:
            members, needed = _members(record, sparse=not self._whole)
            if record in self._more:
                derived, of_derived = _members(self._more[record], sparse=False)
                members = {**{key: ("", hint) for key, (_, hint) in derived.items()}, **members}
                needed = needed + of_derived
            readers = {key: (name, self._of(hint, plain=plain)) for key, (name, hint) in members.items()}
            self._records[record, plain] = readers, sorted(needed)
        return self._records[record, plain]


_from_plain = RecordReader().read


def from_plain(record: type[T], data: Mapping[str, Any]) -> T:
    """Returns the record with these values; other keys are ignored, and a missing one has its default."""
    return _from_plain(record, data)


def _refuse(sentence: str) -> Any:
    raise MismatchError(sentence)


def _below(part: str, read: _Read, value: Any) -> Any:
    try:
        return read(value)
    except MismatchError as mismatch:
        mismatch.below(part)
        raise


def _items(each: _Read, length: int | None, make: type) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            _refuse("is not of type array")
        if length is not None and len(value) != length:
            _refuse(f"has {len(value)} entries")
        made: list[Any] = []
        try:
            made.extend(map(each, value))
        except MismatchError as mismatch:
            mismatch.below(f"[{len(made)}]")
            raise
        return make(made)

    return read


def _mapping(of_key: _Read, each: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            _refuse("is not of type object")
        return {_below(f"the key {key}:", of_key, key): _below(key, each, item) for key, item in value.items()}

    return read


def _within(read: _Read, keywords: Mapping[str, Any]) -> _Read:
    least, most = keywords.get("minimum", -math.inf), keywords.get("maximum", math.inf)
    shortest, pattern = keywords.get("minLength", 0), keywords.get("pattern", "")

    def bounded(value: Any) -> Any:
        found = read(value)
        if isinstance(found, str):
            if len(found) < shortest:
                _refuse("is empty")
            if pattern and not re.fullmatch(pattern, found):
                _refuse(f"is {found!r}, which is not of the form {pattern}")
        elif isinstance(value, str):
            _refuse("is not of type number")  # a word for what is not finite
        elif isinstance(found, int | float) and not least <= found <= most:
            _refuse(f"is {found}, out of range")
        return found

    return bounded


def _integer(value: Any) -> Any:
    return value if type(value) in (int, float) and value % 1 == 0 else _refuse("is not of type integer")


def _number(value: Any) -> Any:
    if isinstance(value, str) and value in _NONFINITE:
        return _NONFINITE[value]
    return value if type(value) in (int, float) else _refuse("is not of type number")


def _integer_of_a_log(value: Any) -> Any:
    if type(value) is not int:
        _refuse("is not of type integer")
    return value if abs(value) < _MOST else _refuse(f"is {value}, out of range")


def _float_of_a_log(value: Any) -> float:
    try:
        return float(_number(value))
    except OverflowError:
        return cast("float", _refuse("is out of range"))


def _of(kind: type, name: str) -> _Read:
    return lambda value: value if type(value) is kind else _refuse(f"is not of type {name}")


_PLAIN: Mapping[Any, _Read] = {
    int: _integer,
    float: _number,
    str: _of(str, "string"),
    bool: _of(bool, "boolean"),
    dict: _of(dict, "object"),
    Any: lambda value: value,
}
_OF_A_LOG: Mapping[Any, _Read] = {int: _integer_of_a_log, float: _float_of_a_log}
"""What goes into arrays of 64 bits; a report keeps its numbers as they were written."""


# -- objects that have one key twice: readers disagree on which of the two counts --


class DuplicateKeyError(ValueError):
    """An object has one key twice."""

    def __init__(self, key: str) -> None:
        super().__init__("a key stands twice")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; an `object_pairs_hook` for `json.loads`. Raises DuplicateKeyError."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise DuplicateKeyError(key)
        table[key] = value
    return table
