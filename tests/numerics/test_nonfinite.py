from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.numerics.counting import DeviceCounts, count, count_there, merged
from ampdoctor.numerics.tensors import (
    E2M1_PAIRS,
    describe,
    extremes,
    extremes_of_all,
    extremes_of_each,
    nonfinite_counts,
    to_host,
)
from tests.numerics.data import DTYPES, tensors

any_tensor = st.sampled_from(DTYPES).flatmap(tensors)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def fires(tensor: torch.Tensor) -> bool:
    for flag in extremes(tensor):
        assert flag.shape == ()
        assert flag.device == tensor.device
        assert flag.grad_fn is None
    each, together = to_host([extremes(tensor)]), to_host(extremes_of_all([torch.ones(2), tensor]))
    fired = [any(not math.isfinite(end) for ends in pairs for end in ends) for pairs in (each, together)]
    assert fired[0] is fired[1]
    return fired[0]


@given(any_tensor)
def test_the_flag_fires_exactly_where_something_is_non_finite(tensor):
    assert fires(tensor) == bool((~tensor.double().isfinite()).any())


@given(any_tensor)
def test_counts_and_ranges_are_exact(tensor):
    values = tensor.double()
    finite = values[values.isfinite()]
    nans, pos_infs, neg_infs = nonfinite_counts(tensor)
    assert nans == int(values.isnan().sum())
    assert pos_infs == int((values == math.inf).sum())
    assert neg_infs == int((values == -math.inf).sum())
    stats = describe(tensor)
    assert stats.nonfinite == nans + pos_infs + neg_infs
    assert stats.finite_min == (finite.min().item() if finite.numel() else None)
    assert stats.finite_max == (finite.max().item() if finite.numel() else None)
    assert stats.finite_amax == (finite.abs().max().item() if finite.numel() else None)
    assert (stats.shape, stats.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def test_each_of_several_tensors_is_as_if_alone():
    bad = torch.tensor([1.0, math.nan])
    several = [
        torch.randn(3, 4).t(),
        bad,
        torch.nested.nested_tensor([bad, torch.ones(3)], layout=torch.jagged),
        torch.tensor([-math.inf, 2.0]).half(),
        torch.arange(3),
    ]
    for some in (several, several[2:3], []):
        alone = [tuple(map(repr, extremes(tensor))) for tensor in some]
        assert [tuple(map(repr, pair)) for pair in extremes_of_each(some)] == alone


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 99_999])
def test_one_bad_element_among_many_is_found(dtype, value, position):
    tensor = torch.ones(100_000, dtype=dtype)
    assert not fires(tensor)
    tensor[position] = value
    assert fires(tensor)
    assert fires(tensor.reshape(100, 1000).t())
    assert fires(tensor[position::3])


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_whose_sum_is_not_do_not_fire(dtype):
    mask = torch.full((64, 64), torch.finfo(dtype).min, dtype=dtype)
    assert not mask.sum().isfinite()
    assert not fires(mask)
    mask[:32] = torch.finfo(dtype).max
    assert not fires(mask)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_sparse_bsc((2, 2)),
        lambda t: torch.nested.nested_tensor([t, t[:2]]),
        lambda t: torch.nested.nested_tensor([t, t[:2]], layout=torch.jagged),
        lambda t: torch.complex(t, torch.zeros_like(t)),
        lambda t: torch.complex(torch.zeros_like(t), t).conj(),
        lambda t: torch.complex(torch.zeros_like(t), t).conj().imag,
        torch.nn.Parameter,
        lambda t: t.to(torch.float8_e5m2),
        lambda t: t.to_mkldnn(),
    ],
)
def test_every_kind_of_tensor_has_its_path(make):
    base = torch.zeros(4, 4)
    base[0, 1], base[2, 3] = 2.0, 3.0
    assert not fires(make(base))
    assert nonfinite_counts(make(base)) == (0, 0, 0)
    assert describe(make(base)).finite_amax == 3.0
    base[2, 3] = math.nan
    assert fires(make(base))
    assert nonfinite_counts(make(base)) == (1, 0, 0)
    assert describe(make(base)).finite_amax == 2.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.empty(0, dtype=torch.float8_e4m3fn),
        *(torch.zeros(3, dtype=torch.uint8).view(pairs) for pairs in E2M1_PAIRS),
    ],
)
def test_what_cannot_be_non_finite_does_not_fire(tensor):
    assert not fires(tensor)
    assert nonfinite_counts(tensor) == (0, 0, 0)
    assert nonfinite_counts(tensor.to("meta")) == (0, 0, 0)


class _Seen:
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def _called(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _SeenFunctions(_Seen, TorchFunctionMode):
    __torch_function__ = _Seen._called


class _SeenOps(_Seen, TorchDispatchMode):
    __torch_dispatch__ = _Seen._called


@pytest.mark.parametrize("look", [extremes, nonfinite_counts, describe, count])
def test_no_trace_sees_it(look):
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    targets = [torch.ones(3, requires_grad=True), torch.ones(3).half(), torch.ones(3, dtype=torch.complex64), ragged]
    with _SeenFunctions() as functions, _SeenOps() as ops:
        for target in targets:
            look(target)
    assert [f for f in functions.seen if "aminmax" in str(f) or "bincount" in str(f)] == []
    assert ops.seen == []
    with _SeenFunctions() as functions, _SeenOps() as ops:
        torch.ones(3).aminmax()
    assert functions.seen  # the modes do see what is not hidden
    assert ops.seen


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_autograd_and_default_device_leave_it_alone(dtype):
    tensor = torch.full((8,), 65504.0 if dtype == torch.float16 else 1e38, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        flag = extremes(tensor)[1]
        assert torch.is_autocast_enabled("cpu")
    assert flag.dtype == dtype
    assert not flag.requires_grad
    with torch.device("meta"):
        assert extremes(torch.ones(3, device="cpu"))[1].item() == 1.0
        assert count(torch.ones(3, device="cpu")).numel == 3
    assert (tensor * 2).requires_grad  # the guards are gone


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_is_not_waited_for(dtype):
    with FakeTensorMode():
        tensor = torch.empty(100, 3, device="cuda", dtype=dtype)
        with pytest.raises(DataDependentOutputException):  # such a device raises when it is waited for
            torch.empty(3, device="cuda").sum().item()
        with pytest.raises(DynamicOutputShapeException):
            torch.bincount(torch.empty(3, device="cuda", dtype=torch.int64))
        assert extremes(tensor)[0].device.type == "cuda"
        assert isinstance(merged(count_there(tensor), count_there(tensor.t())), DeviceCounts)
    assert extremes(tensor)[0].device.type == "cuda"  # also outside of the mode
