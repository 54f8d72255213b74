"""The reader of torch.distributed.checkpoint against torch's own, and against files that lie."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from ampdoctor.checkpoints import dcp as reader
from ampdoctor.checkpoints.dcp import MAX_NOTES
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError, LimitExceededError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FIXTURES = Path(__file__).parents[4] / "fixtures" / "checkpoints"
DATA = "__0_0.distcp"
ONE, NAN = torch.ones(4), torch.full((4,), float("nan"))
EXEC = {"builtins.exec", "__builtin__.exec"}


def save(folder, state, **more):
    dcp.save(state, checkpoint_id=folder, no_dist=True, **more)
    return folder


def plain(folder):
    """Save a small model in one file."""
    return save(folder / "c", {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "step": 3})


def metadata(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder, change):
    """Change a checkpoint's own metadata and write it again."""
    told = metadata(folder)
    change(told)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return folder


def place(told, name, **changes):
    for index, info in told.storage_data.items():
        if index.fqn == name:
            told.storage_data[index] = dataclasses.replace(info, **changes)


def split(folder, name, pieces, *, into=DATA):
    """Store a tensor in pieces (offsets, sizes) as ranks would: appended to a file, and told of in the metadata."""
    told = metadata(folder)
    whole = load_state(folder).model[name.removeprefix("model.")]
    entry = told.state_dict_metadata[name]
    told.storage_data = {k: v for k, v in told.storage_data.items() if k.fqn != name}
    chunks = []
    with (folder / into).open("ab") as file:
        for number, (at, sizes) in enumerate(pieces):
            begin = file.tell()
            torch.save(whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))].clone(), file)
            told.storage_data[MetadataIndex(name, at, number)] = _StorageInfo(into, begin, file.tell() - begin)
            chunks.append(ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)))
    told.state_dict_metadata[name] = TensorStorageMetadata(entry.properties, entry.size, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    return whole


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def test_nested_state_comes_back_as_it_was(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = save(tmp_path / "c", {"net": model.state_dict(), "optim": optimizer.state_dict(), "iteration": 12})
    found = load_state(folder)
    assert found.global_step == 12
    assert found.optimizer["param_groups"] == optimizer.state_dict()["param_groups"]
    for number, state in optimizer.state_dict()["state"].items():
        assert {k: float(v.sum()) for k, v in found.optimizer["state"][number].items()} == {
            k: float(v.sum()) for k, v in state.items()
        }
    with open_checkpoint(folder) as checkpoint:
        assert {(ref.name, ref.entry) for ref in checkpoint if ref.role == "moment"} == {
            (name, entry) for name in ("weight", "bias") for entry in ("exp_avg", "exp_avg_sq")
        }


def test_an_optimizer_without_state_keeps_its_groups(tmp_path):
    optimizer = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    folder = save(tmp_path / "c", {"model": {"w": torch.ones(2)}, "optimizer": optimizer.state_dict()})
    assert load_state(folder).optimizer == optimizer.state_dict()


def test_tensors_in_objects_are_read(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    folder = save(tmp_path / "c", {"model": {"w": torch.full((2,), 7.0)}, "step": 5}, planner=planner)
    found = load_state(folder)
    assert found.model["w"].tolist() == [7.0, 7.0]
    assert found.global_step == 5


@pytest.mark.parametrize(
    "path", ["../x.distcp", "/etc/passwd", "a/b.distcp", "..", "", "C:x", "x\0", "a\\b", "http://x", 5, None, ["a"]]
)
def test_paths_that_are_no_plain_names_are_refused(tmp_path, path):
    folder = rewrite(plain(tmp_path), lambda told: place(told, "model.a", relative_path=path))
    with pytest.raises(CheckpointError, match="shard"):
        open_checkpoint(folder)


def placed(**changes):
    return lambda told: place(told, "model.a", **changes)


def planned(*path):
    return lambda told: told.planner_data.update({"model.a": path})


def inside_itself(told):
    told.state_dict_metadata["loop"] = told
    chunks = told.state_dict_metadata["model.b"].chunks
    chunks.append(chunks)


def many_pieces(told):
    entry = told.state_dict_metadata["model.b"]
    entry.chunks *= 30
    told.state_dict_metadata |= {f"model.{n}": entry for n in range(100)}


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (placed(offset=-1), CheckpointError, "place of 'model.a' is malformed"),
        (placed(length=-5), CheckpointError, "place of 'model.a' is malformed"),
        (placed(offset=2**70), CheckpointError, "place of 'model.a' is malformed"),
        (placed(length=1.5), CheckpointError, "place of 'model.a' is malformed"),
        (placed(offset=True), CheckpointError, "place of 'model.a' is malformed"),
        (placed(offset=0), CheckpointError, "share bytes"),
        (inside_itself, CheckpointError, r"a piece of .model\.b. is malformed"),
        (many_pieces, LimitExceededError, "pieces of tensors"),
        (planned(*("x",) * 5000), LimitExceededError, "nesting"),
        (planned("model"), CheckpointError, "another entry"),
        (planned("step", "x"), CheckpointError, "another entry"),
        (planned("model", "b"), CheckpointError, "another entry"),
        (planned("model", "b", "c"), CheckpointError, "another entry"),
    ],
)
def test_metadata_that_cannot_be_are_refused(tmp_path, monkeypatch, change, error, sentence):
    monkeypatch.setattr(reader, "MAX_PIECES", 1000)
    with pytest.raises(error, match=sentence):
        open_checkpoint(rewrite(plain(tmp_path), change))


@pytest.mark.parametrize("changes", [{"length": 10**9}, {"offset": 10**12}])
def test_a_place_past_the_end_is_told(tmp_path, changes):
    folder = rewrite(plain(tmp_path), lambda told: place(told, "model.b", **changes))
    with open_checkpoint(folder) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["a"]
        assert [(note.what, note.kind) for note in checkpoint.errors] == [(DATA, "truncated")]


def test_metadata_cut_at_any_place_and_other_contents_are_one_sentence(tmp_path):
    folder = plain(tmp_path)
    told = (folder / ".metadata").read_bytes()
    cuts = [told[:cut] for cut in {*range(0, len(told), 37), len(told) - 1}]
    for content in (*cuts, b"hello", pickle.dumps({"a": 1}), pickle.dumps([])):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)


def test_files_that_are_not_there(tmp_path):
    folder = plain(tmp_path)
    split(folder, "model.a", [((0, 0), (1, 3)), ((1, 0), (1, 3))], into="__1_0.distcp")
    (folder / "__1_0.distcp").unlink()
    with open_checkpoint(folder) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["b"]
        (note,) = checkpoint.errors
    assert (note.what, note.kind) == ("__1_0.distcp", "missing")
    assert note.message == ".metadata puts 2 entries into this file: __1_0.distcp does not exist."
    (folder / DATA).unlink()
    with pytest.raises(CheckpointError, match=f"{DATA} does not exist"):
        open_checkpoint(folder)


def test_pieces_that_do_not_fill_their_tensor(tmp_path):
    folder = plain(tmp_path)
    split(folder, "model.a", [((0, 0), (1, 3)), ((0, 1), (2, 1)), ((1, 2), (1, 1))])
    with open_checkpoint(folder) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["b"]
        (note,) = checkpoint.errors
        assert (note.what, note.kind) == ("model.a", "unreadable")
        assert "overlap and leave a hole" in note.message


@pytest.mark.parametrize("lie", ["dtype", "shape", "swap"])
def test_what_lies_there_must_be_what_is_described(tmp_path, lie):
    def change(told):
        entry = told.state_dict_metadata["model.a"]
        if lie == "dtype":
            entry.properties.dtype = torch.int32
        elif lie == "shape":
            entry.size = torch.Size((3, 2))
            entry.chunks[0].sizes = torch.Size((3, 2))
        else:
            a, b = (next(k for k in told.storage_data if k.fqn == f"model.{n}") for n in "ab")
            told.storage_data[a], told.storage_data[b] = told.storage_data[b], told.storage_data[a]

    with open_checkpoint(rewrite(plain(tmp_path), change)) as checkpoint:
        assert "a" not in {ref.name for ref in checkpoint}
        assert "describes a piece of it as" in checkpoint.errors[0].message


def test_a_slice_that_is_no_zip(tmp_path):
    folder = plain(tmp_path)
    info = next(info for index, info in metadata(folder).storage_data.items() if index.fqn == "model.b")
    data = bytearray((folder / DATA).read_bytes())
    data[info.offset : info.offset + 8] = b"\x80\x02......"
    (folder / DATA).write_bytes(data)
    with open_checkpoint(folder) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["a"]
        assert "was not written by torch.save" in checkpoint.errors[0].message


def test_no_canary_fires(tmp_path):
    folder = plain(tmp_path)
    canary = Canary(tmp_path / "fired")

    def change(told):
        told.planner_data = canary
        told.storage_meta = {"x": canary}
        told.state_dict_metadata["evil"] = canary

    with open_checkpoint(rewrite(folder, change)) as checkpoint:
        list(checkpoint)
        assert EXEC & set(checkpoint.unsafe_globals)
    assert not (tmp_path / "fired").exists()


def test_a_canary_in_the_place_of_a_tensor_is_skipped(tmp_path):
    folder = plain(tmp_path)
    told = metadata(folder)
    with (folder / DATA).open("ab") as file:
        begin = file.tell()
        torch.save(Canary(tmp_path / "fired"), file)
        place(told, "model.a", offset=begin, length=file.tell() - begin)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with open_checkpoint(folder) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["b"]
        assert checkpoint.skipped[0].reason == "a tensor that was saved as __builtin__.exec is not read"
        assert EXEC >= set(checkpoint.unsafe_globals) != set()
    assert not (tmp_path / "fired").exists()


def test_a_list_of_any_length_is_not_made(tmp_path):
    with open_checkpoint(rewrite(plain(tmp_path), planned("model", 10**15))) as checkpoint:
        assert len(checkpoint) == 2


def test_many_bad_entries_are_counted(tmp_path):
    state = {f"w{n}": torch.ones(1) for n in range(MAX_NOTES + 5)}

    def change(told):
        for name in state:
            told.state_dict_metadata[name].properties.dtype = torch.int8

    folder = save(tmp_path / "c", {"model": {"good": torch.ones(1)}, **state})
    with open_checkpoint(rewrite(folder, change)) as checkpoint:
        assert [ref.name for ref in checkpoint] == ["good"]
        assert len(checkpoint.errors) == MAX_NOTES + 1
        assert checkpoint.errors[-1].message == "5 more entries of .metadata cannot be read."


def broken_in(folder):
    """Names of the tensors that hold a NaN."""
    with open_checkpoint(folder) as checkpoint:
        return {
            f"{r.group}:{r.name}" for r in checkpoint if r.dtype.is_floating_point and r.stored.load().isnan().any()
        }


@pytest.mark.parametrize("inner", ["optimizer_0", "pytorch_model_fsdp_0"])
def test_a_save_that_was_interrupted_is_incomplete(tmp_path, inner):
    saved = next((FIXTURES / "accelerate_fsdp2").rglob(inner)).parent
    folder = shutil.copytree(saved, tmp_path / "c")
    (folder / inner / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="missing: nothing says what lies in"):
        open_checkpoint(folder / inner)
    with open_checkpoint(folder) as checkpoint:
        (error,) = checkpoint.errors
        assert len(list(checkpoint)) > 0
    assert (error.what, error.kind) == (f"{inner}/.metadata", "missing")
    assert "interrupted" in error.message


def test_a_data_file_that_the_metadata_leave_out_is_remarked(tmp_path):
    folder = save(tmp_path / "c", {"w": ONE})
    shutil.copy(folder / DATA, folder / "__1_0.distcp")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.errors == ()
        assert checkpoint.remarks == (".metadata puts nothing into __1_0.distcp: not part of this checkpoint",)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer.state.w.exp_avg": ONE, "optimizer.state.exp_avg.w": NAN},
        {"optimizer.state.exp_avg.w": NAN, "optimizer.state.w.exp_avg": ONE},
    ],
)
def test_two_entries_of_one_place_in_an_optimizer_are_refused(tmp_path, values):
    with pytest.raises(CheckpointError, match="claims the place of another entry"):
        open_checkpoint(save(tmp_path / "c", {"w": ONE, **values}))


@pytest.mark.parametrize(
    "names",
    [
        ("optimizer.state.fp32_param.w", "optimizer.state.param.w"),
        ("optimizer.state.fp32_param.w", "chained_0.optimizer.state.fp32_param.w"),
        ("fp32.w", "optimizer.state.fp32_param.w"),
    ],
)
@pytest.mark.parametrize("sick", [0, 1])
def test_no_master_copy_hides_another(tmp_path, names, sick):
    copies = {name: NAN if number == sick else ONE for number, name in enumerate(names)}
    assert broken_in(save(tmp_path / "c", {"w": torch.ones(9), **copies}))
