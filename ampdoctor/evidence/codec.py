"""Records as JSON values and back, and the JSON Schema of both: all three come from the classes.

A record is a dataclass, closed and with every key, or a `TypedDict`, which may have further keys (and is only the shape
of a mapping, see `Shape`). Its docstring's `Attributes` are the schema's descriptions, in which None is called null. An
attribute that would be a word of Python (`with_`) is written without its last underscore.
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
    """What the schema says of a value beside its type; it stands in `Annotated`.

    Attributes:
        keywords: Keywords of JSON Schema and their values.
        name: Of the part of the schema that says so; "" where it says so in place.
    """

    keywords: tuple[tuple[str, Any], ...]
    name: str = ""


def form(name: str = "", /, **keywords: Any) -> Form:
    """Return the form with these keywords."""
    return Form(tuple(keywords.items()), name)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value looks like when it is written, where the type in front of it in `Annotated` says less, or more."""

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
    """Return `value` as JSON values.

    Floats keep 6 significant digits; whole numbers below 2^53 and powers of two stay exact, because loss scales and the
    limits of formats are such and are meant to be copied. Non-finite floats become "NaN", "Infinity" and "-Infinity".
    Records become objects, sets sorted lists; NumPy scalars count as numbers.

    Raises:
        TypeError: A value is none of these; the message names its path.
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
    """Return the record that these values are, which follow its schema; floats are numbers again.

    Arrays become tuples; what has no type of its own stays as JSON has it. Other keys are passed by, and a field whose
    key is missing has its default.
    """
    return cast("T", _reader(cast("Any", record))(data))


def schema_of(record: type, more: Mapping[type, type] = MappingProxyType({}), *, sparse: bool = False) -> Node:
    """Return the JSON Schema of a record, with those that it holds as parts (`$defs`).

    Args:
        record: Any.
        more: By class of a record another one, whose keys are written beside its own because they follow from them.
        sparse: What has its default is left out.
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
    """Each attribute of a dataclass that is written, and its key."""
    return tuple((f.name, f.name.rstrip("_")) for f in fields(record) if f.metadata.get("written", True))


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record, include_extras=True)


def _split(hint: Any) -> tuple[Any, Any]:
    """A type and what `Annotated` says of it."""
    return get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """What makes a value of this type from JSON values."""
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
        if isinstance(note, Shape) and not (self._sparse and is_dataclass(kind)):  # there a record is written whole
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
    """What a docstring says of each attribute; of two in one line ("old, new: Their names.") the same."""
    text = cleandoc(record.__doc__ or "").partition("Attributes:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    return {
        name: re.sub(r"\bNone\b", "null", " ".join(said.split())) for names, said in found for name in names.split(", ")
    }
