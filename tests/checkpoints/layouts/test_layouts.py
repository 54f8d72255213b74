"""Every layout's checkpoint, made by its own library, against the live model and optimizer that were saved."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from ampdoctor.checkpoints import files
from ampdoctor.checkpoints.folder import may_be_read, open_checkpoint
from ampdoctor.checkpoints.found import find
from ampdoctor.checkpoints.tensor_statistics import summarize
from ampdoctor.errors import CheckpointError

FOLDER = Path(__file__).parents[3] / "fixtures" / "checkpoints"
SPLIT = frozenset({"megatron_old", "fsdp1_rank_files", "fsdp2_rank_files"})
"""Layouts whose files are not joined: each rank's piece is a tensor by itself."""


def cases():
    found = []
    for told in sorted((FOLDER / "expected").glob("*.json")):
        layout = json.loads(told.read_text(encoding="utf-8"))
        if layout["layout"] in SPLIT:
            continue
        for truth in layout["checkpoints"]:
            path = FOLDER / layout["layout"] / truth["path"]
            found.append(pytest.param(path, truth, id=f"{layout['layout']}-{truth['path']}"))
    return found


def compare(refs, truth):
    """Each tensor once, by name, with its shape, dtype and values."""
    found = {ref.name: ref for ref in refs}
    assert found.keys() == truth.keys()
    for name, facts in truth.items():
        check(found[name], facts)


def check(ref, facts):
    assert ref.shape == tuple(facts["shape"]), ref.name
    assert str(ref.dtype) == f"torch.{facts['dtype']}", ref.name
    values = ref.stored.load().double()
    assert values.shape == tuple(facts["shape"]), ref.name
    assert values.abs().max().item() == facts["amax"], ref.name
    assert values.sum().item() == pytest.approx(facts["sum"], rel=1e-12, abs=1e-12), ref.name


def check_unordered(refs, rows):
    """Beside weights in safetensors, which sorts them, a moment has its parameter's name or none, never another's."""
    expected = {(row["parameter"], row["entry"]): row for row in rows}
    assert len(refs) == len(expected)
    for ref in refs:
        if not ref.name.startswith("param "):
            check(ref, expected[ref.name, ref.entry])


def check_summary(checkpoint):
    """What a scan says of each tensor, read in blocks, is what the loaded tensor says."""
    loaded = {(ref.name, ref.entry, ref.group, ref.file): ref.stored for ref in checkpoint}
    for tensor in summarize(checkpoint).tensors:
        values = loaded[tensor.name, tensor.entry, tensor.group, tensor.file].load().double()
        assert (tensor.amax or 0.0) == values.abs().max().item(), tensor.name
        assert tensor.examined == values.numel(), tensor.name


def check_moments(refs, rows):
    """By parameter and entry; a counter that the truth does not tell for each parameter is no moment of one."""
    expected = {(row["parameter"], row["entry"]): row for row in rows}
    told = {entry for _, entry in expected}
    found = {(ref.name, ref.entry): ref for ref in refs if ref.entry in told or ref.role == "moment"}
    assert found.keys() == expected.keys()
    for key, ref in found.items():
        assert ref.role == ("other" if ref.entry == "step" else "moment")
        check(ref, expected[key])


def check_scaler(checkpoint, truth):
    if truth is None:
        assert checkpoint.scalers == ()
        return
    (scaler,) = checkpoint.scalers
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker"):
        if truth[name] is not None:
            assert getattr(scaler, name) == truth[name], name
    own = truth.get("own", {})
    floor = 1.0 if "hysteresis_tracker" in own else own.get("min_scale")  # Megatron's is one of its arguments
    assert scaler.min_scale == floor


@pytest.mark.parametrize(("path", "truth"), cases())
def test_a_layout_is_read_as_it_was_saved(path, truth):
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.errors == ()
        refs = list(checkpoint)
        main = [ref for ref in refs if ref.role == "weight" and not ref.group]
        master_weights = [ref for ref in refs if ref.role == "weight" and ref.group == "fp32"]
        if "masters" in truth and not master_weights:  # ZeRO 3 saves the fp32 weights only
            compare(main, truth["masters"])
        else:
            compare(main, truth["weights"])
            compare(master_weights, truth.get("masters", {}))
        compare([ref for ref in refs if ref.role == "buffer"], truth["buffers"])
        held = [ref for ref in refs if ref.role == "moment" or ref.entry == "step"]
        unordered = any(ref.file.endswith(".safetensors") for ref in main)
        (check_unordered if unordered else check_moments)(held, truth["moments"])
        check_scaler(checkpoint, truth["scaler"])
        if truth["step"] is not None:
            assert checkpoint.global_step == truth["step"]
        check_summary(checkpoint)
        groups = {ref.group for ref in refs if ref.role == "weight"}
        assert groups <= {"", "fp32"}


@pytest.mark.parametrize("where", [".", "iter_0000010"])
def test_ranks_that_cannot_be_joined_are_read_one_by_one(where):
    truth = json.loads((FOLDER / "expected" / "megatron_old.json").read_text(encoding="utf-8"))["checkpoints"][0]
    with open_checkpoint(FOLDER / "megatron_old" / where) as checkpoint:
        assert checkpoint.errors == ()
        assert checkpoint.global_step == truth["step"]
        (scaler,) = checkpoint.scalers
        assert (scaler.scale, scaler.growth_tracker) == (truth["scaler"]["scale"], truth["scaler"]["growth_tracker"])
        refs = list(checkpoint)
        assert len({ref.file for ref in refs}) == truth["ranks"]
        for group, facts in (("", truth["weights"]), ("fp32", truth["masters"])):
            check_ranks([ref for ref in refs if ref.role == "weight" and ref.group == group], facts, "")
        for entry in ("exp_avg", "exp_avg_sq"):
            rows = {row["parameter"]: row for row in truth["moments"] if row["entry"] == entry}
            check_ranks([ref for ref in refs if ref.role == "moment"], rows, entry)


@pytest.mark.parametrize("layout", ["fsdp1_rank_files", "fsdp2_rank_files"])
def test_the_files_of_fsdp_ranks_are_read_one_by_one(layout):
    (truth,) = json.loads((FOLDER / "expected" / f"{layout}.json").read_text(encoding="utf-8"))["checkpoints"]
    with open_checkpoint(FOLDER / layout / truth["path"]) as checkpoint:
        assert checkpoint.errors == ()
        assert checkpoint.unread == ()
        refs = list(checkpoint)
        check_ranks([ref for ref in refs if ref.role == "weight"], truth["weights"], "")
        for entry in ("exp_avg", "exp_avg_sq"):
            rows = {row["parameter"]: row for row in truth["moments"] if row["entry"] == entry}
            check_ranks([ref for ref in refs if ref.role == "moment"], rows, entry)


def check_ranks(refs, truth, entry):
    named = [ref for ref in refs if not entry or ref.entry == entry]
    assert {ref.name for ref in named} == truth.keys()
    for name, facts in truth.items():
        values = [ref.stored.load().double() for ref in named if ref.name == name]
        assert max(v.abs().max().item() for v in values) == facts["amax"]
        whole = values[0].numel() == math.prod(facts["shape"])
        assert sum(v.sum().item() for v in values[: 1 if whole else None]) == pytest.approx(facts["sum"], abs=1e-12)


@pytest.mark.parametrize(
    "folder",
    [
        FOLDER / name
        for name in ("accelerate_fsdp2", "deepspeed_zero3", "hf_trainer_fp16", "lightning_fsdp", "megatron_old")
    ],
    ids=lambda path: path.name,
)
def test_what_is_opened_has_a_name_that_no_report_may_take(folder, monkeypatch):
    opened = []
    monkeypatch.setattr(files, "refuse_reading", lambda path: opened.append(Path(path).name))
    for member in find(folder).members:
        member.open().close()
    for path in (folder, *(path for path in sorted(folder.rglob("*")) if path.is_dir())):
        with contextlib.suppress(CheckpointError):
            open_checkpoint(path).close()
    assert opened
    assert [name for name in opened if not may_be_read(name)] == []


@pytest.mark.parametrize("name", ["report.json", "report.html", "a.sarif", "junit.xml", "REPORT.md", "said.txt"])
def test_what_reports_are_called_is_part_of_no_checkpoint(name):
    assert not may_be_read(name)


def test_the_fixtures_are_small_and_do_not_tell_whose_machine_made_them():
    contents = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file() and path.suffix != ".py"}
    saved = {path: data for path, data in contents.items() if path.suffix not in {".pyc", ".md"}}
    assert sum(map(len, saved.values())) <= 3_000_000
    foreign = (b"/work/", b"/tmp/", b"/root/", b"/home/", b"/Users/", b"/usr/", b"\\Users\\")
    assert [path for path, data in saved.items() if any(word in data for word in foreign)] == []
