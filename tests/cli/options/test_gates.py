"""Baselines and what is decided before a run, on the command line."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date

import pytest
import torch
from safetensors.torch import save_file

from ampdoctor.cli import run_command
from ampdoctor.cli.main import main
from tests.samples import HEALTHY, INCOMPLETE, OVERFLOW, SICK, UNDERFLOW

SCANNED = replace(SICK, command="scan")


@pytest.fixture
def finds(tmp_path, monkeypatch, stub_workflow):
    """Return a function that says what every scan finds from now on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    return lambda report: stub_workflow("scan", lambda *_, **__: report)


def scan(capsys, check_report, *arguments):
    code = main(["scan", "x", "--format", "json", *arguments])
    captured = capsys.readouterr()
    return code, check_report(captured.out), captured.err


def test_what_is_written_is_known_from_then_on(finds, capsys, check_report):
    finds(SCANNED)
    assert scan(capsys, check_report)[0] == 1
    code, report, _ = scan(capsys, check_report, "--write-baseline", "base.json")
    assert (code, report["findings"], report["verdict"]) == (0, [], "sick")
    assert report["baseline"] == {"file": "base.json", "written": True, "known": 2, "new": 0, "fixed": []}
    code, report, _ = scan(capsys, check_report, "--baseline", "base.json", "--fail-on", "warning")
    assert (code, report["findings"]) == (0, [])
    assert [one["by"] for one in report["suppressed"]] == ["baseline", "baseline"]


def test_the_report_knows_its_gate_and_junit_fails_as_the_exit_code_does(finds, tmp_path, capsys, check_report):
    finds(replace(SCANNED, verdict="healthy", findings=(UNDERFLOW,)))
    for options, code in (((), 0), (("--fail-on", "warning"), 1)):
        xml = tmp_path / f"{code}.xml"
        arguments = (*options, "--report", f"junit={xml}", "--report", f"json={code}.json")
        found, report, _ = scan(capsys, check_report, *arguments)
        assert (found, report["gate"]["exit_zero"]) == (code, False)
        assert report["gate"]["fail_on"] == ("warning" if code else "error")
        assert xml.read_text().count("<failure") == code
    assert main(["merge", "1.json", "--format", "json", "--exit-zero"]) == 0
    assert check_report(capsys.readouterr().out)["gate"] == {"fail_on": "error", "exit_zero": True}


def test_what_is_new_fails_and_what_is_fixed_does_not(finds, capsys, check_report):
    finds(replace(SCANNED, verdict="healthy", findings=(UNDERFLOW,)))
    assert scan(capsys, check_report, "--write-baseline", "base.json")[0] == 0
    finds(replace(SCANNED, findings=(OVERFLOW, UNDERFLOW)))
    code, report, _ = scan(capsys, check_report, "--baseline", "base.json")
    assert (code, [finding["code"] for finding in report["findings"]]) == (1, ["AMP201"])
    finds(HEALTHY)
    code, report, _ = scan(capsys, check_report, "--baseline", "base.json")
    assert (code, [entry["code"] for entry in report["baseline"]["fixed"]]) == (0, ["AMP301"])


def poisoned(path, *sick):
    """A checkpoint of two weights, of which some are NaN."""
    tensors = {name: torch.full((4, 4), math.nan if name in sick else 0.5) for name in ("a.weight", "b.weight")}
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)


def test_what_is_known_of_one_checkpoint_does_not_let_a_later_one_pass(tmp_path, monkeypatch, capsys, check_report):
    monkeypatch.chdir(tmp_path)
    for step, sick in enumerate(((), ("a.weight",), ("a.weight", "b.weight"))):
        poisoned(tmp_path / "run" / f"step_{step + 1}.safetensors", *sick)
    assert main(["scan", "run/step_2.safetensors", "--write-baseline", "known.json", "-q"]) == 0
    for options in ((), ("--all",)):
        capsys.readouterr()
        assert main(["scan", "run", "--baseline", "known.json", "--format", "json", *options]) == 1
        report = check_report(capsys.readouterr().out)
        assert [f["where"]["tensor"] for f in report["findings"]] == ["b.weight"]
        assert [one["finding"]["where"]["tensor"] for one in report["suppressed"]] == ["a.weight"]


def test_what_is_known_of_a_folder_lives_to_its_later_checkpoints_and_of_each_that_is_named_does_not(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    poisoned(tmp_path / "run" / "step_1.safetensors", "a.weight")
    poisoned(tmp_path / "run" / "step_2.safetensors")
    each = ["run/step_1.safetensors", "run/step_2.safetensors"]
    assert main(["scan", "run", "--write-baseline", "run.json", "-q"]) == 0
    assert main(["scan", *each, "--write-baseline", "each.json", "-q"]) == 0
    poisoned(tmp_path / "run" / "step_2.safetensors", "a.weight")
    assert main(["scan", "run", "--all", "--baseline", "run.json", "-q"]) == 0
    assert main(["scan", *each, "--baseline", "each.json", "-q"]) == 1
    poisoned(tmp_path / "run" / "step_2.safetensors", "b.weight")
    assert main(["scan", "run", "--all", "--baseline", "run.json", "-q"]) == 1


def test_an_incomplete_report_is_shown_and_makes_no_baseline(finds, tmp_path, capsys, check_report):
    finds(replace(INCOMPLETE, verdict="healthy"))
    code, report, said = scan(capsys, check_report, "--write-baseline", "base.json", "--allow-partial")
    assert (code, report["complete"]) == (2, False)
    assert "no baseline was written" in said
    assert not (tmp_path / "base.json").exists()


def test_a_baseline_that_is_refused_stops_the_command_before_its_work(finds, tmp_path, capsys):
    finds(SCANNED)
    assert main(["scan", "x", "-q", "--write-baseline", "base.json"]) == 0
    capsys.readouterr()
    for name, text, sentence in (
        ("missing.json", None, "cannot read the baseline missing.json: No such file or directory"),
        ("report.json", '{"schema_version": "2"}', "report.json is no baseline that this version"),
        ("other.json", (tmp_path / "base.json").read_text().replace('"scan"', '"profile"'), "`ampdoctor profile`"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert main(["scan", "x", "--baseline", name]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert sentence in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--baseline", "base.json", "--output", "base.json"),
        ("--write-baseline", "base.json", "--output", "base.json"),
        ("--write-baseline", "x"),
        ("--baseline", ""),
    ],
)
def test_a_baseline_is_not_overwritten_and_overwrites_nothing(arguments, finds, tmp_path, capsys):
    finds(SCANNED)
    (tmp_path / "x").write_text("a checkpoint")
    assert main(["scan", "x", "-q", "--write-baseline", "base.json"]) == 0
    before = (tmp_path / "base.json").read_bytes()
    assert main(["scan", "x", *arguments]) == 2
    assert (tmp_path / "base.json").read_bytes() == before
    assert (tmp_path / "x").read_text() == "a checkpoint"
    assert "error" in capsys.readouterr().err


def test_an_ignore_holds_until_its_day_is_over(finds, tmp_path, capsys, check_report, monkeypatch):
    finds(SCANNED)
    (tmp_path / "ampdoctor.toml").write_text("[[ignore]]\nrule = 'AMP201'\nreason = 'r'\nexpires = 2026-11-21\n")
    monkeypatch.setattr(run_command, "today", lambda: date(2026, 11, 21))
    assert scan(capsys, check_report)[0] == 0
    monkeypatch.setattr(run_command, "today", lambda: date(2026, 11, 22))
    code, report, _ = scan(capsys, check_report)
    assert (code, [finding["code"] for finding in report["findings"]]) == (1, ["AMP201", "AMP301", "AMP912"])
