from __future__ import annotations

import argparse
import math
import os
import pathlib
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError, LimitExceededError


def rewrite(
    source: Path,
    target: Path,
    *,
    compression: int = zipfile.ZIP_STORED,
    change=lambda name, data: data,
    repeat: str = "",
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
        if repeat:
            new.writestr(next(n for n in old.namelist() if n.endswith(repeat)), b"other")


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    path = tmp_path / "c.pt"
    torch.save({"model": {"w": torch.randn(4, 3), "b": torch.randn(4)}, "epoch": 3}, path)
    return path


def test_every_tensor_equals_torch_loads(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "plain": base.clone(),
        "transposed": base.t(),
        "holes": base[:, ::2],
        "window": base[1:3],
        "expanded": torch.tensor([5.0]).expand(3, 4),
        "scalar": torch.tensor(7.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "half": torch.randn(5).half(),
        "int": torch.arange(5),
        "flag": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(base.clone()),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    torch.save(state, tmp_path / "c.pt")
    expected = torch.load(tmp_path / "c.pt", weights_only=True)
    loaded = load_state(tmp_path / "c.pt").model
    assert loaded is not None
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype is tensor.dtype, name
        assert loaded[name].stride() == tensor.stride(), name
        assert torch.equal(
            loaded[name].flatten().contiguous().view(torch.uint8),
            tensor.detach().flatten().contiguous().view(torch.uint8),
        ), name


def test_chunks_hold_each_distinct_stored_element_once(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    torch.save({"t": base.t(), "h": base[:, ::2], "e": torch.tensor([5.0]).expand(1000, 1000)}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        values = {ref.name: torch.cat([c.clone() for c in ref.stored.chunks(4)]) for ref in checkpoint}
    assert sorted(values["t"].tolist()) == base.flatten().tolist()
    assert sorted(values["h"].tolist()) == base[:, ::2].flatten().tolist()
    assert values["e"].tolist() == [5.0]


def test_tied_weights_stay_one_tensor(tmp_path):
    shared = torch.randn(3, 2)
    torch.save({"embed.weight": shared, "head.weight": shared}, tmp_path / "c.pt")
    model = load_state(tmp_path / "c.pt").model
    assert model is not None
    assert model["embed.weight"] is model["head.weight"]


class _Canary:
    def __reduce__(self):
        return os.system, ("touch " + os.environ.get("AMPDOCTOR_CANARY", "/nonexistent/canary"),)


def test_an_object_that_would_run_code_is_named_and_left_alone(tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    monkeypatch.setenv("AMPDOCTOR_CANARY", str(canary))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"model": {"w": torch.ones(2)}, "x": _Canary()}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert checkpoint.unsafe_globals == ("posix.system",)
        assert [float(ref.stored.load().sum()) for ref in checkpoint] == [2.0]
    assert not canary.exists()


def test_a_harmless_object_beside_the_weights_does_not_hide_them(tmp_path):
    content = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1.0, at=pathlib.PurePosixPath("x"))}
    torch.save(content, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert checkpoint.unsafe_globals == ("argparse.Namespace", "pathlib.PurePosixPath")
        assert [ref.name for ref in checkpoint] == ["w"]


def test_tensors_inside_an_object_of_any_class_are_found(tmp_path):
    content = {"model": {"w": torch.ones(2)}, "args": argparse.Namespace(best=[torch.full((3,), math.nan)])}
    torch.save(content, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert {ref.name: ref.role for ref in checkpoint} == {"w": "weight", "args.best.0": "other"}


def test_a_whole_module_tells_its_own_names_and_buffers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    model.register_buffer("weights_of_classes", torch.ones(3))
    torch.save({"model": model, "step": 4}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        roles = {ref.name: ref.role for ref in checkpoint}
        assert roles == {name: "weight" for name, _ in model.named_parameters()} | {
            name: "buffer" for name, _ in model.named_buffers()
        }
        assert all(torch.equal(ref.stored.load(), model.state_dict()[ref.name]) for ref in checkpoint)


def test_compressed_records_are_refused(saved, tmp_path):
    rewrite(saved, tmp_path / "z.pt", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        open_checkpoint(tmp_path / "z.pt")


def test_a_record_shorter_than_its_tensor_is_refused(saved, tmp_path):
    rewrite(saved, tmp_path / "z.pt", change=lambda name, data: data[:-4] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="record has another length"):
        open_checkpoint(tmp_path / "z.pt")


def test_records_in_another_order_keep_their_tensors(tmp_path):
    """A zip unpacked and packed again: torch.load(mmap=True) or positions computed from the order would mix them up."""
    state = {f"w{number}": torch.full((4,), float(number)) for number in range(12)}
    torch.save(state, tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt") as old, zipfile.ZipFile(tmp_path / "z.pt", "w") as new:
        for name in sorted(old.namelist(), reverse=True):
            new.writestr(name, old.read(name))
    loaded = load_state(tmp_path / "z.pt").model
    assert loaded is not None
    assert {name: float(tensor[0]) for name, tensor in loaded.items()} == {n: float(t[0]) for n, t in state.items()}


def test_a_wrong_checksum_of_the_structure_is_refused(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    data[data.index(b"epoch")] ^= 1
    (tmp_path / "z.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        open_checkpoint(tmp_path / "z.pt")


def test_a_file_saved_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=before)
    model = load_state(tmp_path / "c.pt").model
    assert model is not None
    assert model["w"].tolist() == [1.0, 1.0, 1.0]


def test_two_records_of_one_name_are_refused(saved, tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(saved, tmp_path / "z.pt", repeat="data/0")
    with pytest.raises(CheckpointError, match="same name"):
        open_checkpoint(tmp_path / "z.pt")


def test_a_local_header_that_contradicts_the_directory_is_refused(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    at = data.index(b"data/0")  # the first occurrence is the local header's
    data[at : at + 6] = b"data/9"
    (tmp_path / "z.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="contradicts"):
        open_checkpoint(tmp_path / "z.pt")


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
def test_a_truncated_zip_is_one_sentence(saved, tmp_path, keep):
    data = saved.read_bytes()
    (tmp_path / "z.pt").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match="truncated or corrupted"):
        open_checkpoint(tmp_path / "z.pt")


def test_no_single_flipped_byte_of_the_structure_escapes_as_another_exception(saved, tmp_path):
    original = saved.read_bytes()
    path = tmp_path / "z.pt"
    for position in range(0, len(original), 7):
        damaged = bytearray(original)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:
            with open_checkpoint(path) as checkpoint:
                for ref in checkpoint:
                    ref.stored.load()
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017 - refusing is one of two right answers


def test_torchscript_is_refused_as_a_program(tmp_path):
    with zipfile.ZipFile(tmp_path / "s.pt", "w") as archive:
        for name in ("m/data.pkl", "m/code/__torch__.py", "m/constants.pkl"):
            archive.writestr(name, b"x")
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(tmp_path / "s.pt")


def test_another_zip_is_not_taken_for_a_checkpoint(tmp_path):
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive:
        archive.writestr("a.npy", b"x")
    with pytest.raises(CheckpointError, match=r"not written by torch\.save"):
        open_checkpoint(tmp_path / "s.npz")


def test_a_huge_pickle_is_refused_before_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("c/data.pkl", b"\x80\x02" + b"\0" * (64 * 1024 * 1024))
    with pytest.raises(LimitExceededError, match=r"data\.pkl"):
        open_checkpoint(tmp_path / "c.pt")


def test_deep_nesting_is_refused(tmp_path):
    tree: object = torch.ones(1)
    for _ in range(300):
        tree = [tree]
    torch.save({"x": tree}, tmp_path / "c.pt")
    with pytest.raises(LimitExceededError, match="nesting"):
        open_checkpoint(tmp_path / "c.pt")


def test_a_container_that_holds_itself_is_refused(tmp_path):
    ring: list[object] = [torch.ones(1)]
    ring.append(ring)
    torch.save({"x": ring}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="contains itself"):
        open_checkpoint(tmp_path / "c.pt")


def test_a_sparse_tensor_is_a_typed_skip_and_its_values_are_read(tmp_path):
    torch.save({"model": {"w": torch.ones(2), "s": torch.eye(3).to_sparse()}}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        assert [ref.name for ref in checkpoint] == ["w", "model.s.values"]
        assert [s.what for s in checkpoint.skipped] == ["model.s"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    torch.save({"w": torch.zeros(1_000_000)}, tmp_path / "c.pt")
    with open_checkpoint(tmp_path / "c.pt") as checkpoint:
        os.truncate(tmp_path / "c.pt", 5000)
        with pytest.raises(CheckpointError, match="changed while"):
            list(next(iter(checkpoint)).stored.chunks())


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
        (b"PK\x05\x06" + b"\0" * 18, "empty zip"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0", "gzip"),
        (b"just some text in a file", "not a checkpoint in a format"),
        (b'{"a": 1}', "not the index"),
        (b'{"a": 1', "not valid JSON"),
    ],
)
def test_each_other_content_has_its_own_sentence(tmp_path, content, says):
    (tmp_path / "model.safetensors").write_bytes(content)  # the extension must not matter
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path / "model.safetensors")


def test_the_legacy_format_is_read_as_torch_reads_it(tmp_path):
    model = torch.nn.Linear(3, 2)
    shared = torch.arange(12.0)
    content = {"model": model.state_dict(), "tied": [shared[2:5], shared.view(3, 4).t()], "step": 7}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    loaded = torch.load(tmp_path / "old.pt", weights_only=True)
    with open_checkpoint(tmp_path / "old.pt") as checkpoint:
        assert checkpoint.global_step == 7
        ours = {ref.name: ref.stored.load() for ref in checkpoint}
    theirs = {**loaded["model"], "tied.0": loaded["tied"][0], "tied.1": loaded["tied"][1]}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_missing_and_unreadable_places_have_their_own_sentences(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothere\.pt does not exist"):
        open_checkpoint(tmp_path / "nothere.pt")
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="link to nothing"):
        open_checkpoint(tmp_path / "dangling.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint("/dev/zero")


def test_the_name_of_a_file_does_not_decide_its_format(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.safetensors")
    with open_checkpoint(tmp_path / "weights.safetensors") as checkpoint:
        assert checkpoint.format == "torch-zip"


def test_the_package_never_loosens_the_unpickler():
    package = Path(__file__).parents[3] / "ampdoctor"
    for file in package.rglob("*.py"):
        text = file.read_text()
        for forbidden in ("weights_only=False", "add_safe_globals", "pickle.load", "mmap=True,"):
            assert forbidden not in text, (file.name, forbidden)


def test_a_big_endian_file_is_refused(saved, tmp_path):
    rewrite(saved, tmp_path / "z.pt", change=lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(CheckpointError, match="big-endian"):
        open_checkpoint(tmp_path / "z.pt")


def test_a_size_that_overflows_is_refused(tmp_path):
    """numel * itemsize beyond 2^63 must not wrap around into something small."""
    torch.save({"w": torch.ones(4)}, tmp_path / "c.pt")

    def enlarge(name, data):
        return (
            data.replace(b"K\x04\x85", b"\x8a\x08" + struct.pack("<q", 2**62) + b"\x85")
            if name.endswith("data.pkl")
            else data
        )

    rewrite(tmp_path / "c.pt", tmp_path / "z.pt", change=enlarge)
    with pytest.raises(CheckpointError, match="corrupted"):
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
    assert state.model is not None
    assert {name: tensor.tolist() for name, tensor in state.model.items()} == {
        "before": [1.5, -2.0],
        "after": [2.5, -1.0],
    }
