"""What is lived with does not hide what comes behind it: baselines, ignores, severities in the commands that replay."""

from __future__ import annotations

import json

import pytest

from ampdoctor.cli.main import main

RUNS = "tests.workflows.lived_runs"
IGNORE = '[[ignore]]\nrule = "{}"\nreason = "known"\n'
SEVERITY = '[rules.{}]\nseverity = "warning"\n'


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch, request):
    """Return a function that runs a command on one of the runs: exit code, report, and what was said."""
    monkeypatch.syspath_prepend(str(request.config.rootpath))
    monkeypatch.chdir(tmp_path)

    def asked(run, *options, command="bisect-nan", config=""):
        (tmp_path / "decided.toml").write_text(config, encoding="utf-8")
        arguments = [command, f"{RUNS}:{run}", "--steps", "8", "--config", "decided.toml", *options]
        code = main([*arguments, "--report", "json=report.json"])
        said = capsys.readouterr().out
        return code, json.loads((tmp_path / "report.json").read_text(encoding="utf-8")), said

    return asked


def errors_of(report):
    return [(f["code"], f["where"]["step"]) for f in report["findings"] if f["severity"] == "error"]


def left_out(report, what):
    return [skipped["reason"] for skipped in report["skipped"] if skipped["what"] == what]


def test_without_a_decision_the_search_ends_at_the_first_failure(ask):
    code, report, _ = ask("known_and_new")
    assert (code, errors_of(report), report["run"]["steps"]) == (1, [("AMP204", 1)], 2)


@pytest.mark.parametrize(
    ("decided", "command"), [("ignore", "bisect-nan"), ("severity", "bisect-nan"), ("ignore", "recommend")]
)
def test_what_comes_behind_a_failure_that_is_lived_with_is_found(decided, command, ask):
    config = {"ignore": IGNORE, "severity": SEVERITY}[decided].format("AMP204")
    code, report, said = ask("known", command=command, config=config)
    assert (code, errors_of(report), report["run"]["steps"]) == (0, [], 8), said
    code, report, said = ask("known_and_new", command=command, config=config)
    assert (code, errors_of(report), report["verdict"]) == (1, [("AMP202", 6)], "sick"), said


def test_a_baseline_holds_every_failure_of_the_run(ask):
    code, report, _ = ask("known_and_new", "--write-baseline", "known.json")
    assert code == 0
    assert {("AMP204", 1), ("AMP202", 6)} <= set(errors_of({"findings": [s["finding"] for s in report["suppressed"]]}))
    assert ask("known_and_new", "--baseline", "known.json")[0] == 0


@pytest.mark.parametrize(
    ("run", "code", "behind", "reason"),
    [
        ("deadly", "AMP204", "step 1", "parameters, buffers or moments are non-finite from there on"),
        ("raising", "AMP204", "step 1", "it raises FloatingPointError: the loss is not finite"),
        ("hidden", "AMP202", "step 1", "the run does not come back bit by bit"),
        ("ruined", "AMP101", "the state at the start", "parameters, buffers or moments are non-finite from there on"),
    ],
)
def test_what_cannot_be_replayed_behind_it_is_said_to_be_left_out(run, code, behind, reason, ask):
    outcome, report, said = ask(run, config=IGNORE.format(code))
    what = f"the steps after {behind}"
    assert outcome == 0
    assert left_out(report, what) == [f"what was found there is set aside, and {reason}"]
    assert said.splitlines()[-1].startswith(f"next: nothing new, but {what} were not replayed")
    outcome, report, _ = ask(run, config=SEVERITY.format(code))
    assert (outcome, report["verdict"]) == (2, "inconclusive"), "what is no error does not make the rest healthy"


def test_a_state_that_is_lived_with_does_not_end_the_search_before_it_begins(ask):
    assert errors_of(ask("impossible")[1]) == [("AMP106", 0)]
    code, report, _ = ask("impossible", config=IGNORE.format("AMP106"))
    assert (code, errors_of(report)) == (1, [("AMP202", 6)])


def test_a_failure_that_is_no_error_is_not_the_one_that_is_expected(ask):
    code, report, _ = ask("known", "--expect-failure", config=SEVERITY.format("AMP204"))
    assert (code, report["verdict"]) == (2, "not_reproduced")
    assert "AMP902" in [finding["code"] for finding in report["findings"]]
    code, report, _ = ask("known", "--expect-failure", config=IGNORE.format("AMP204"))
    assert (code, report["verdict"]) == (0, "sick"), "it came back, and is lived with"
