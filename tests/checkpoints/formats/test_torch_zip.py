from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    path = tmp_path / "c.pt"
    torch.save({"model": {"w": torch.randn(4, 3), "b": torch.randn(4)}, "epoch": 3}, path)
    return path


def test_chunks_hold_each_distinct_stored_element_once(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    torch.save({"t": base.t(), "h": base[:, ::2], "e": torch.tensor([5.0]).expand(1000, 1000)}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        values = {ref.name: torch.cat([c.clone() for c in ref.stored.chunks(4)]) for ref in checkpoint}
        assert max(len(chunk) for ref in checkpoint if ref.name == "t" for chunk in ref.stored.chunks(4)) == 4
    assert sorted(values["t"].tolist()) == base.flatten().tolist()
    assert sorted(values["h"].tolist()) == base[:, ::2].flatten().tolist()
    assert values["e"].tolist() == [5.0]


def test_tied_weights_stay_one_tensor(tmp_path):
    shared = torch.randn(3, 2)
    torch.save({"embed.weight": shared, "head.weight": shared}, tmp_path / "c.pt")
    model = load_state(tmp_path / "c.pt").model
    assert model["embed.weight"] is model["head.weight"]


def test_records_in_another_order_keep_their_tensors(tmp_path):
    """A zip unpacked and packed again: torch.load(mmap=True) or positions computed from the order would mix them up."""
    state = {f"w{number}": torch.full((4,), float(number)) for number in range(12)}
    torch.save(state, tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as old, zipfile.ZipFile(tmp_path / "z.pt", "w") as new:
        for name in sorted(old.namelist(), reverse=True):
            new.writestr(name, old.read(name))
    loaded = load_state(tmp_path / "z.pt").model
    assert {name: float(tensor[0]) for name, tensor in loaded.items()} == {n: float(t[0]) for n, t in state.items()}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_format_before_zip_is_known_at_every_protocol(tmp_path, protocol):
    old = {"_use_new_zipfile_serialization": False, "pickle_protocol": protocol}
    torch.save({"w": torch.ones(3)}, tmp_path / "c.pt", **old)
    assert load_state(tmp_path / "c.pt").model["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_file_saved_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=before)
    model = load_state(tmp_path / "c.pt").model
    assert model["w"].tolist() == [1.0, 1.0, 1.0]


def zipped(*names):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return target.getvalue()


LEGACY = b"\x80\x02" + bytes.fromhex("8a0a6cfc9c46f9206aa85019") + b"."


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-LFS"),
        (b"\0" * 4096, "zeros only"),
        (b"abc", "truncated"),
        (LEGACY + b"rest of it", "cut off"),
        (pickle.dumps({"a": 1}, protocol=4), "bare pickle"),
        (b"x" * 257 + b"ustar\x0000" + b"\0" * 500, "tar file"),
        (b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 20, "HDF5"),
        (zipped(), "empty zip"),
        (zipped("m/data.pkl", "m/code/__torch__.py", "m/constants.pkl"), "TorchScript"),
        (zipped("a.npy"), r"not written by torch\.save"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "gzip"),
        (b"just some text in a file", "not a checkpoint in a format"),
        (b'{"a": 1}', "not the index"),
        (b'{"a": 1', "not valid JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a zip has the time of its making in it
)
def test_each_other_content_has_its_own_sentence(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)  # the extension must not matter
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_big_endian_file_is_refused(saved, tmp_path):
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "z.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(CheckpointError, match="big-endian"):
        open_checkpoint(tmp_path / "z.pt")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "quantised"),
        (lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8), "quant"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
    ],
    ids=["quantised", "per-channel", "nested", "meta", "sparse"],
)
@pytest.mark.filterwarnings("ignore")  # torch's own, on prototypes and on what it deprecates
def test_a_tensor_of_a_kind_that_is_not_read_is_named_and_the_rest_is_read(make, reason, tmp_path):
    weight = torch.tensor([1.5, -2.0])
    torch.save({"model": {"before": weight, "odd": make(), "after": weight + 1}}, tmp_path / "c.pt")
    state = load_state(tmp_path / "c.pt")
    assert [skip.what for skip in state.skipped] == ["model.odd"]
    assert reason in state.skipped[0].reason
    assert {name: tensor.tolist() for name, tensor in state.model.items()} == {
        "before": [1.5, -2.0],
        "after": [2.5, -1.0],
    }
