"""A line of the log from its text, several times as fast as `line_of`: for whoever reads a million of them.

Steps and details are made the quick way where each value is of its field's plain type and in its range, as in all that
`text_of` writes of finite numbers. Any other line goes the checked way, which refuses or converts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
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
        return json.loads
    parse: Callable[[str | bytes], Any] = orjson.loads
    return parse


_loads = _parser()
_LARGEST = 2**63 - 1
_LAST_LETTER = "\U0010ffff"
"""No text that JSON has is behind it, but one that begins with it."""


class _OtherError(Exception):
    """A value that the checked way has to look at."""


def quick_line_of(text: str | bytes) -> Stamped | None:
    """Returns what `line_of` returns, and raises what it raises."""
    try:
        values = _loads(text)
        make = _MAKERS.get(values["kind"])
        if make is None or values["schema_version"] != SCHEMA_VERSION:
            return line_of(text)
        return Stamped(_stamp(values), make(values))
    except (_OtherError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return line_of(text)


def _opened(record: type[T]) -> Callable[..., T]:
    """Returns what makes a record of a frozen class without the price of one, which sets each field by a call.

    A twin with the same slots is filled, and becomes the record by its class. Fields are given by name.
    """
    given: list[Any] = [
        (one.name, Any) if one.default is MISSING else (one.name, Any, field(default=one.default))
        for one in fields(cast("Any", record))
    ]
    twin: Any = make_dataclass(f"_{record.__name__}", given, slots=True, kw_only=True)

    def make(**values: Any) -> T:
        made = twin(**values)
        made.__class__ = record
        return cast("T", made)

    return make


def _bounds_of(record: type) -> Mapping[str, _Bounds]:
    """Of each field that holds one plain value its type, the least and the greatest it may be."""
    hints = get_type_hints(record, include_extras=True)
    found = {name: bounds for name, hint in hints.items() if (bounds := _bounds(hint)) is not None}
    return MappingProxyType(found)


def _bounds(hint: Any) -> _Bounds | None:
    within: dict[str, Any] = {}
    if get_origin(hint) not in (Annotated, Literal, tuple) and get_args(hint):  # a union with None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Annotated:
        kind, note = get_args(hint)[:2]
        if not isinstance(note, Form):
            return None
        hint, within = kind, dict(note.keywords)
    if hint is float:
        return float, within.get("minimum", float("-inf")), within.get("maximum", float("inf"))
    if hint is int:
        return int, within.get("minimum", -_LARGEST), within.get("maximum", _LARGEST)
    if hint is bool:
        return bool, False, True
    if hint is str:
        return str, " " if within.get("minLength") else "", _LAST_LETTER
    return None


def _plain(values: Mapping[str, Any], bounds: Mapping[str, _Bounds], known: frozenset[str]) -> dict[str, Any]:
    """Returns the values that belong to a record.

    Raises:
        _OtherError: One is not of its field's plain type, or out of its range.
    """
    kept = {}
    for key, value in values.items():
        bound = bounds.get(key)
        if bound is None:
            if key in known:
                raise _OtherError
            continue
        if type(value) is not bound[0] or not bound[1] <= value <= bound[2]:
            raise _OtherError
        kept[key] = value
    return kept


_NO_KEYS: frozenset[str] = frozenset()
_ROLES = frozenset(get_args(get_type_hints(TensorDetail)["role"]))
_STAMP, _STEP, _DETAIL, _TENSOR = map(_bounds_of, (Stamp, StepLine, DetailLine, TensorDetail))
_make_stamp, _make_step = _opened(Stamp), _opened(StepLine)
_make_detail, _make_tensor = _opened(DetailLine), _opened(TensorDetail)


def _stamp(values: Mapping[str, Any]) -> Stamp:
    """Returns the stamp among a line's values, which for most lines differs from another's by its time alone."""
    time_ms = values["time_ms"]
    if type(time_ms) is not int or not -_LARGEST <= time_ms <= _LARGEST:
        raise _OtherError
    get = values.get
    key = (values["run_id"], *[get(name, _ABSENT) for name in _CHANGING])
    known = _STAMPS.get(key)
    if known is None or tuple(map(type, key)) != known[0]:  # True is 1 to a dictionary
        kept = {name: values[name] for name in _STAMP if name in values and name not in {"time_ms", "schema_version"}}
        if len(_STAMPS) >= _MOST_STAMPS:
            _STAMPS.clear()
        known = _STAMPS[key] = (tuple(map(type, key)), _plain(kept, _STAMP, _NO_KEYS))
    return _make_stamp(time_ms=time_ms, **known[1])


_CHANGING = ("attempt", "branch", "rank", "world_size", "restarts")
_ABSENT = "absent"
_STAMPS: dict[tuple[Any, ...], tuple[tuple[type, ...], dict[str, Any]]] = {}
_MOST_STAMPS = 1000


def _step(values: dict[str, Any]) -> StepLine:
    rates, decays = values.pop("learning_rates", ()), values.pop("weight_decays", ())
    for value in (*rates, *decays):
        if type(value) is not float:
            raise _OtherError
    return _make_step(learning_rates=tuple(rates), weight_decays=tuple(decays), **_plain(values, _STEP, _NO_KEYS))


def _detail(values: dict[str, Any]) -> DetailLine:
    tensors = values.pop("tensors", ())
    return _make_detail(tensors=tuple(map(_tensor, tensors)), **_plain(values, _DETAIL, _NO_KEYS))


def _tensor(values: dict[str, Any]) -> TensorDetail:
    for key, value in values.items():
        bound = _TENSOR.get(key)
        if bound is None:
            if (key == "role" and value in _ROLES) or (key == "histogram" and type(value) is dict):
                continue
            raise _OtherError
        if type(value) is not bound[0] or not bound[1] <= value <= bound[2]:
            raise _OtherError
    return _make_tensor(**values)


_MAKERS: Mapping[str, Callable[[dict[str, Any]], Any]] = MappingProxyType({"step": _step, "detail": _detail})
