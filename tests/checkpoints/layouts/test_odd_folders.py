"""Folders that are not as a trainer left them: links in circles, files under other names, shards nobody lists."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError
from ampdoctor.workflows import scan as scan_workflow
from ampdoctor.workflows.scan import scan
from ampdoctor.workflows.scan_against import compare

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
