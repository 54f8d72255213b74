from __future__ import annotations

import random
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ampdoctor.hooks.nested import cast_floats, copy_batch, iter_tensors, map_tensors, move_batch


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Sample:
    image: torch.Tensor
    tag: str = "t"
    boxes: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    image: torch.Tensor


class Plain:
    def __init__(self, value):
        self.value = value
        self.name = "plain"


class Slotted:
    __slots__ = ("__private", "value")

    def __init__(self, value):
        self.value = value
        self.__private = value + 1

    def private(self):
        return self.__private


class Movable:
    """Moves in place and returns nothing, as some detection batches do."""

    def __init__(self, value):
        self.value = value
        self.moved_to = None

    def to(self, device):
        self.value = self.value.to(device)
        self.moved_to = device


class Custom(UserDict):
    pass


def ones():
    return torch.ones(2)


CONTAINERS = {
    "dict": lambda: {"a": ones()},
    "ordered": lambda: OrderedDict(a=ones()),
    "default": lambda: defaultdict(list, a=ones()),
    "userdict": lambda: Custom(a=ones()),
    "proxy": lambda: MappingProxyType({"a": ones()}),
    "list": lambda: [ones(), 3],
    "tuple": lambda: (ones(), "s"),
    "deque": lambda: deque([ones()], maxlen=4),
    "namedtuple": lambda: Point(ones(), 2),
    "dataclass": lambda: Sample(ones(), boxes=[ones()]),
    "frozen": lambda: Frozen(ones()),
    "plain": lambda: Plain(ones()),
    "slotted": lambda: Slotted(ones()),
    "nested": lambda: [{"a": (Sample(ones()), [Plain(ones())])}],
    "set": lambda: {ones()},
    "return_type": lambda: torch.ones(2, 2).max(0),
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_every_container_keeps_its_type_where_its_tensors_are_mapped_or_copied(make):
    batch = make()
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert type(doubled) is type(batch)
    before, after = list(iter_tensors(batch)), list(iter_tensors(doubled))
    assert before
    assert [path for path, _ in before] == [path for path, _ in after]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert torch.equal(new, old * 2)
    copied = copy_batch(batch)
    assert type(copied) is type(batch)
    wanted = [tensor.clone() for _, tensor in iter_tensors(batch)]
    for _, tensor in iter_tensors(copied):
        tensor.fill_(-1)
    assert all(torch.equal(a, b) for (_, a), b in zip(iter_tensors(batch), wanted, strict=True))


def test_paths_of_tensors():
    batch = {"ids": ones(), "more": [Point(ones(), ones())], "sample": Sample(ones(), boxes=[ones()]), 3: Plain(ones())}
    paths = [path for path, _ in iter_tensors(batch)]
    assert paths == ["ids", "more.0.x", "more.0.y", "sample.image", "sample.boxes.0", "3.value"]
    assert [path for path, _ in iter_tensors(ones())] == [""]


def test_transformers_outputs_and_encodings():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.long), "words": ["a"]})
    copied = copy_batch(encoding)
    assert type(copied) is type(encoding)
    copied["input_ids"].zero_()
    copied["words"].append("b")
    assert encoding["input_ids"].sum() == 6
    assert encoding["words"] == ["a"]
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=ones(), hidden_states=(ones(),))
    half = cast_floats(output, torch.float16)
    assert type(half) is type(output)
    assert half.last_hidden_state.dtype is half["last_hidden_state"].dtype is torch.float16
    assert half.hidden_states[0].dtype is torch.float16
    assert output.last_hidden_state.dtype is torch.float32
    assert set(move_batch(encoding, "meta").keys()) == {"input_ids", "words"}
    assert move_batch(encoding, "meta")["input_ids"].device.type == "meta"


def test_packed_sequences_keep_their_batch_sizes_on_the_cpu():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)], enforce_sorted=False)
    half = cast_floats({"x": packed}, torch.float16)["x"]
    assert isinstance(half, PackedSequence)
    assert half.data.dtype is torch.float16
    assert torch.equal(half.batch_sizes, packed.batch_sizes)
    assert move_batch(packed, "meta").batch_sizes.device.type == "cpu"
    copied = copy_batch(packed)
    copied.data.zero_()
    copied.batch_sizes.zero_()
    assert packed.data.sum() == 10
    assert packed.batch_sizes.sum() == 5


def test_cycles_end_and_shared_objects_stay_shared():
    batch = {"x": ones()}
    batch["self"] = batch
    batch["pair"] = ([batch], batch["x"])
    mapped = map_tensors(lambda t: t + 1, batch)
    assert mapped["self"] is mapped
    assert mapped["pair"][0][0] is mapped
    assert mapped["pair"][1] is mapped["x"]
    copied = copy_batch(batch)
    assert copied["self"] is copied
    assert copied["x"] is copied["pair"][1]
    assert copied["x"] is not batch["x"]


def test_moving():
    batch = {"x": ones(), "n": 3, "o": Movable(ones())}
    moved = move_batch(copy_batch(batch), "meta")
    assert moved["x"].device.type == "meta"
    assert moved["o"].moved_to == "meta"
    assert moved["o"].value.device.type == "meta"
    assert batch["o"].moved_to is None
    assert move_batch(batch, "meta", move=lambda b, d: (b["n"], d)) == (3, "meta")


def test_casting_touches_real_floats_of_16_bits_and_more_only():
    floats = {"f": ones(), "d": ones().double(), "s": torch.eye(2).to_sparse()}
    kept = (torch.long, torch.bool, torch.complex64, torch.float8_e5m2)
    batch = floats | {str(dtype): ones().to(dtype) for dtype in kept}
    dtypes = {name: tensor.dtype for name, tensor in iter_tensors(cast_floats(batch, torch.bfloat16))}
    assert dtypes == dict.fromkeys(floats, torch.bfloat16) | {str(dtype): dtype for dtype in kept}


def test_leaves_that_require_a_gradient_stay_leaves():
    leaf, parameter = ones().requires_grad_(), nn.Parameter(ones())
    history = leaf * 2
    for change in (copy_batch, lambda b: cast_floats(b, torch.float16), lambda b: move_batch(b, "meta")):
        new = change([leaf, parameter])
        assert all(tensor.is_leaf and tensor.requires_grad for tensor in new)
    copied = copy_batch([leaf, parameter, history])
    assert type(copied[1]) is nn.Parameter
    assert copied[2].is_leaf
    assert copied[2].requires_grad
    copied[0].sum().backward()
    assert leaf.grad is None


def test_other_mutable_parts_are_copied_and_the_uncopiable_is_shared(tmp_path):
    lock, teacher = threading.Lock(), nn.Linear(1, 1)
    generator = torch.Generator().manual_seed(3)
    with (tmp_path / "f").open("w") as stream:
        batch = {
            "array": np.ones(3),
            "names": ["a"],
            "rng": random.Random(1),
            "generator": generator,
            "lock": lock,
            "file": stream,
            "teacher": teacher,
            "iterator": (i for i in range(2)),
            "none": None,
        }
        copied = copy_batch(batch)
    copied["array"][0] = 5
    copied["names"].append("b")
    first = copied["rng"].random()
    drawn = torch.rand(2, generator=copied["generator"])
    assert batch["array"][0] == 1
    assert batch["names"] == ["a"]
    assert batch["rng"].random() == first
    assert torch.equal(torch.rand(2, generator=generator), drawn)
    assert copied["lock"] is lock
    assert copied["teacher"] is teacher
    assert list(copied["iterator"]) == [0, 1]


def test_a_users_own_deepcopy_is_honoured():
    class Graph:
        def __init__(self, x):
            self.x = x
            self.me = [self]
            self.copies = 0

        def __deepcopy__(self, memo):
            new = Graph(memo[id(self.x)])
            new.copies = self.copies + 1
            return new

    graph = Graph(ones().requires_grad_() * 2)
    copied = copy_batch([graph])[0]
    assert copied.copies == 1
    assert copied.me[0] is copied
    assert torch.equal(copied.x, graph.x)
    assert copied.x is not graph.x
