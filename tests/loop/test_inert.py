"""Values go through JSON and come back; classes come back where they may, functions by torch's table alone."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampdoctor.hooks.json_values import NotSerializableError, UnreadableTreeError, function_named, read, written

Point = namedtuple("Point", "x y")  # noqa: PYI024 - as users write them


@dataclass(frozen=True)
class Config:
    width: int
    deep: object = None


class Attributed(OrderedDict):
    pass


OWN = {cls.__qualname__: cls for cls in (Point, Config, Attributed)}


def there_and_back(value):
    tree = json.loads(json.dumps(written(value), allow_nan=False))
    return read(tree, lambda module, name: OWN.get(name) if module == __name__ else None)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -3, 2.5, math.inf, "text", 1 + 2j, b"\x00\xff", Ellipsis),
        *([1, (2, [3])], {1: "a", (2, 3): None}, {1, 2}, slice(None, 3), range(2, 9, 3)),
        *(torch.float16, torch.device("cuda", 1), torch.Size([2, 3]), torch.channels_last),
        *(torch.nn.functional.gelu, torch.Tensor.T.__get__),
        *(Point(1, [2]), Config(3, deep={"a": Config(4)}), Attributed(a=1)),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_it_comes_back(value):
    again = there_and_back(value)
    assert again == value
    assert type(again) is type(value)


def test_what_is_not_to_be_used_is_a_bag():
    assert there_and_back(argparse.Namespace(lr=0.1)) == SimpleNamespace(lr=0.1)
    assert there_and_back(functools.partial(torch.relu, inplace=True)).keywords == {"inplace": True}
    assert math.isnan(there_and_back(math.nan))


def cyclic():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [lambda: 0, nn.Linear(1, 1), torch.ones(1), cyclic(), open, object()])
def test_what_has_no_inert_form_is_refused(value):
    with pytest.raises(NotSerializableError):
        written(value)


@pytest.mark.parametrize("name", ["torch.load", "os.system", "torch.Tensor.__class__", "builtins.eval", "", "torch"])
def test_no_other_function_is_found(name):
    assert function_named(name) is None


CALLED = []


def _noted(name):
    CALLED.append(name)


class Loud:
    """What a stranger's values must not reach: each of its methods says that it was called."""

    __slots__ = ("kept",)

    def __new__(cls, *_args):
        _noted("new")
        return super().__new__(cls)

    def __setattr__(self, name, value):
        _noted(f"set {name}")
        object.__setattr__(self, name, value)

    def __hash__(self):
        _noted("hash")
        return 0

    def __eq__(self, other):
        _noted("eq")
        return True


class LoudWithADict(Loud):
    @property
    def opens(self):
        return None

    @opens.setter
    def opens(self, value):
        _noted("opens")


class LoudDict(dict):
    def __new__(cls, *args):
        _noted("new dict")
        return super().__new__(cls, *args)

    def __setitem__(self, key, value):
        _noted("setitem")


class LoudUserDict(UserDict):
    def __new__(cls, *args):
        _noted("new user dict")
        return super().__new__(cls)

    @property
    def data(self):
        return {}

    @data.setter
    def data(self, value):
        _noted("data")


class LoudDefault(defaultdict):
    def __new__(cls, *args):
        _noted("new default")
        return super().__new__(cls, *args)


LOUD = {cls.__qualname__: cls for cls in (Loud, LoudWithADict, LoudDict, LoudUserDict, LoudDefault, Config)}


def _read_loud(tree):
    CALLED.clear()
    return read(tree, lambda module, name: LOUD.get(name) if module == __name__ else None)


@pytest.mark.parametrize(
    ("kind", "name", "held"),
    [
        ("object", "Loud", {"fields": {"kept": 1}}),
        ("object", "LoudWithADict", {"fields": {"kept": 1, "opens": "/etc/passwd", "other": 2}}),
        ("mapping", "LoudDict", {"items": [["a", 1]]}),
        ("mapping", "LoudUserDict", {"items": [["a", 1]]}),
        ("mapping", "LoudDefault", {"items": [["a", 1]]}),
    ],
)
def test_no_method_of_a_users_class_is_called(kind, name, held):
    made = _read_loud({"kind": kind, "class": f"{__name__}:{name}", **held})
    assert CALLED == []
    assert type(made) is LOUD[name]
    if name == "LoudWithADict":
        assert (made.kept, vars(made)) == (1, {"opens": "/etc/passwd", "other": 2})
    if isinstance(made, dict):
        assert dict.__getitem__(made, "a") == 1


LOUD_TREE = {"kind": "object", "class": f"{__name__}:Loud", "fields": {"kept": 1}}


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "dict", "items": [[LOUD_TREE, 1], [LOUD_TREE, 2]]},
        {"kind": "set", "items": [LOUD_TREE]},
        {"kind": "frozenset", "items": [{"kind": "tuple", "items": [LOUD_TREE]}]},
        {
            "kind": "set",
            "items": [{"kind": "object", "class": f"{__name__}:Config", "fields": {"width": 1, "deep": LOUD_TREE}}],
        },
    ],
    ids=["a key", "a member", "inside a tuple", "inside a frozen data class"],
)
def test_a_key_that_hashes_itself_is_refused(tree):
    with pytest.raises(UnreadableTreeError, match="a key of the class Loud, which hashes itself"):
        _read_loud(tree)
    assert CALLED == []
