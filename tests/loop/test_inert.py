"""Values go through JSON and come back; classes come back where they may, functions by torch's table alone."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ampdoctor.loop.inert.functions import function_named, name_of
from ampdoctor.loop.inert.reading import read
from ampdoctor.loop.inert.writing import NotInertError, written

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
        None,
        True,
        -3,
        2.5,
        math.inf,
        "text",
        1 + 2j,
        b"\x00\xff",
        [1, (2, [3])],
        {1: "a", (2, 3): None},
        {1, 2},
        slice(None, 3),
        range(2, 9, 3),
        Ellipsis,
        torch.float16,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        torch.channels_last,
        torch.nn.functional.gelu,
        torch.Tensor.T.__get__,
        Point(1, [2]),
        Config(3, deep={"a": Config(4)}),
        Attributed(a=1),
    ],
    ids=str,
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
    with pytest.raises(NotInertError):
        written(value)


@pytest.mark.parametrize("name", ["torch.load", "os.system", "torch.Tensor.__class__", "builtins.eval", "", "torch"])
def test_no_other_function_is_found(name):
    assert function_named(name) is None


def test_functions_of_torchs_are_named():
    for function in (torch.log, torch.Tensor.__setitem__, torch.Tensor.new_zeros, torch.stack, torch.Tensor.__rsub__):
        assert function_named(name_of(function)) == function
    assert name_of(print) is None
