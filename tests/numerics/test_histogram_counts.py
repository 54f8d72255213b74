from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.errors import UsageError
from ampdoctor.numerics import counting
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from tests.numerics.data import DTYPES, HALF, WIDE, brute_counts, close_tensors, finite_magnitudes, tensors

any_tensor = st.sampled_from(DTYPES).flatmap(tensors)


def check(histogram: Histogram, tensor: torch.Tensor) -> None:
    values, magnitudes = tensor.double(), finite_magnitudes(tensor)
    np.testing.assert_array_equal(histogram.counts, brute_counts(tensor))
    assert histogram.numel == tensor.numel()
    assert histogram.zeros == int((values == 0).sum())
    assert histogram.nans == int(values.isnan().sum())
    assert histogram.pos_infs == int((values == math.inf).sum())
    assert histogram.neg_infs == int((values == -math.inf).sum())
    assert histogram.amax == (magnitudes.max() if magnitudes.size else None)
    assert histogram.amin == (magnitudes.min() if magnitudes.size else None)


@given(any_tensor)
def test_counts_and_extremes_are_brute_force(tensor):
    check(count(tensor), tensor)


@given(st.sampled_from(HALF).flatmap(tensors))
def test_the_table_of_16_bit_patterns_counts_the_same(tensor):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_SMALL_FOR_A_TABLE", 0)
        check(count(tensor), tensor)


@given(st.sampled_from(WIDE).flatmap(close_tensors), st.sampled_from([7, 1000]))
def test_pieces_of_about_as_many_bins_as_a_byte_holds(tensor, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "CHUNK", chunk)
        check(count(tensor), tensor)


@given(any_tensor)
def test_the_device_kernel_counts_the_same(tensor):
    on_device = counting.device_counts(tensor).fetch()
    check(on_device, tensor)
    assert on_device == count(tensor)


@given(any_tensor, any_tensor)
def test_merging_is_counting_both(first, second):
    merged = count(first) + count(second)
    assert merged == count(second) + count(first)
    on_device = counting.device_counts(first) + counting.device_counts(second)
    assert on_device.fetch() == merged
    assert counting.merged(counting.device_counts(first), count(second)) == merged
    if first.dtype == second.dtype:
        joined = torch.cat([first.view(integer_of(first)), second.view(integer_of(second))]).view(first.dtype)
        assert merged == count(joined)
    else:
        np.testing.assert_array_equal(merged.counts, brute_counts(first) + brute_counts(second))
        assert merged.significand_bits == max(count(first).significand_bits, count(second).significand_bits)


def integer_of(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]


def test_fp64_beyond_fp32_is_finite_and_in_the_end_bins():
    histogram = count(torch.tensor([1e300, -1e-310, 5e-324, 1.0], dtype=torch.float64))
    assert (histogram.amax, histogram.amin) == (1e300, 5e-324)
    assert histogram.counts[2040] == 1
    assert histogram.counts[0] == 2
    assert histogram.pos_infs == 0
    assert histogram.overflowed("bf16") == 0.25
    assert histogram.overflowed("fp32") == 0.25
    assert histogram.flushed("fp32") >= 0.25
    assert histogram.flushed("fp16") == 0.5


def test_shapes_and_strides_do_not_matter():
    base = torch.randn(6, 5, 4)
    expected = count(base)
    for view in (base.permute(2, 0, 1), base.flip(0), base.transpose(0, 1), base[None], base.reshape(-1, 1)):
        assert count(view) == expected
    check(count(base[::2, 1:, ::3]), base[::2, 1:, ::3])
    check(count(torch.tensor(3.0).expand(4, 5)), torch.full((4, 5), 3.0))
    check(count(torch.tensor(-2.5)), torch.tensor([-2.5]))
    half = torch.randn(7, 9).half()
    assert count(half.t()) == count(half)
    assert count(half[:, ::2]) == count(half[:, ::2].clone())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_layouts_count_what_they_do_not_store_as_zero():
    dense = torch.zeros(8, 8)
    dense[1, 2], dense[3, 4], dense[5, 5] = 1.5, -2.0, math.nan
    for sparse in (
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ):
        assert count(sparse) == count(dense)
    twice = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert count(twice) == count(torch.tensor([3.0, 0.0, 0.0]))


def test_other_kinds_of_tensors():
    values = torch.randn(6)
    complex_ = torch.complex(values[:3], values[3:])
    assert count(complex_) == count(values)
    assert count(complex_.conj()) == count(values)
    assert count(complex_.conj().imag) == count(values[3:])
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    everything = count(parts[0]) + count(parts[1])
    assert count(torch.nested.nested_tensor(parts, layout=torch.jagged)) == everything


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.arange(3), "needs floating-point elements, not torch.int64"),
        (torch.tensor([True]), "needs floating-point elements, not torch.bool"),
        (torch.empty(3, device="meta"), "a meta tensor has no values"),
    ],
)
def test_what_cannot_be_counted_is_refused(tensor, sentence):
    with pytest.raises(UsageError, match=sentence):
        count(tensor)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("small_for_a_table", [0, 100])
@pytest.mark.parametrize("thread_count", [1, 2])
def test_special_values_in_several_chunks(dtype, small_for_a_table, thread_count, threads, monkeypatch):
    threads(thread_count)
    monkeypatch.setattr(counting, "CHUNK", 5)
    monkeypatch.setattr(counting, "MIN_CHUNK", 5)
    monkeypatch.setattr(counting, "_SMALL_FOR_A_TABLE", small_for_a_table)
    monkeypatch.setattr(counting, "DEVICE_CHUNK", 5)
    tensor = torch.randn(23).to(dtype)
    tensor[[0, 6, 12]] = math.inf
    tensor[[1, 22]] = -math.inf
    tensor[[2, 13, 14]] = math.nan
    tensor[15:20] = 0.0
    check(count(tensor), tensor)
    check(counting.device_counts(tensor).fetch(), tensor)
