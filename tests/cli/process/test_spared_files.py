"""Files that no report may be written over: what a checkpoint is made of, and the source of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.cli.main import main
from ampdoctor.errors import UsageError
from ampdoctor.evidence.paths import refuse_reading, to_be_written

INDEX, SHARDS = "model.safetensors.index.json", [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
OPTIONS = ["--output={0}", "--write-baseline={0}"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    """A model in two shards, in a folder `model`."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, shard in zip("ab", SHARDS, strict=True):
        save_file({name: torch.ones(4, 4)}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(zip("ab", SHARDS, strict=True))}))
    return folder


def refused(arguments, kept, capsys):
    before = Path(kept).read_bytes()
    assert main(arguments) == 2
    assert "it is what is to be read" in capsys.readouterr().err
    assert Path(kept).read_bytes() == before


@pytest.mark.parametrize("option", OPTIONS)
def test_no_shard_of_an_index_is_written_over(option, sharded, capsys):
    refused(["scan", f"model/{INDEX}", option.format(f"model/{SHARDS[1]}")], sharded / SHARDS[1], capsys)
    link = Path("link")
    link.symlink_to(sharded / SHARDS[0])
    refused(["scan", f"model/{INDEX}", option.format("link")], sharded / SHARDS[0], capsys)


def test_the_place_of_a_missing_shard_is_not_taken(sharded, capsys):
    (sharded / SHARDS[1]).unlink()
    assert main(["scan", f"model/{INDEX}", "--output", f"model/{SHARDS[1]}"]) == 2
    assert "it is what is to be read" in capsys.readouterr().err
    assert not (sharded / SHARDS[1]).exists()


@pytest.mark.parametrize("given", [["nowhere:make"], ["run.py:make"], ["run.py:make", "--device", "cuda:99"]])
def test_no_shard_is_written_over_by_the_report_of_a_failure_that_came_before_it(given, sharded, capsys):
    Path("run.py").write_text("def make():\n    raise ValueError('no')\n")
    shard = f"model/{SHARDS[0]}"
    refused(["bisect-nan", *given, "--checkpoint", f"model/{INDEX}", "--report", f"json={shard}"], shard, capsys)


@pytest.mark.parametrize("members", [1, 3])
def test_what_lies_elsewhere_and_is_linked_into_a_folder_is_not_written_over(members, sharded, capsys):
    log = Path("log.jsonl")
    log.write_text('{"step": 1, "loss": 1.0}\n')
    weights = Path("weights.safetensors")
    for step in range(members):
        folder = Path(f"run/checkpoint-{step}")
        folder.mkdir(parents=True)
        save_file({"a": torch.ones(4, 4)}, folder / "model.safetensors")
    save_file({"a": torch.ones(4, 4)}, weights)
    last = Path(f"run/checkpoint-{members - 1}/model.safetensors")
    last.unlink()
    last.symlink_to(weights.absolute())
    Path("run/metrics.jsonl").symlink_to(log.absolute())
    for kept in (weights, log):
        refused(["scan", "run", "--report", f"json={kept}"], kept, capsys)
    assert main(["scan", "run", "--report", "json=report.json"]) == 0


FACTORY = """
import torch
from {helper} import loss
from ampdoctor import TrainingRun

def make():
    {before}
    return TrainingRun(model=torch.nn.Linear(4, 4), batches=[torch.ones(2, 4)], loss=loss, precision="bf16")
"""
LOSS = "def loss(model, batch):\n    return model(batch).mean()\n"


@pytest.mark.each_value_once
@pytest.mark.parametrize("form", ["kept_run:make", "pack.kept_run:make", "kept_run.py:make"])
@pytest.mark.parametrize("before", ["", "raise ValueError"])
@pytest.mark.parametrize("written", ["kept_run.py", "kept_loss.py"])
def test_the_source_of_a_run_is_not_written_over(form, before, written, capsys):
    Path("pack").mkdir()
    Path("pack/__init__.py").write_text("")
    for folder, helper in ((Path(), "kept_loss"), (Path("pack"), ".kept_loss")):
        (folder / "kept_run.py").write_text(FACTORY.format(helper=helper, before=before))
        (folder / "kept_loss.py").write_text(LOSS)
    kept = Path("pack" if form.startswith("pack") else ".") / written
    source = kept.read_text()
    assert main(["bisect-nan", form, "--steps", "1", "--output", str(kept)]) == 2
    assert f"cannot write {kept}: it is " in capsys.readouterr().err
    assert kept.read_text() == source


def test_a_promise_to_write_ends_with_its_block(tmp_path):
    file = tmp_path / "a"
    with to_be_written([str(file)]):
        with to_be_written(["b"]), pytest.raises(UsageError, match="cannot write b"):
            refuse_reading("./b")
        refuse_reading("b")
        with pytest.raises(UsageError, match="it is what is to be read"):
            refuse_reading(file)
    refuse_reading(file)
