"""Headers of safetensors: what the library refuses (S12), and what it lets pass (S13)."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as load_by_library

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.workflows.scan import scan
from tests.security import hostile as h


def entry(shape, begin, end, dtype="F32", **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


REFUSED = {
    "longer than the format allows": h.safetensors(b"{}", length=100_000_001),
    "longer than the file": h.safetensors(b"{}", length=1000),
    "length of all ones": b"\xff" * 8 + b"{}",
    "overlap": h.safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
    "the same bytes twice": h.safetensors({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
    "hole": h.safetensors({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, bytes(16)),
    "rest": h.safetensors({"a": entry([2], 0, 8)}, bytes(9)),
    "truncated": h.safetensors({"a": entry([2], 0, 8)}, bytes(7)),
    "backwards": h.safetensors({"a": entry([2], 8, 0)}, bytes(8)),
    "another size": h.safetensors({"a": entry([3], 0, 8)}, bytes(8)),
    "no offsets": h.safetensors({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "negative": h.safetensors({"a": entry([2], -8, 0)}, bytes(8)),
    "overflow": h.safetensors({"a": entry([2**63, 2], 0, 0)}),
    "product that wraps": h.safetensors({"a": entry([2**32, 2**32], 0, 0)}),
    "fraction": h.safetensors({"a": entry([1.0], 0, 4)}, bytes(4)),
    "flag": h.safetensors({"a": entry([True], 0, 4)}, bytes(4)),
    "number of thousands of digits": h.safetensors(b'{"a":{"dtype":"F32","shape":[' + b"1" * 9999 + b"]}}"),
    "NaN": h.safetensors(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "no JSON": h.safetensors(b"{'a': 1}"),
    "not UTF-8": h.safetensors(b'{"\xff":1}'),
    "half of a pair": h.safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "a list": h.safetensors(b'{"a":[]}'),
    "deeply nested": h.safetensors(b'{"a":' + b"[" * 100_000),
    "metadata of numbers": h.safetensors({"__metadata__": {"a": 1}}),
    # S13: the library lets this pass, and takes the last of the two
    "a key twice": h.safetensors(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "a field twice": h.safetensors(b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "strides that overflow": h.safetensors({"a": entry([0, 2**62, 4], 0, 0)}),
    "a name of megabytes": h.safetensors({"a" * 1_000_000: entry([1], 0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("header", REFUSED)
def test_a_lying_header_is_one_sentence(header, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(REFUSED[header])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "m.safetensors")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_empty_tensor_may_be_as_long_as_it_likes(tmp_path):
    """S13."""
    content = h.safetensors({"a": entry([0, 2**62], 0, 0), "w": entry([1], 0, 4)}, struct.pack("<f", 1))
    (tmp_path / "m.safetensors").write_bytes(content)
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert {ref.name: tuple(ref.stored.load().shape) for ref in checkpoint} == {"a": (0, 2**62), "w": (1,)}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "U4", "X9", "\x1b[2J"])
def test_a_dtype_that_is_not_read_is_skipped_by_name(dtype, tmp_path):
    """S13: formats of less than a byte; the rest of the file is read."""
    content = h.safetensors({"a": entry([2], 0, 1, dtype), "w": entry([1], 1, 5)}, b"\1" + struct.pack("<f", 1))
    (tmp_path / "m.safetensors").write_bytes(content)
    report = scan(tmp_path / "m.safetensors")
    assert [skip.what for skip in report.skipped] == ["a"]
    assert "is not one that is read" in report.skipped[0].reason


def test_more_tensors_than_any_model_has_are_refused(tmp_path):
    """S13: an entry takes some hundred bytes here and some thousand in a scan."""
    parts = b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(251_000))
    (tmp_path / "m.safetensors").write_bytes(h.safetensors(b"{" + parts + b"}"))
    with pytest.raises(LimitExceededError):
        open_checkpoint(tmp_path / "m.safetensors")


SMALL = st.integers(-1, 9) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F64", "F4", "Z"]),
        "shape": st.lists(SMALL, max_size=3),
        "data_offsets": st.lists(SMALL, min_size=1, max_size=3),
    }
)
HEADER = st.dictionaries(st.sampled_from(["a", "b", "w.0", "__metadata__", "\x1b", "é"]), ENTRY, max_size=3)


@given(HEADER, st.integers(0, 24))
def test_what_we_read_is_what_the_library_reads(tmp_path_factory, header, size):
    """S12: the library is the oracle: what it refuses is refused here, and what both accept is the same."""
    data = bytes(range(size))
    content = h.safetensors(header, data)
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    path.write_bytes(content)
    try:
        with open_checkpoint(path) as checkpoint:
            ours = {ref.name: ref.stored.load() for ref in checkpoint}
    except CheckpointError:
        return
    try:
        theirs = load_by_library(content)
    except (SafetensorError, KeyError, RuntimeError) as error:
        skipped = {e["dtype"] for e in header.values()} & {"F4", "Z"}
        assert skipped, f"only the library refuses it: {error}"  # noqa: PT017
        return
    assert {name for name in theirs if header[name]["dtype"] != "F4"} == ours.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert torch.equal(tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8))
