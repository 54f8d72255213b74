from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.workflows import scan as scan_workflow
from ampdoctor.workflows.scan import scan
from ampdoctor.workflows.scan_against import compare


def write(folder, shards, index=None):
    for shard, names in shards.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / shard)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def name_of(number, total=3):
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def test_safetensors_sorts_names_so_only_unique_shapes_name_a_moment(tmp_path):
    """Names that sort in another order than the modules: matching by order would put b's moments on a."""
    model = torch.nn.ModuleDict(
        {"b": torch.nn.Linear(4, 4), "a": torch.nn.Linear(4, 4), "c": torch.nn.Linear(4, 2, bias=False)}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        named = {ref.name for ref in checkpoint if ref.entry == "exp_avg"}
    assert named == {"param 0", "param 1", "param 2", "param 3", "c.weight"}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([name_of(1), name_of(2), name_of(3)], []),
        ([name_of(0), name_of(1), name_of(2)], []),
        ([name_of(2), name_of(3)], [name_of(1)]),
        ([name_of(1), name_of(2)], [name_of(3)]),
        ([name_of(1, 999_999)], [name_of(2, 999_999)]),  # a number that lies costs nothing
    ],
)
def test_shards_without_an_index_are_one_model_and_a_missing_one_is_noted(tmp_path, names, missing):
    write(tmp_path, {name: [f"layer{n}.w"] for n, name in enumerate(names)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(error.kind, error.what) for error in checkpoint.errors] == [("missing", name) for name in missing]
    assert load_state(tmp_path).model.keys() == {f"layer{n}.w" for n in range(len(names))}


def test_a_tensor_in_another_shard_than_the_index_says_is_there_and_one_in_none_is_reported(tmp_path):
    first, second = name_of(1, 2), name_of(2, 2)
    write(tmp_path, {first: ["a.w", "a.b"], second: ["b.w"]}, {"a.w": second, "b.w": second, "c.w": first})
    with open_checkpoint(tmp_path / "model.safetensors.index.json") as checkpoint:
        assert [(error.kind, "'c.w'" in error.message) for error in checkpoint.errors] == [("missing_keys", True)]
        assert {ref.name for ref in checkpoint} == {"a.w", "a.b", "b.w"}  # no index names a.b


def test_a_shard_that_no_index_names_is_skipped_with_its_reason(tmp_path):
    write(tmp_path, {name_of(1, 1): ["a.w"], name_of(3): ["old"]}, {"a.w": name_of(1, 1)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert [s.what for s in checkpoint.skipped] == [name_of(3)]
        assert "old" not in {ref.name for ref in checkpoint}


def test_one_unreadable_file_beside_good_ones_is_an_error_of_the_report(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    (tmp_path / "optimizer.pt").write_bytes((tmp_path / "optimizer.pt").read_bytes()[:-100])
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(e.what, e.kind) for e in checkpoint.errors] == [("optimizer.pt", "unreadable")]
        assert "truncated" in checkpoint.errors[0].message


def test_a_huge_json_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").touch()
    with (tmp_path / "model.safetensors.index.json").open("r+b") as file:
        file.write(b"{")
        file.truncate(65 * 1024 * 1024)
    with pytest.raises(LimitExceededError):
        open_checkpoint(tmp_path / "model.safetensors.index.json")


def test_two_training_checkpoints_in_a_folder_are_scanned_apart_and_never_loaded_as_one(tmp_path):
    for step in (1, 2):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, tmp_path / f"{step}.pt"
        )
    with open_checkpoint(tmp_path) as checkpoint:
        refs = {(ref.file, ref.name, ref.entry) for ref in checkpoint if ref.role in {"weight", "moment"}}
        assert len(checkpoint.optimizers()) == 2
    assert {(f"{n}.pt", "weight", "exp_avg") for n in (1, 2)} <= refs
    with pytest.raises(CheckpointError, match=r"2 models \(1\.pt, 2\.pt\)"):
        load_state(tmp_path)


def test_the_same_weights_in_two_formats_are_one_model(tmp_path):
    model = torch.nn.Linear(3, 2)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict() | {"tied": model.weight.detach()}, tmp_path / "pytorch_model.bin")
    loaded = load_state(tmp_path).model
    assert torch.equal(loaded["weight"], model.weight)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(list(checkpoint)) == 5


def test_a_file_of_another_format_beside_a_checkpoint_is_left_out_and_alone_refused(tmp_path):
    (tmp_path / "vocab.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="bare pickle"):
        open_checkpoint(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(s.what, "bare pickle" in s.reason) for s in checkpoint.skipped] == [("vocab.pkl", True)]
        assert checkpoint.errors == ()


# -- folders that are not as a trainer left them: links in circles, files under other names

NAN = float("nan")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    save_file({"w": torch.ones(4)}, path / "model.safetensors")
    return path


def test_links_of_ranks_that_lead_in_circles_are_read_once(folder):
    for rank in range(4):
        (folder / f"mp_rank_{rank:02d}").symlink_to(".")
    other = folder / "mp_rank_04"
    other.mkdir()
    torch.save({"model": {"v": torch.tensor([NAN])}}, other / "model_optim_rng.pt")
    (other / "mp_rank_00").symlink_to("..")
    (folder / "mp_rank_05").symlink_to("mp_rank_04")
    with open_checkpoint(folder) as checkpoint:
        assert sorted(ref.name for ref in checkpoint) == ["v", "w"]
        assert sum("is read once" in remark for remark in checkpoint.remarks) == 5


@pytest.mark.parametrize("name", ["MODEL.PT", "Model.SafeTensors"])
def test_names_in_upper_case_are_read(folder, name):
    state = {"v": torch.tensor([NAN])}
    (save_file if name.endswith("s") else torch.save)(state, folder / name)
    assert scan(folder).verdict == "sick"


@pytest.mark.parametrize("name", ["model.weights", "x.pt.1", "model.safetensors~", "tf_model.h5", "last.ckpt.tmp"])
def test_what_may_hold_weights_and_is_not_read_is_named(folder, name):
    (folder / name).write_bytes(b"anything")
    (folder / "README.md").write_text("a model")
    assert [skip.what for skip in scan(folder).skipped] == [name]


@pytest.mark.parametrize("there", [True, False])
def test_a_shard_that_the_index_forgets_leaves_the_verdict_open(tmp_path, there):
    save_file({"w": torch.ones(4)}, tmp_path / "model-00001-of-00002.safetensors")
    if there:
        save_file({"v": torch.tensor([NAN])}, tmp_path / "model-00002-of-00002.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    for target in (tmp_path, index):
        report = scan(target)
        assert report.verdict == "inconclusive"
        assert ["does not list model-00002-of-00002.safetensors" in e.message for e in report.errors] == [True]


@pytest.mark.parametrize("to", ["../outside", "kept", ".", "step5", "gone"])
def test_a_pointer_to_a_link_is_not_followed(tmp_path, to):
    run = tmp_path / "run"
    for path in (tmp_path / "outside", run / "kept"):
        path.mkdir(parents=True)
        save_file({"w": torch.ones(4)}, path / "model.safetensors")
    (run / "latest").write_text("step5")
    (run / "step5").symlink_to(to)
    with pytest.raises(CheckpointError, match="latest names step5, which is a link"):
        open_checkpoint(run)


def test_a_link_to_itself_among_the_checkpoints_of_a_run_is_one_of_its_errors(tmp_path):
    for step in (100, 200):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / f"step_{step}.pt")
    (tmp_path / "step_300.pt").symlink_to("step_300.pt")
    report = scan(tmp_path)
    assert report.verdict == "inconclusive"
    assert [error.what for error in report.errors] == ["step_300.pt"]


def test_a_complex_weight_beside_a_real_one_is_not_compared(tmp_path):
    torch.save({"w": torch.ones(4), "v": torch.ones(4)}, tmp_path / "old.pt")
    torch.save({"w": torch.ones(4, dtype=torch.complex64), "v": torch.zeros(4)}, tmp_path / "new.pt")
    report = compare(tmp_path / "new.pt", tmp_path / "old.pt")
    assert [(s.what, s.reason) for s in report.skipped] == [("w", "not compared: float32 became complex64")]
    assert [row.name for row in report.change.tensors] == ["v"]


def test_a_mistake_of_ours_over_one_checkpoint_of_a_run_leaves_the_others(tmp_path, monkeypatch):
    for step in (100, 200, 300):
        torch.save({"model": {"w": torch.ones(2)}, "step": step}, tmp_path / f"step_{step}.pt")
    examine = scan_workflow.examine

    def fails(checkpoint, *rest, **keywords):
        if checkpoint.path == "step_300.pt":
            raise NotImplementedError
        return examine(checkpoint, *rest, **keywords)

    monkeypatch.setattr(scan_workflow, "examine", fails)
    report = scan(tmp_path)
    assert report.verdict == "inconclusive"
    assert ["NotImplementedError inside ampdoctor" in error.message for error in report.errors] == [True]
    assert report.target["examined"]["name"] == "step_200.pt"


def test_a_thousand_links_to_one_index_open_its_shards_once(tmp_path):
    table = {f"w{n}": f"s{n}.safetensors" for n in range(50)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    for number in range(1000):
        (tmp_path / f"n{number}.index.json").symlink_to("model.safetensors.index.json")
    save_file({"w0": torch.ones(4)}, tmp_path / "s0.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.errors) == 49
        assert len(checkpoint) == 1
