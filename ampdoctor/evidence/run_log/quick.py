"""A line of the log from its text, twice as fast as `line_of`, and several times with orjson: for a log of a million.

Lines of one kind mostly have the same keys in the same order, with values of the same types: their shape. Of each shape
it is found out once which value belongs to which field, and of a line only that its numbers are in range. Steps and
details are made so where each value is of its field's plain type and in its range, as in all that `text_of` writes of
finite numbers. Any other line goes the checked way, which refuses or converts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, make_dataclass
from operator import itemgetter
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

from ampdoctor.evidence.codec import Form
from ampdoctor.evidence.run_log.details import DetailLine, TensorDetail
from ampdoctor.evidence.run_log.lines import SCHEMA_VERSION, Stamp, Stamped, StepLine
from ampdoctor.evidence.run_log.text import line_of

T = TypeVar("T")
_Bounds: TypeAlias = tuple[type, Any, Any]


def _parser() -> Callable[[str | bytes], Any]:
    """What parses JSON: in a third of the time orjson, where it is installed; what it refuses goes the checked way."""
    try:
        import orjson
    except ImportError:
        return _parsed
    parse: Callable[[str | bytes], Any] = orjson.loads
    return parse


def _parsed(text: str | bytes) -> Any:
    """What `json.loads` does but for what a line never needs: another encoding, and white space before it."""
    line = text.decode() if isinstance(text, bytes) else text
    values, end = _decoded(line)
    if end != len(line) and not line[end:].isspace():
        raise _OtherError
    return values


_decoded = json.JSONDecoder().raw_decode
_loads = _parser()
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text that JSON has is behind it, but one that begins with it."""
_MOST_SHAPES = 1000
_MOST_KEYS = 100
"""More shapes, or keys in one, than any writer of a log makes."""


class _OtherError(Exception):
    """A value that the checked way has to look at."""


def quick_line_of(text: str | bytes) -> Stamped | None:
    """Returns what `line_of` returns, and raises what it raises."""
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
"""Makes a record of the values of a shape."""
_LINES: dict[tuple[Any, ...], _Reader[Stamped] | None] = {}
_TENSORS: dict[tuple[Any, ...], _Reader[TensorDetail] | None] = {}
"""By shape; None where all of a shape goes the checked way."""


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


def _line_reader(values: Mapping[str, Any]) -> _Reader[Stamped]:
    record = _QUICK.get(values["kind"])
    if record is None or values["schema_version"] != SCHEMA_VERSION:
        raise _OtherError
    stamp, line, stamped = _reader(Stamp, values), _reader(record, values), opened(Stamped)

    def read(row: list[Any]) -> Stamped:
        return stamped(stamp(row), line(row))

    return read


def _tensor_reader(values: Mapping[str, Any]) -> _Reader[TensorDetail]:
    if values["role"] not in _ROLES:
        raise _OtherError
    return _reader(TensorDetail, values)


def _reader(record: type[T], values: Mapping[str, Any]) -> _Reader[T]:
    """Returns what makes a record of the values of this shape.

    Raises:
        _OtherError: A value is not of its field's plain type, or one is missing.
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
    """Returns what makes a record of a frozen class without the price of one, which sets each field by a call.

    A twin with the same slots is filled, and becomes the record by its class. All fields are given, in their order.
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
    """Returns the type that a field's value has in JSON, and the least and the greatest it may be; None for any."""
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
    if get_origin(hint) is Literal:  # the shape says which
        return str, None, None
    return {bool: bool, tuple: list}.get(get_origin(hint) or hint, dict), None, None


_BOUNDS: Mapping[type, Mapping[str, _Bounds]] = {
    record: {name: _bounds(hint) for name, hint in get_type_hints(record, include_extras=True).items()}
    for record in (Stamp, StepLine, DetailLine, TensorDetail)
}
_TWINS: Mapping[type, Any] = {
    record: make_dataclass(f"_{record.__name__}", [one.name for one in fields(cast("Any", record))], slots=True)
    for record in (*_BOUNDS, Stamped)
}
_ROLES = frozenset(get_args(get_type_hints(TensorDetail)["role"]))
_QUICK: Mapping[str, type[StepLine | DetailLine]] = MappingProxyType({"step": StepLine, "detail": DetailLine})
_SEVERAL: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {"learning_rates": _floats, "weight_decays": _floats, "tensors": _tensors}
)
