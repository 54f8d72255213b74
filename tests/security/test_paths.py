"""What is opened, and what is not: S14, S16, S20, S21, S24."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints import files
from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.folder import open_checkpoint
from ampdoctor.errors import CheckpointError
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.scan import scan
from tests.security import hostile as h

ROOT = Path(__file__).parents[2]
AUDITED = Path(__file__).with_name("audited.py")
EVIL = h.call(h.named("os", "system"), h.text("touch /tmp/ampdoctor-canary-of-the-tests"))


def index(folder, shards):
    table = {f"w{i}": shard for i, shard in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


# S14: transformers#46913, #46626, #47996, huggingface_hub#4935
@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "C:\\x.safetensors", "C:x", "..\\x",
        "x\0.safetensors", "\\\\server\\share", "x\n.safetensors", "file://x", 5, None, ["x"], "\u202ex.safetensors",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["the index", "its folder"])
def test_an_index_names_files_beside_itself_only(shard, form, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w0": torch.ones(2)}, tmp_path / "secret.safetensors")
    index(folder, [shard])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder / "model.safetensors.index.json" if form == "the index" else folder)
    assert "\n" not in str(caught.value)
    assert "not a plain file name; refused" in str(caught.value) or "is not a string" in str(caught.value)


def test_the_cache_of_hugging_face_is_read(tmp_path):
    """S16: its files are links out of their folder, so that a check of resolved paths would refuse every model."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number - 1}": torch.ones(2)}, blobs / f"{number:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    index(blobs, [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)])
    (blobs / "model.safetensors.index.json").rename(blobs / "index")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    assert scan(snapshot).verdict == "healthy"
    assert scan(snapshot / "model.safetensors.index.json").target["tensors"] == 2


@pytest.fixture
def odd_places(tmp_path):
    """Links to what is no regular file, and what an error says of it."""
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "server"))
    places = {
        "FIFO": (tmp_path / "pipe", "not a regular file"),
        "device": (Path("/dev/zero"), "not a regular file"),
        "socket": (tmp_path / "server", "not a regular file"),
        "nothing": (tmp_path / "gone", "link to nothing"),
        "round": (tmp_path / "round", "symbolic links"),
        "empty": (Path("/proc/self/environ"), "is empty"),
    }
    (tmp_path / "round").symlink_to(tmp_path / "round")
    yield places
    server.close()


@pytest.mark.parametrize("kind", ["FIFO", "device", "socket", "nothing", "round", "empty"])
@pytest.mark.parametrize("form", ["file", "folder", "shard"])
def test_a_link_to_no_regular_file_is_refused_without_waiting(kind, form, odd_places, tmp_path):
    """S16; without O_NONBLOCK a FIFO would hold the scan forever, and /dev/zero has no end."""
    folder = tmp_path / "model"
    folder.mkdir()
    target, said = odd_places[kind]
    (folder / "model.safetensors").symlink_to(target)
    if form == "shard":
        index(folder, ["model.safetensors"])
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder / "model.safetensors" if form == "file" else folder)


def test_what_becomes_a_fifo_before_it_is_opened_is_refused_without_waiting(tmp_path, monkeypatch):
    """S16: between the look at it and its opening anything may take the place of a file."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)
    look = os.stat

    def swapped(target, *rest, **keywords):
        found = look(target, *rest, **keywords)
        if Path(target) == path:
            path.unlink()
            os.mkfifo(path)
        return found

    monkeypatch.setattr(files.os, "stat", swapped)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        RegularFile(path, path.name)


NEVER_OPENED = ("training_args.bin", "rng_state.pth", "rng_state_0.pth", "random_states_0.pkl", "sampler.bin",
                "custom_checkpoint_0.pkl", "tokenizer.pkl")  # fmt: skip


def trainer_folder(folder):
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": []}))
    config = {
        "_target_": "ampdoctor_canary.fire",
        "auto_map": {"AutoModel": "modeling_evil.Model", "AutoConfig": "someone/else--config.Config"},
        "trust_remote_code": True,
        "_name_or_path": "https://example.invalid/model",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "https://example.invalid/x"}))
    for module in ("modeling_evil", "config", "ampdoctor_canary", "torch", "numpy", "json", "sitecustomize"):
        (folder / f"{module}.py").write_text("raise SystemExit('imported')")
    return folder


def test_neighbours_that_hold_pickles_are_not_even_opened(tmp_path):
    """S21: CVE-2026-1839 is in the loading of the random state; here each is a FIFO, and opening one would show."""
    folder = trainer_folder(tmp_path / "checkpoint-3")
    for name in NEVER_OPENED:
        os.mkfifo(folder / name)
    report = scan(folder)
    assert report.verdict == "healthy"
    assert {skip.what for skip in report.skipped} == set(NEVER_OPENED)
    assert report.errors == ()


@pytest.mark.skipif(sys.platform != "linux", reason="the names of files that a process has open")
def test_a_scan_imports_nothing_opens_nothing_else_and_connects_to_nothing(tmp_path, run_cli):
    """S1, S21: CVE-2026-4372 (config.json), Unit 42 on `_target_`: seen by the interpreter's own audit events."""
    folder = trainer_folder(tmp_path / "checkpoint-3")
    for name in NEVER_OPENED:
        (folder / name).write_bytes(h.model_and(EVIL))
    (folder / "optimizer.pt").write_bytes(h.model_and(EVIL))
    (folder / "pytorch_model.bin").write_bytes(h.legacy(h.table({"x": EVIL})))
    (folder / "more.safetensors").write_bytes(h.safetensors({"_target_": {}}))
    result = run_cli(
        command=(sys.executable, str(AUDITED), str(folder), "human"), cwd=folder, env={"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["modules"] == []
    opened = {Path(args[0]).name for event, args in seen["events"] if event == "open" and not args[0].isdigit()}
    assert opened <= {
        "model.safetensors",
        "optimizer.pt",
        "pytorch_model.bin",
        "more.safetensors",
        "trainer_state.json",
    }
    assert {"model.safetensors", "optimizer.pt"} <= opened
    assert {event for event, _ in seen["events"]} <= {"open", "os.listdir", "os.scandir"}
    assert seen["code"] == 2
    assert not Path("/tmp/ampdoctor-canary-of-the-tests").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the names of files that a process has open")
def test_a_scan_of_a_runs_checkpoints_opens_and_lists_nothing_above_them(tmp_path, run_cli, python):
    """A run's log lies beside such a folder, which is nobody's leave to read it: only the folder was named."""
    named = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        (named / f"checkpoint-{step}").mkdir(parents=True)
        save_file({"w": torch.ones(4)}, named / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "run" / "metrics.csv").write_text("step,loss\n1,nan\n2,nan\n3,nan\n")
    result = run_cli(command=(python, str(AUDITED), str(named), "json"), cwd=tmp_path)
    seen = json.loads(result.stdout)
    touched = [Path(args[0]) for event, args in seen["events"] if event in {"open", "os.listdir", "os.scandir"}]
    assert named / "checkpoint-2" / "model.safetensors" in touched
    assert [path for path in touched if not path.is_relative_to(named) and not path.name.isdigit()] == []
    assert seen["code"] == 0


def test_a_report_holds_no_absolute_path_and_no_hyper_parameter(tmp_path, monkeypatch):
    """S20: memray#199's --confidential-files; keys of services lie in saved arguments."""
    secrets = {"api_key": "s3cr3t-key", "data_dir": str(tmp_path), "lr": 0.12345678}
    state = {
        "state_dict": {"w": torch.tensor([float("nan")])},
        "hyper_parameters": secrets,
        "args": __import__("argparse").Namespace(**secrets),
        "optimizer_states": [{"state": {}, "param_groups": [{"params": [], "lr": 0.12345678, "tag": "s3cr3t-group"}]}],
    }
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)  # what lies elsewhere has no other name
    torch.save(state, folder / "last.ckpt")
    (folder / "broken.pt").write_bytes(b"PK\3\4" + b"x" * 99)
    for target in (folder, folder / "last.ckpt"):
        shown = render_json(scan(target))
        assert '"AMP1' in shown
        for secret in ("s3cr3t", str(tmp_path), "0.12345678"):
            assert secret not in shown


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
SILENT = {
    "an empty folder": {},
    "only pointers of git-LFS": {"model.safetensors": LFS, "optimizer.pt": LFS},
    "only unknown files": {"notes.txt": b"x", "data.csv": b"1,2"},
    "only files that are left alone": {"training_args.bin": b"x", "tokenizer.json": b"{}"},
    "only integers": {
        "m.safetensors": h.safetensors({"i": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    },
    "only tensors of unknown dtypes": {
        "m.safetensors": h.safetensors({"i": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\1")
    },
    "no tensors": {"m.safetensors": h.safetensors({})},
    "an empty file": {"model.safetensors": b""},
    "an empty state dict": {"m.pt": h.torch_zip(h.whole(h.table({})))},
    "only empty tensors": {
        "m.safetensors": h.safetensors({"i": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    },
}


@pytest.mark.parametrize("content", SILENT)
def test_nothing_examined_is_never_healthy(content, tmp_path, run_cli):
    """S24: weightlens 0.2.2 ends with 0 after FAILED."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in SILENT[content].items():
        (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError):
        scan(folder)
    if content in {"an empty folder", "only pointers of git-LFS"}:
        result = run_cli("scan", str(folder))
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("ampdoctor: error: ")
