from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutput

from ampdoctor.precision.casting import cast_up, map_tensors

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - as users write them
H = torch.ones(2, dtype=torch.float16)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    name: str


class Encoding(UserDict):
    pass


def test_every_container_keeps_its_type():
    values = [[H], (H, 1), Pair(H, "x"), {"a": H}, OrderedDict(a=H), defaultdict(list, a=H), Batch(H, "b")]
    values += [Encoding({"a": H}), BaseModelOutput(last_hidden_state=H), {"a": [{"b": (H,)}]}]
    for value in values:
        found = []
        up = cast_up(value)
        assert type(up) is type(value)
        map_tensors(up, lambda tensor, found=found: found.append(tensor.dtype) or tensor)
        assert found == [torch.float32]
        found.clear()
        map_tensors(value, lambda tensor, found=found: found.append(tensor.dtype) or tensor)
        assert found == [torch.float16]  # the original is untouched
    assert cast_up(defaultdict(list, a=H))["new"] == []
    assert cast_up(BaseModelOutput(last_hidden_state=H)).last_hidden_state.dtype is torch.float32


def test_what_needs_no_change_is_returned_itself():
    cache = object()
    value = {"x": torch.ones(2), "cache": cache, "text": "half", "n": 3, "size": torch.Size([2])}
    assert cast_up(value) is value
    assert cast_up([value, None]) is not None


def test_only_reduced_dtypes_go_up():
    value = [torch.ones(1, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)]
    expected = [torch.float32, torch.float32, torch.float32, torch.float64, torch.int8]
    assert [tensor.dtype for tensor in cast_up(value)] == expected


def test_gradients_flow():
    x = H.clone().requires_grad_()
    cast_up({"a": x})["a"].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, dtype=torch.float16))
