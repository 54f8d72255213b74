"""Configuration files and environment variables: where they are found, what holds, and what they may not do."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ampdoctor.cli.config import MAX_BYTES, USES
from ampdoctor.cli.configured_command import ConfiguredCommand
from ampdoctor.cli.main import app, main
from tests.samples import HEALTHY, SICK, WARNED


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A repository to work in."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(stub_workflow):
    """What each scan was asked, and a report that has a warning."""
    seen = []

    def scan(path, *, progress=None, **options):
        seen.append({"path": path, **options})
        return WARNED

    stub_workflow("scan", scan)
    return seen


def setting(capsys, *arguments, command="scan"):
    """The settings of a command as `--show-config` has them."""
    capsys.readouterr()
    assert main([command, "--show-config", "--format", "json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["settings"]


def refused(capsys, *arguments):
    """The sentence with which `scan x` is refused."""
    capsys.readouterr()
    assert main(["scan", "x", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "internal error" not in captured.err
    return captured.err


def test_the_command_line_holds_before_the_environment_before_the_file(folder, capsys, monkeypatch):
    assert setting(capsys)["jobs"] == {"value": None, "from": "default"}
    (folder / "ampdoctor.toml").write_text("jobs = 2\n")
    assert setting(capsys)["jobs"] == {"value": 2, "from": "ampdoctor.toml: jobs"}
    monkeypatch.setenv("AMPDOCTOR_JOBS", "3")
    assert setting(capsys)["jobs"] == {"value": 3, "from": "AMPDOCTOR_JOBS"}
    monkeypatch.setenv("AMPDOCTOR_SCAN_JOBS", "4")
    assert setting(capsys)["jobs"] == {"value": 4, "from": "AMPDOCTOR_SCAN_JOBS"}
    assert setting(capsys, "--threshold", "jobs=5")["jobs"] == {"value": 5, "from": "--threshold jobs"}


def test_a_setting_reaches_the_work_and_the_exit_code(folder, asked):
    assert main(["scan", "x", "-q"]) == 0
    (folder / "ampdoctor.toml").write_text('fail-on = "warning"\nexact = true\n[scan]\njobs = 2\n')
    assert main(["scan", "x", "-q"]) == 1
    assert [(seen["jobs"], seen["exact"]) for seen in asked] == [(None, False), (2, True)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("exit-zero = true", True),
        ("[[ignore]]\nrule = 'AMP301'\nreason = 'why'", True),
        ("[bisect-nan]\nsteps = 3", False),
        ("", False),
    ],
)
def test_the_report_names_the_configuration_that_had_a_say(text, named, folder, capsys, asked):
    (folder / "ampdoctor.toml").write_text(text)
    assert main(["scan", "x", "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)["configuration"]
    assert said == ({"file": "ampdoctor.toml"} if named else None)
    assert main(["scan", "x"]) == 0
    assert ("\nsettings from ampdoctor.toml\n" in capsys.readouterr().out) == named


def test_the_nearest_file_above_is_read_and_nothing_above_the_repository(folder, capsys, monkeypatch):
    inner = folder / "vendor" / "repository" / "src"
    inner.mkdir(parents=True)
    (folder / "ampdoctor.toml").write_text("jobs = 2\n")
    (folder / "vendor" / "pyproject.toml").write_text("[project]\nname = 'no ampdoctor here'\n")
    monkeypatch.chdir(inner)
    assert setting(capsys)["jobs"]["from"] == "../../../ampdoctor.toml: jobs"
    (inner.parent / ".git").touch()  # as in a worktree
    assert setting(capsys)["jobs"] == {"value": None, "from": "default"}


def test_of_two_files_in_a_folder_our_own_is_read(folder, capsys):
    (folder / "pyproject.toml").write_text("[tool.ampdoctor]\njobs = 3\nexact = true\n")
    (folder / "ampdoctor.toml").write_text("jobs = 2\n")
    found = setting(capsys)
    assert (found["jobs"]["value"], found["exact"]["value"]) == (2, False)


def test_a_commands_own_table_holds_before_what_all_share(folder, capsys):
    (folder / "ampdoctor.toml").write_text("jobs = 1\n[scan]\njobs = 2\n")
    assert setting(capsys)["jobs"] == {"value": 2, "from": "ampdoctor.toml: scan.jobs"}


def test_isolated_reads_no_file_and_still_the_environment(folder, capsys, monkeypatch):
    (folder / "ampdoctor.toml").write_text("jobs = 2\nexact = true\n")
    monkeypatch.setenv("AMPDOCTOR_JOBS", "3")
    found = setting(capsys, "--isolated")
    assert (found["jobs"]["value"], found["exact"]["value"]) == (3, False)
    assert "give one of the two" in refused(capsys, "--isolated", "--config", "ampdoctor.toml")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("1", "exact", True),
        ("0", "exact", False),
        ("2", "verbose", 2),
        ("json=a.json human=b.txt", "report", ["json=a.json", "human=b.txt"]),
    ],
)
def test_values_of_the_environment(text, key, value, capsys, monkeypatch):
    monkeypatch.setenv(f"AMPDOCTOR_{key.upper()}", text)
    assert setting(capsys)[key]["value"] == value


BLANK = ["", "\xa0\u3000"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fail_on = 'error'", "ampdoctor.toml: fail_on: there is no such key; did you mean fail-on?"),
        ("[scam]\njobs = 1", "scam: there is no such key; did you mean scan?"),
        ("[bisect-nan]\njobs = 1", "bisect-nan.jobs: `ampdoctor bisect-nan` has no setting jobs"),
        ("qwertz = 1", "qwertz: there is no such key"),
        ("[tool.ampdoctor]\nfail-on = 'error'", "ampdoctor.toml: here the keys stand without `tool.ampdoctor`"),
        ("write-baseline = 'b.json'", "there is no such key"),
        ("jobs = '2'", "ampdoctor.toml: jobs: expected a whole number, not str"),
        ("jobs = true", "expected a whole number, not bool"),
        ("jobs = 0", "ampdoctor.toml: jobs: Input should be greater than or equal to 1"),
        ('output = "a\\u0000b"', "without control characters"),
        ("report = 'json=a.json'", "expected a list of strings, not str"),
        ("report = [1]", "expected a list of strings"),
        ("fail-on = 'all'", "ampdoctor.toml: fail-on: 'all' is not one of 'error', 'warning', 'never'"),
        ("[rules.AMP999]", "ampdoctor.toml: rules.AMP999: There is no rule 'AMP999'"),
        ("[rules]\nAMP101 = 'note'", "rules.AMP101: expected a table, not str"),
        ("[rules.AMP101]\nseverity = 'fatal'", "rules.AMP101.severity: expected one of error, warning, note, ignore"),
        ("[rules.AMP101]\n[rules.non-finite-weight]", "AMP101 is there twice"),
        ("[ignore]\nrule = 'AMP101'", "ignore: expected tables, [[ignore]]"),
        ("ignore = ['AMP101']", "ignore[0]: expected a table"),
        ("[[ignore]]\nrule = 'AMP101'", "ampdoctor.toml: ignore[0]: reason is missing"),
        *((f"[[ignore]]\nrule = 'AMP101'\nreason = '{blank}'", "reason is missing") for blank in BLANK),
        ("[[ignore]]\nrule = 'AMP1O1'\nreason = 'why'", "There is no rule 'AMP1O1'; did you mean"),
        ("[[ignore]]\nrule = 'AMP911'\nreason = 'why'", "is about ignores"),
        ("[[ignore]]\nrule = 'AMP101'\nreason = 'why'\ntensors = '*'", "did you mean tensor?"),
        ("[[ignore]]\nrule = 'AMP101'\nreason = 'why'\nexpires = '2027-01-31'", "expected a date without quotes"),
        (
            "[[ignore]]\nrule = 'AMP101'\nreason = 'why'\nexpires = 2027-01-31T10:00:00",
            "expected a date without quotes",
        ),
        ("jobs = " + "[" * 5000, "ampdoctor.toml is not TOML"),
        (".".join("a" * 300_000) + " = 1", "cannot read the configuration ampdoctor.toml: it is larger than 512 KiB"),
    ],
)
def test_what_a_file_says_wrongly_is_refused_with_its_place(text, sentence, folder, capsys, asked):
    (folder / "ampdoctor.toml").write_text(text)
    assert sentence in refused(capsys)
    assert asked == []


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "it is not UTF-8 text"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
    ],
)
@pytest.mark.parametrize("name", ["ampdoctor.toml", "pyproject.toml"])
def test_what_is_no_file_is_refused_and_not_waited_for(name, make, sentence, folder, capsys):
    make(folder / name)
    if name == "ampdoctor.toml" or "UTF-8" not in sentence:
        assert sentence in refused(capsys)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[tool.ampdoctor]\njobs = \n", "pyproject.toml is not TOML"),
        ("#" * MAX_BYTES + "\n[tool.ampdoctor]\nfail-on = 'warning'\n", "pyproject.toml: it is larger than 512 KiB"),
        ("[tool.black\n", None),
        ("[tool.black]\n# no word of [tool.ampdoctor]\n", None),
    ],
)
def test_what_is_wrong_with_a_pyproject_is_said_where_it_names_us(text, sentence, folder, capsys):
    (folder / "pyproject.toml").write_text(text)
    if sentence is None:
        assert setting(capsys)["jobs"]["value"] is None
    else:
        assert sentence in refused(capsys)


@pytest.mark.parametrize(
    "text", ["tool.ampdoctor.jobs = 2", "[tool]\nampdoctor = {jobs = 2}", "[tool.'ampdoctor']\njobs=2"]
)
def test_our_table_is_found_however_toml_lets_it_be_written(text, folder, capsys):
    (folder / "pyproject.toml").write_text(text)
    assert setting(capsys)["jobs"]["value"] == 2


def test_a_key_of_thousands_of_parts_is_refused_unparsed(folder, capsys):
    (folder / "ampdoctor.toml").write_text(f"a{'.a' * 20_000} = 1")
    assert main(["scan", "x"]) == 2
    assert "line 1 has more than 500 dots" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_the_configuration(folder, capsys):
    (folder / "ampdoctor.toml").write_bytes(b"\xef\xbb\xbfjobs = 2\n")
    assert setting(capsys)["jobs"]["value"] == 2


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("missing.toml", None, "cannot read the configuration missing.toml: No such file"),
        ("pyproject.toml", "[tool.black]\n", "pyproject.toml has no table [tool.ampdoctor]"),
        ("pyproject.toml", "[tool]\nampdoctor = 1\n", "tool.ampdoctor is no table"),
        ("", None, "--config is empty"),
    ],
)
def test_a_named_file_must_be_one(name, text, sentence, folder, capsys):
    if text is not None:
        (folder / name).write_text(text)
    assert sentence in refused(capsys, "--config", name)


def test_values_of_the_environment_are_refused_by_the_variables_name(folder, capsys, monkeypatch):
    monkeypatch.setenv("AMPDOCTOR_FAIL_ON", "all")
    assert "AMPDOCTOR_FAIL_ON: 'all' is not one of 'error'" in refused(capsys)


def test_paths_are_relative_to_the_files_folder(folder, capsys, monkeypatch):
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    (folder / "ampdoctor.toml").write_text(
        "output = '-'\nreport = ['json=r.json', 'human=sub/h.txt', 'jsonl=-']\nbaseline = 'ci/base.json'\n"
    )
    found = setting(capsys)
    assert found["report"]["value"] == ["json=../r.json", "human=../sub/h.txt", "jsonl=-"]
    assert (found["output"]["value"], found["baseline"]["value"]) == ("-", "../ci/base.json")
    (folder / "ampdoctor.toml").write_text("batches = 'data.py:make'\nloss = 'package/losses.py:mean'\napp-dir = '.'\n")
    found = setting(capsys, command="bisect-nan")
    assert [found[key]["value"] for key in ("batches", "loss", "app-dir")] == [
        "../data.py:make",
        "../package/losses.py:mean",
        "..",
    ]


STRANGERS = [
    ("output = '/tmp/mine.txt'", "output"),
    ("report = ['json=a.json', 'json=../../mine']", "report"),
    ("output = 'link/mine.txt'", "output"),
    ("output = '.git/config'", "hidden"),
    ("report = ['markdown=.github/workflows/x.yml']", "hidden"),
    ("[profile]\nsave = '../mine'", "profile.save"),
    ("app-dir = '..'", "app-dir"),
    ("loss = '/srv/mine.py:go'", "loss"),
    ("[bisect-nan]\nbatches = 'os:abort'", "bisect-nan.batches: os:abort is a module"),
    ("model = '../mine.py:make'", "model"),
    ("export = ['csv=~/mine']", "export"),
    ("export = ['openmetrics=.github/x.prom']", "hidden"),
    ("export = ['openmetrics=:9464']", "export: openmetrics=:9464 sends the run's numbers to where it says"),
    ("[health]\nexport = ['wandb=somebody/project']", "health.export: wandb=somebody/project sends"),
    ("[run]\nhealth = '../mine'", "run.health"),
]


@pytest.mark.parametrize(("text", "said"), STRANGERS)
def test_a_strangers_file_neither_writes_nor_runs_what_lies_outside_its_folder(text, said, folder, capsys, asked):
    (folder / "link").symlink_to(folder.parent, target_is_directory=True)
    (folder / "ampdoctor.toml").write_text(text)
    sentence = refused(capsys)
    assert said in sentence
    assert "was found, not named with --config" in sentence
    assert asked == []


def test_a_named_file_and_the_environment_may_name_a_server(folder, capsys, monkeypatch):
    (folder / "inner").mkdir()
    (folder / "inner" / "ci.toml").write_text("[health]\nexport = ['wandb=me/project', 'csv=~/out', 'csv=../out']\n")
    found = setting(capsys, "--config", "inner/ci.toml", command="health")
    assert found["export"]["value"] == ["wandb=me/project", f"csv={Path('~/out').expanduser()}", "csv=out"]
    monkeypatch.setenv("AMPDOCTOR_EXPORT", "mlflow=https://mine.example")
    assert setting(capsys, command="health")["export"]["value"] == ["mlflow=https://mine.example"]


@pytest.fixture
def strangers(monkeypatch):
    """Return a function that gives files to another user."""

    def give(*files):
        if os.getuid() == 0:
            for file in files:
                os.chown(file, 12345, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

    return give


@pytest.mark.parametrize("text", ["exit-zero = true", "no = TOML"])
def test_a_file_of_another_user_is_not_read_and_named_on_stderr(text, folder, capsys, strangers, stub_workflow):
    stub_workflow("scan", lambda path, *, progress=None, **options: SICK)
    (folder / "ampdoctor.toml").write_text(text)
    strangers(folder / "ampdoctor.toml")
    assert main(["scan", "x"]) == 1
    assert capsys.readouterr().err == (
        "ampdoctor: ampdoctor.toml is another user's and not read: "
        "--config ampdoctor.toml accepts it, --isolated is silent\n"
    )
    assert main(["scan", "x", "--isolated"]) == 1
    assert capsys.readouterr().err == ""
    if text == "exit-zero = true":
        assert main(["scan", "x", "--config", "ampdoctor.toml"]) == 0


def test_a_strangers_link_to_a_file_of_ones_own_is_not_followed(folder, capsys, strangers, asked):
    (folder / "mine.toml").write_text("fail-on = 'warning'\n")
    (folder / "ampdoctor.toml").symlink_to("mine.toml")
    strangers(folder / "ampdoctor.toml")
    assert main(["scan", "x"]) == 0
    assert "another user's" in capsys.readouterr().err


def test_ones_own_link_to_a_strangers_file_is_not_followed(folder, capsys, strangers, asked):
    (folder / "theirs.toml").write_text("fail-on = 'warning'\n")
    (folder / "ampdoctor.toml").symlink_to("theirs.toml")
    strangers(folder / "theirs.toml")
    assert main(["scan", "x"]) == 0
    assert "another user's" in capsys.readouterr().err


def test_a_report_does_not_overwrite_the_configuration(folder, capsys, asked):
    (folder / "ampdoctor.toml").write_text("output = 'ampdoctor.toml'\n")
    assert "it is what is to be read" in refused(capsys)
    assert asked == []


def test_help_reads_no_file_and_shows_the_tools_defaults(folder, capsys, monkeypatch):
    (folder / "ampdoctor.toml").write_text("fail-on = 'warning'\n")
    monkeypatch.setenv("AMPDOCTOR_FAIL_ON", "never")
    assert main(["scan", "--help"]) == 0
    assert "[default: error]" in capsys.readouterr().out
    (folder / "ampdoctor.toml").write_text("broken")
    assert main(["scan", "--help"]) == 0
    assert main(["rule", "AMP101"]) == 0
    assert main(["--version"]) == 0


def test_a_setting_for_replays_does_not_refuse_a_saved_profile(folder, capsys, monkeypatch, stub_workflow):
    (folder / "run.profile").write_text("{}")
    monkeypatch.setattr("ampdoctor.cli.replay_commands.is_profile", lambda target: True)
    stub_workflow("recommend", None)
    monkeypatch.setattr("ampdoctor.workflows.recommend.recommend_from_file", lambda *_: HEALTHY, raising=False)
    (folder / "ampdoctor.toml").write_text("steps = 9\n")
    assert main(["recommend", "run.profile"]) == 0
    assert main(["recommend", "run.profile", "--steps", "9"]) == 2
    assert "--steps: only for a replay" in capsys.readouterr().err


def test_show_config_needs_no_target_and_examines_nothing(folder, capsys, asked):
    (folder / "pyproject.toml").write_text(
        "[tool.ampdoctor]\nfail-on = 'warning'\n[tool.ampdoctor.rules.AMP107]\nseverity = 'note'\n"
        "[[tool.ampdoctor.ignore]]\nrule = 'AMP101'\ntensor = 'a*'\nreason = 'we know'\nexpires = 2030-01-31\n"
    )
    assert main(["scan", "--show-config"]) == 0
    assert main(["scan", "x", "--show-config", "--list"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "configuration file: pyproject.toml" in lines
    assert 'fail-on = "warning" pyproject.toml: tool.ampdoctor.fail-on' in lines
    assert "jobs = not set default" in lines
    assert "list = true --list" in lines
    assert 'rules.AMP107.severity = "note" pyproject.toml: tool.ampdoctor.rules.AMP107.severity' in lines
    assert "ignore rule AMP101, tensor a*, expires 2030-01-31: we know pyproject.toml:5" in lines
    assert asked == []


def test_control_characters_of_a_file_stay_out_of_the_terminal(folder, capsys):
    (folder / "ampdoctor.toml").write_text('[[ignore]]\nrule = "AMP101"\nreason = "\\u001b[31m\\u202e"\n')
    assert main(["scan", "--show-config"]) == 0
    (folder / "ampdoctor.toml").write_text('"\\u001b]0;x" = 1\n')
    assert main(["scan", "x"]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\u202e" not in captured.out


def commands():
    import typer

    group = typer.main.get_command(app)
    return {n: c for n, c in group.commands.items() if isinstance(c, ConfiguredCommand)}


def test_every_option_of_a_command_is_a_setting_or_of_one_run():
    keys = {name: [*command.settings] for name, command in commands().items()}
    assert keys.pop("plan") == keys["merge"]  # all else that it takes describes the one job
    for name in keys:
        command = commands()[name]
        options = {opt.removeprefix("--") for p in command.params for opt in p.opts if opt.startswith("--")}
        apart = {"config", "isolated", "show-config", "write-baseline", *(["module"] if name == "run" else [])}
        assert options - command.settings.keys() == apart, name


def test_what_every_option_does_with_the_place_that_it_names_stands_in_one_table():
    places = {"FILE", "DIR", "FOLDER", "PATH", "OLD", "MODULE:NAME", "SPEC", "FORMAT=FILE", "KIND=TARGET"}
    options = [one for command in commands().values() for one in command.params if one.param_type_name == "option"]
    assert {one.opts[0].removeprefix("--") for one in options if one.metavar in places} == set(USES)


def test_a_key_means_the_same_in_every_command():
    kinds = {}
    for command in commands().values():
        for key, one in command.settings.items():
            kind = one.type_descriptor.annotation
            assert kinds.setdefault(key, kind) == kind


def test_severities_and_ignores_of_the_file_reach_the_report(folder, stub_workflow, capsys, check_report):
    stub_workflow("scan", lambda *_, **__: replace(SICK, command="scan"))
    (folder / "ampdoctor.toml").write_text(
        "[rules.AMP201]\nseverity = 'note'\n[[ignore]]\nrule = 'AMP301'\nreason = 'known'\n"
        "[[ignore]]\nrule = 'AMP102'\nreason = 'gone'\n"
    )
    assert main(["scan", "x", "--format", "json"]) == 0
    report = check_report(capsys.readouterr().out)
    assert report["verdict"] == "healthy"
    assert [(f["code"], f["severity"]) for f in report["findings"]] == [("AMP911", "warning"), ("AMP201", "note")]
    assert [s["finding"]["code"] for s in report["suppressed"]] == ["AMP301"]
    assert report["findings"][0]["where"]["source"] == {"file": "ampdoctor.toml", "line": 6}
    assert report["findings"][0]["where"]["phase"] == "configuration"


def test_a_code_that_has_become_another_is_read_as_that(folder, stub_workflow, capsys, check_report):
    finding = replace(SICK.findings[0], code="AMP720", name="gradient-jump")
    stub_workflow("scan", lambda *_, **__: replace(SICK, command="scan", findings=(finding,)))
    (folder / "ampdoctor.toml").write_text("[rules.AMP704]\nseverity = 'note'\n")
    assert main(["scan", "x", "--format", "json", "--threshold", "AMP704.times=2"]) == 0
    assert check_report(capsys.readouterr().out)["findings"][0]["severity"] == "note"
