"""What lies in a checkpoint, without reading it; and which options of scan go together."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.checkpoints.stored_tensor import Block
from ampdoctor.cli.main import main
from ampdoctor.evidence.report_scan import ListedGroup, ListedRole
from ampdoctor.reports.json_report import render_json
from ampdoctor.workflows.scan_checkpoint import list_structure
from tests.workflows.scanning.trained import Training


@pytest.fixture
def saved(tmp_path):
    return Training().run(3).save(tmp_path / "c.pt")


def test_every_tensor_is_listed_by_role_with_its_place(saved, check_report):
    report = check_report(render_json(list_structure(saved)))
    assert (report["verdict"], report["complete"], report["target"]["global_step"]) == ("not_judged", True, 3)
    structure = report["structure"]
    model = torch.load(saved)["model"]
    weights = [tensor for tensor in structure["tensors"] if tensor["role"] == "weight"]
    assert {w["name"]: (w["dtype"], w["shape"], w["bytes"], w["file"]) for w in weights} == {
        name: ("float32", list(value.shape), value.numel() * 4, "c.pt") for name, value in model.items()
    }
    assert structure["roles"]["moment"]["tensors"] == 2 * len(model)
    assert {t["entry"] for t in structure["tensors"] if t["role"] == "moment"} == {"exp_avg", "exp_avg_sq"}


def test_optimizers_and_scalers_are_described(saved):
    structure = list_structure(saved).structure
    assert structure is not None
    (optimizer,) = structure.optimizers
    (group,) = optimizer.groups
    assert (optimizer.path, optimizer.parameters, group.parameters) == ("optimizer", 6, 6)
    assert group.settings["lr"] == 1e-3
    assert group.settings["betas"] == [0.9, 0.999]
    assert [scaler["scale"] for scaler in structure.scalers] == [65536.0]
    assert structure.log is None


def test_of_a_groups_entries_only_numbers_are_shown(tmp_path):
    group = {"params": [0], "lr": 0.1, "api_key": "SECRET", "rank": 4, "alpha": "SECRET", "betas": (0.9, "SECRET")}
    optimizer = {"param_groups": [group], "state": {0: {"momentum_buffer": torch.ones(3)}}}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": optimizer}, tmp_path / "c.pt")
    structure = list_structure(tmp_path / "c.pt").structure
    assert structure is not None
    assert structure.optimizers[0].groups == (ListedGroup(parameters=1, settings={"lr": 0.1, "rank": 4}),)


def test_no_tensor_is_read(tmp_path, monkeypatch):
    save_file({"a": torch.ones(4), "b": torch.full((4,), float("nan"))}, tmp_path / "m.safetensors")

    def refuse(*_):
        raise AssertionError("tensor data were read")

    monkeypatch.setattr(Block, "read", refuse)
    report = list_structure(tmp_path / "m.safetensors")
    assert report.findings == ()
    assert report.structure is not None
    assert report.structure.roles["weight"] == ListedRole(tensors=2, elements=8, bytes=32, dtypes={"float32": 2})


def test_the_members_of_a_family_are_listed_in_order(tmp_path, check_report):
    training = Training()
    for _ in range(3):
        training.run(1).save(tmp_path / f"epoch_{training.step}.pt")
    (tmp_path / "epoch_2.pt").write_bytes(b"")  # it is not opened
    report = check_report(render_json(list_structure(tmp_path)))
    assert [(m["name"], m["step"], m["unit"]) for m in report["structure"]["members"]] == [
        (f"epoch_{epoch}.pt", epoch, "epoch") for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_folded_never_cut(tmp_path, run_here, width):
    name = "encoder." + ".".join(f"blocks_{i}" for i in range(12)) + "\x1b[31m.weight"
    save_file({name: torch.ones(2, 3)}, tmp_path / "m.safetensors")
    result = run_here("scan", str(tmp_path / "m.safetensors"), "--list", env={"COLUMNS": str(width)})
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    lines = result.stdout.partition("\nnext: ")[0].splitlines()
    assert max(map(len, lines)) <= width
    heading = next(at for at, line in enumerate(lines) if line.split()[:1] == ["name"])
    column = lines[heading].index("dtype")
    assert "".join(line[:column].strip() for line in lines[heading + 1 :]) == name.replace("\x1b", r"\x1b")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--list", "--against", "old.pt"], "--list reads no tensors, so that --against has nothing to do"),
        (["--list", "--all"], "--list reads no tensors, so that --all has nothing to do"),
        (["--list", "--threshold", "exact=true"], "--list reads no tensors, so that --threshold exact has"),
        (["--all", "--against", "old.pt"], "--against compares two checkpoints and --all reads a folder of many"),
        (["--against", ""], "--against is empty"),
        (["--all"], "c.pt is not one"),
        (["--against", "nothing.pt"], "nothing.pt does not exist"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(saved, options, sentence, capsys):
    assert main(["scan", str(saved), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_the_report_is_not_written_over_the_older_checkpoint(saved, tmp_path, capsys):
    old = Training().run(1).save(tmp_path / "old.pt")
    before = old.read_bytes()
    assert main(["scan", str(saved), "--against", str(old), "--report", f"json={old}"]) == 2
    assert old.read_bytes() == before
    assert "old.pt" in capsys.readouterr().err


def test_against_and_all_reach_their_workflows(saved, tmp_path, capsys):
    old = Training().run(1).save(tmp_path / "old" / "c.pt")
    assert main(["scan", str(saved), "--against", str(old), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["change"]["steps"] == 2
    for step in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        Training().run(step).save(tmp_path / "run" / f"step_{step}.pt")
    for options, read in (([], 6), (["--all"], 9)):
        assert main(["scan", str(tmp_path / "run"), "--format", "json", *options]) == 0
        assert len(json.loads(capsys.readouterr().out)["target"]["members"]) == read
