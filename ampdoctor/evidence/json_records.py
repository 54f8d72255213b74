"""Records to JSON and back, by their classes; and the JSON Schema of a class.

`from_plain` reads values that were checked before, `checked` values from anybody; `unique_keys` refuses an object that
has one key twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from inspect import cleandoc
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")
Node: TypeAlias = dict[str, Any]

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
_NUMBER = {
    "description": "A float; a non-finite one is a string.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}


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


def from_plain(record: type[T], data: Mapping[str, Any]) -> T:
    """Return a record from values that follow its schema; floats are numbers again.

    Arrays become tuples; values without a type of their own stay as JSON has them. Other keys are ignored, and a field
    whose key is missing has its default.
    """
    return cast("T", _reader(cast("Any", record))(data))


def schema_of(record: type, more: Mapping[type, type] = MappingProxyType({}), *, sparse: bool = False) -> Node:
    """Return the JSON Schema of a record, with the records in it as parts (`$defs`).

    `more` maps the class of a record to another one, whose keys are written beside its own because they follow from
    them. `sparse` is for records that leave out defaults.
    """
    made = _Schema(more, sparse=sparse)
    node = made.record(record)
    return {**node, "$defs": dict(sorted(made.parts.items()))}


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
    """The written attributes of a dataclass, each with its key."""
    return tuple((f.name, f.name.rstrip("_")) for f in fields(record) if f.metadata.get("written", True))


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record, include_extras=True)


def _split(hint: Any) -> tuple[Any, Any]:
    """A type, and its note in `Annotated`."""
    return get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Returns a function that makes a value of this type from JSON values."""
    kind, _ = _split(hint)
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record_reader(cast("type", kind))
    if origin in (Union, UnionType):
        inner = _reader(next(part for part in parts if part is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin in (tuple, Sequence):
        each = _reader(parts[0])
        return tuple if each is _as_it_is else lambda values: tuple(map(each, values))
    if origin is Mapping and _reader(parts[1]) is not _as_it_is:
        each = _reader(parts[1])
        return lambda values: {key: each(value) for key, value in values.items()}
    return _as_it_is


def _record_reader(record: type) -> Callable[[Any], Any]:
    parts: list[tuple[str, str, Callable[[Any], Any]]] = []

    def read(data: Mapping[str, Any]) -> Any:
        if not parts:  # a record may hold others of its own class
            parts.extend((name, key, _reader(_hints(record)[name])) for name, key in _keys(record))
        return record(**{name: each(data[key]) for name, key, each in parts if key in data})

    return read


def _as_it_is(value: Any) -> Any:
    return value


class _Schema:
    def __init__(self, more: Mapping[type, type], *, sparse: bool) -> None:
        self._more = more
        self._sparse = sparse
        self.parts: dict[str, Node] = {}
        self._records: dict[str, type] = {}

    def of(self, hint: Any) -> Node:
        """The node of a type."""
        kind, note = _split(hint)
        origin, parts = get_origin(kind), get_args(kind)
        if isinstance(note, Shape) and not (self._sparse and is_dataclass(kind)):  # a sparse record is written whole
            return self.of(note.like)
        if isinstance(note, Form):
            node = ({} if kind is float else self.of(kind)) | dict(note.keywords)
            return self._named(note.name, node) if note.name else node
        if is_dataclass(kind) or is_typeddict(kind):
            return self._part(cast("type", kind))
        if origin is Literal:
            return {"enum": list(parts)} if len(parts) > 1 else {"const": parts[0]}
        if origin in (Union, UnionType):
            inner = self.of(next(part for part in parts if part is not NoneType))
            simple = set(inner) == {"type"}
            return {"type": [inner["type"], "null"]} if simple else {"anyOf": [inner, {"type": "null"}]}
        if origin in (tuple, Sequence):
            length = (
                {} if origin is Sequence or parts[1:] == (...,) else {"minItems": len(parts), "maxItems": len(parts)}
            )
            return {"type": "array", "items": self.of(parts[0]), **length}
        if origin is Mapping:
            names = self.of(parts[0])
            keys = {} if names == {"type": "string"} else {"propertyNames": names}
            others = {} if parts[1] is Any else {"additionalProperties": self.of(parts[1])}
            return {"type": "object", **keys, **others}
        if kind is float:
            return self._named("number", _NUMBER)
        return {} if kind is Any else {"type": _TYPES[kind]}

    def record(self, record: type) -> Node:
        """The node of a record itself."""
        properties, required = self._properties(record)
        if record in self._more:
            derived, of_derived = self._properties(self._more[record])
            properties, required = {**derived, **properties}, required + of_derived
        closed = {} if is_typeddict(record) else {"additionalProperties": False}
        needed = {"required": sorted(required)} if required else {}
        return {"description": _summary(record), "type": "object", "properties": properties, **needed, **closed}

    def _properties(self, record: type) -> tuple[dict[str, Node], list[str]]:
        said, hints = _descriptions(record), _hints(record)
        if is_typeddict(record):
            names = [(name, name) for name in hints]
            optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
            hints = {name: get_args(hint)[0] if name in optional else hint for name, hint in hints.items()}
            required = (
                [] if not getattr(record, "__total__", True) else [name for name in hints if name not in optional]
            )
        else:
            names, required = list(_keys(record)), [key for _, key in _keys(record)]
            if self._sparse:
                required = [f.name.rstrip("_") for f in fields(record) if f.default is f.default_factory is MISSING]
        properties = {key: {"description": said[name], **self.of(hints[name])} for name, key in names}
        return properties, required

    def _part(self, record: type) -> Node:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", record.__name__.removesuffix("Section")).lower()
        if self._records.setdefault(name, record) is not record:
            raise ValueError(f"two records are called {name}")
        if name not in self.parts:
            self.parts[name] = {}  # a record may hold others of its own class
            self.parts[name] = self.record(record)
        return {"$ref": f"#/$defs/{name}"}

    def _named(self, name: str, node: Node) -> Node:
        self.parts[name] = node
        return {"$ref": f"#/$defs/{name}"}


_TYPES = {str: "string", int: "integer", bool: "boolean", dict: "object"}


def _summary(record: type) -> str:
    return " ".join(cleandoc(record.__doc__ or "").partition("\n\n")[0].split())


def _descriptions(record: type) -> dict[str, str]:
    """The description of each attribute in a docstring; two in one line ("old, new: Their names.") share theirs."""
    text = cleandoc(record.__doc__ or "").partition("Attributes:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    return {
        name: re.sub(r"\bNone\b", "null", " ".join(said.split())) for names, said in found for name in names.split(", ")
    }


# -- records from unchecked JSON values: a value that does not fit its field's type is refused --

_Read = Callable[[Any], Any]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST = 2**63


def checked(record: type[T], data: Mapping[str, Any]) -> T:
    """Returns the record with these values. Other keys are ignored; a missing one has its default.

    Raises ValueError if a value is not of its field's type or range, or a field without a default has none.
    """
    return cast("T", _checked_reader(cast("Any", record))(data))


def _refuse(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{repr(value)[:60]} is not {wanted}")


@cache
def _checked_reader(hint: Any) -> _Read:
    kind, note = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
    read = _of_type(kind)
    return _within(read, dict(note.keywords)) if isinstance(note, Form) else read


def _of_type(kind: Any) -> _Read:
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(cast("type", kind))
    if origin in (Union, UnionType):
        inner = _checked_reader(next(part for part in parts if part is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: value if value in parts else _raise(value, f"one of {parts}")
    if origin in (tuple, Sequence):
        return _items(_checked_reader(parts[0]))
    if origin is Mapping:
        each = _checked_reader(parts[1])
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
                (f.name, f.name.rstrip("_"), _checked_reader(hints[f.name]), f.default is f.default_factory is MISSING)
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
