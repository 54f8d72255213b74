from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError, LimitExceededError

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_values_equal_what_the_library_wrote(tmp_path, dtype):
    generator = torch.Generator().manual_seed(3)
    values = (torch.randn(7, 5, generator=generator) * 3).to(dtype)
    save_file(
        {"a.weight": values, "b": values[0].clone(), "none": torch.empty(0, 4, dtype=dtype)}, tmp_path / "m.safetensors"
    )
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        loaded = {ref.name: ref.stored.load() for ref in checkpoint}
    assert set(loaded) == {"a.weight", "b", "none"}
    assert loaded["a.weight"].dtype is dtype
    assert torch.equal(loaded["a.weight"].view(torch.uint8), values.view(torch.uint8))
    assert loaded["none"].shape == (0, 4)


def test_chunks_cover_a_tensor_once_in_bounded_pieces(tmp_path):
    values = torch.arange(1000, dtype=torch.float32).reshape(10, 100)
    save_file({"w": values}, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        ref = next(iter(checkpoint))
        pieces = [chunk.clone() for chunk in ref.stored.chunks(64)]
    assert max(p.numel() for p in pieces) == 64
    assert torch.equal(torch.cat(pieces), values.flatten())


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\0" * 12, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, b"\0" * 20, "hole"),
        ({"a": entry([2], 8, 16)}, b"\0" * 16, "hole"),
        ({"a": entry([2], 0, 8)}, b"\0" * 4, "truncated"),
        ({"a": entry([2], 0, 8), "b": entry([1], 8, 4)}, b"\0" * 8, "ends before it begins"),
        ({"a": entry([2], 0, 8)}, b"\0" * 9, "belong to no tensor"),
        ({"a": entry([3], 0, 8)}, b"\0" * 8, "shape and dtype"),
        ({"a": entry([2], 8, 0)}, b"\0" * 8, "ends before"),
        ({"a": entry([-2], 0, 8)}, b"\0" * 8, "malformed"),
        ({"a": entry([True], 0, 4)}, b"\0" * 4, "malformed"),
        ({"a": entry([2**40, 2**40], 0, 8)}, b"\0" * 8, "shape and dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "malformed"),
        ({"a": [1]}, b"", "malformed"),
        ({"__metadata__": {"format": 1}, "a": entry([2], 0, 8)}, b"\0" * 8, "__metadata__"),
        (b'{"a":1,"a":2}', b"", "twice"),
        (b'{"a":{"dtype":"F32","dtype":"F16","shape":[0],"data_offsets":[0,0]}}', b"", "twice"),
        (b'{"a": NaN}', b"", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
        (b'{"a": ' + b"[" * 20000, b"", "not valid JSON"),
        (b'{"\xff": 1}', b"", "not valid JSON"),
    ],
)
def test_a_lying_header_is_refused_in_one_sentence(tmp_path, header, data, says):
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith("m.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", [1, 8, 500])
def test_a_header_longer_than_the_file_is_truncation(tmp_path, missing):
    write(tmp_path / "m.safetensors", b'{"a":' + b" " * (995 - missing), length=1000)
    with pytest.raises(CheckpointError, match=f"its header needs 1008 bytes and the file has {1008 - missing}"):
        open_checkpoint(tmp_path / "m.safetensors")


def test_a_header_beyond_the_formats_limit_names_limit_and_value(tmp_path):
    write(tmp_path / "m.safetensors", b"{}", length=100_000_001)
    with pytest.raises(LimitExceededError) as caught:
        open_checkpoint(tmp_path / "m.safetensors")
    assert (caught.value.limit, caught.value.actual) == (100_000_000, 100_000_001)


def test_an_unknown_dtype_is_skipped_with_its_reason_and_the_rest_is_read(tmp_path):
    path = write(tmp_path / "m.safetensors", {"q": entry([4], 0, 2, "F4"), "w": entry([2], 2, 10)}, b"\0" * 10)
    with open_checkpoint(path) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w"]
        assert [(s.what, "F4" in s.reason) for s in checkpoint.skipped] == [("q", True)]


def test_a_zero_element_shape_with_a_huge_side_is_fine(tmp_path):
    path = write(tmp_path / "m.safetensors", {"z": entry([0, 2**62], 0, 0), "w": entry([1], 0, 4)}, b"\0" * 4)
    with open_checkpoint(path) as checkpoint:
        assert {ref.name: sum(c.numel() for c in ref.stored.chunks()) for ref in checkpoint} == {"z": 0, "w": 1}


_REFERENCE = save({"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(_REFERENCE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(tmp_path, edits):
    damaged = bytearray(_REFERENCE)
    for position, value in edits:
        damaged[position] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(damaged)
    try:
        with open_checkpoint(path) as checkpoint:
            ours = {ref.name: ref.stored.load() for ref in checkpoint}
            skipped = {s.what for s in checkpoint.skipped}
    except CheckpointError:
        return
    try:
        with safe_open(path, "pt") as file:
            theirs = {name: file.get_tensor(name) for name in file.keys() if name not in skipped}  # noqa: SIM118
    except SafetensorError as error:
        if skipped:  # a dtype that neither knows: we skip the tensor with its reason, the library refuses the file
            return
        pytest.fail(f"read by us and refused by the library: {error}")
    assert {n: (t.dtype, t.shape, t.view(torch.uint8).tolist()) for n, t in ours.items()} == {
        n: (t.dtype, t.shape, t.view(torch.uint8).tolist()) for n, t in theirs.items()
    }
