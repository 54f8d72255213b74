"""What commands hand to workflows, where reports go, and what they mean: in process, with workflows of our own."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest

from ampdoctor.cli.main import main
from ampdoctor.cli.run_command import judge
from ampdoctor.diagnosis.catalogue import rules
from ampdoctor.workflows.requests import ReplayRequest
from tests.samples import HEALTHY, INCOMPLETE, NOT_REPRODUCED, SICK, WARNED


@pytest.mark.parametrize(
    ("report", "options", "code"),
    [
        (SICK, {}, 1),
        (SICK, {"fail_on": "never"}, 0),
        (SICK, {"exit_zero": True}, 0),
        (WARNED, {}, 0),
        (WARNED, {"fail_on": "warning"}, 1),
        (INCOMPLETE, {}, 2),
        (INCOMPLETE, {"exit_zero": True}, 2),
        (replace(SICK, complete=False), {}, 2),
        (replace(SICK, complete=False), {"allow_partial": True}, 1),
        (replace(HEALTHY, complete=False), {"allow_partial": True}, 0),
        (NOT_REPRODUCED, {}, 2),
        (NOT_REPRODUCED, {"exit_zero": True}, 2),
        (replace(NOT_REPRODUCED, findings=SICK.findings), {}, 1),
        (replace(HEALTHY, verdict="inconclusive"), {}, 2),
    ],
)
def test_what_a_report_means(report, options, code):
    outcome = judge(report, **options)
    assert outcome.code == code
    assert (outcome.reason is not None) == (code == 2)


@pytest.mark.parametrize(
    ("command", "name"), [("bisect-nan", "bisect_nan"), ("profile", "profile"), ("recommend", "recommend")]
)
def test_the_replaying_commands_hand_over_the_whole_request(command, name, stub_workflow):
    seen = []
    stub_workflow(name, lambda request, *, progress=None, **_: seen.append(request) or HEALTHY)
    assert main([command, "pkg:make"]) == 0
    options = "--checkpoint c.pt --steps 5 --precision bf16 --policy native --device cuda:1 --app-dir src".split()
    options += '--arg n=3 --arg s="a" --arg l=[1,null] --batches pkg:data --loss pkg:loss'.split()
    assert main([command, "pkg:make", *options, "--allow-partial", "--expect-failure", "-q"]) == 0
    assert seen == [
        ReplayRequest(factory="pkg:make"),
        ReplayRequest(
            factory="pkg:make",
            arguments={"n": 3, "s": "a", "l": [1, None]},
            checkpoint="c.pt",
            steps=5,
            precision="bf16",
            policy="native",
            device="cuda:1",
            app_dir="src",
            allow_partial=True,
            batches="pkg:data",
            loss="pkg:loss",
            expect_failure=True,
        ),
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--report", "json=-"],
        ["--report", "json={0}/a", "--report", "human={0}/./a"],
        ["--report", "xml={0}/a"],
        ["--report", "json="],
        ["--output", "{0}"],
        ["--output", "{0}/none/a"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(options, stub_workflow, tmp_path, capsys):
    worked = []
    stub_workflow("scan", lambda path, *, progress=None, **options: worked.append(1) or SICK)
    assert main(["scan", "x", *(option.format(tmp_path) for option in options)]) == 2
    assert worked == []
    assert capsys.readouterr().err.startswith("ampdoctor: error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", ["AMP201", "amp201", "forward-overflow"])
def test_rule_shows_a_page(wanted, capsys):
    assert main(["rule", wanted]) == 0
    text = capsys.readouterr().out
    rule = rules()["AMP201"]
    assert text.startswith(f"AMP201 forward-overflow: {rule.title}\n")
    assert all(" ".join(part.split()) in " ".join(text.split()) for part in rule.page.texts.values())


def test_rule_lists_all(capsys):
    assert main(["rule"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(rules())
    assert main(["rule", "--format", "json"]) == 0
    assert [page["code"] for page in json.loads(capsys.readouterr().out)] == sorted(rules())


@pytest.mark.parametrize(
    ("wanted", "hint"), [("AMP200", "AMP20"), ("forwardoverflow", "forward-overflow"), ("?", "lists")]
)
def test_rule_that_is_not_there(wanted, hint, capsys):
    assert main(["rule", wanted]) == 2
    assert hint in capsys.readouterr().err


def test_env_as_json(capsys):
    assert main(["env", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch_import"] == "ok"
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))


def test_env_shows_no_other_variable(monkeypatch, capsys):
    monkeypatch.setenv("A_SECRET", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(["env"])
    text = capsys.readouterr().out
    assert "hunter2" not in text
    assert "OMP_NUM_THREADS: 1" in text


@pytest.mark.parametrize(
    "arguments",
    [["scan", ""], ["scan", "x", "--output", ""], ["bisect-nan", ""], ["bisect-nan", "pkg:make", "--checkpoint", ""]],
)
def test_an_empty_string_is_named(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert " is empty: " in error
    assert error.count("\n") == 1


def test_a_read_only_file_is_not_replaced(stub_workflow, tmp_path, capsys, monkeypatch):
    stub_workflow("scan", lambda path, *, progress=None, **options: SICK)
    kept = tmp_path / "report.json"
    kept.write_text("old")
    kept.chmod(0o444)
    may = os.access  # root may write everything
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(kept) and may(path, mode))
    assert main(["scan", "x", "--report", f"json={kept}"]) == 2
    assert "permission denied" in capsys.readouterr().err
    assert kept.read_text() == "old"
