"""Settings of a run's own scaler that cannot work are findings of both commands, never a crash; good ones are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ampdoctor.cli.main import main
from tests.workflows.advising.scaler_runs import net

RUNS = str(Path(__file__).with_name("scaler_runs.py")) + ":make"

BAD = {
    "negative": ("AMP404", "warning", "scale -1 is negative"),
    "never grows": ("AMP404", "warning", "growth_interval 0 never comes round"),
    "kills": ("AMP404", "warning", "backoff_factor 0 is not between 0 and 1"),
    "explodes": ("AMP404", "warning", "growth_factor inf is not a number of at least 1"),
    "infinite": ("AMP401", "error", "scale"),
    "zero": ("AMP401", "error", "scale"),
}
GOOD = ("tensor", "cuda", "disabled", "subclass")

commands = pytest.mark.parametrize("command", ["bisect-nan", "recommend"])


def reported(capsys, check_report, command, name, *options, factor=1.0):
    """(exit code, report) of a command."""
    arguments = [command, RUNS, "--device", "cpu", "--arg", f"name={json.dumps(name)}", "--arg", f"factor={factor}"]
    code = main([*arguments, "--format", "json", *options])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, check_report(printed.out)


@pytest.mark.parametrize(
    ("name", "command", "factor"),
    [
        ("negative", "recommend", 1e4),
        ("never grows", "bisect-nan", 1.0),
        ("kills", "bisect-nan", 1.0),
        ("explodes", "bisect-nan", 1e5),
        ("infinite", "bisect-nan", 1.0),
        ("zero", "bisect-nan", 1e5),
    ],
)
def test_settings_that_cannot_work_are_a_finding(capsys, check_report, command, name, factor):
    code, severity, words = BAD[name]
    status, report = reported(capsys, check_report, command, name, factor=factor)
    (finding,) = [found for found in report["findings"] if found["code"] == code]
    assert words in finding["message"]
    assert severity in ("warning", finding["severity"])
    assert status == {"healthy": 0, "sick": 1, "inconclusive": 2}[report["verdict"]]
    if report["verdict"] == "inconclusive":  # no step was taken
        assert "8 of 8" in [check["result"] for check in report["checks"]]
    if severity == "error":
        assert report["verdict"] == "sick"
        assert finding["prescription"]["kind"] in ("scaler", "init_scale")
    if command == "recommend":
        assert report["scaler"]["change"]
        recommended = report["scaler"]["recommended"]
        assert recommended["init_scale"] > 0
        assert recommended["growth_interval"] >= 1
        assert 0 < recommended["backoff_factor"] < 1


@pytest.mark.parametrize(("name", "command"), [*((name, "bisect-nan") for name in GOOD), ("settled", "recommend")])
def test_settings_that_work_are_none(capsys, check_report, command, name):
    status, report = reported(capsys, check_report, command, name)
    assert status == 0
    assert not {found["code"] for found in report["findings"]} & {"AMP401", "AMP403", "AMP404", "AMP411"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("grows back", "factor must be"),  # what the constructor refuses
        ("text", "the run's scaler state holds something else than a number as scale"),
        ("bool interval", "the run's scaler state holds something else than a number as growth_interval"),
    ],
)
def test_what_is_no_setting_is_one_sentence(capsys, check_report, name, sentence):
    status, report = reported(capsys, check_report, "bisect-nan", name)
    assert status == 2
    (error,) = report["errors"]
    assert sentence in error["message"]


def test_an_interval_that_torch_refuses_is_named_with_torchs_own_words(capsys, check_report):
    status, report = reported(capsys, check_report, "recommend", "fraction")
    assert (status, report["findings"][0]["code"]) == (1, "AMP407")
    assert "TypeError" in report["findings"][0]["message"]


def saved(tmp_path, **settings):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = {"model": net().state_dict(), "scaler": scaler.state_dict() | {"_growth_tracker": 3} | settings}
    torch.save(state, tmp_path / "checkpoint.pt")
    return "--checkpoint", str(tmp_path / "checkpoint.pt")


def lost(report):
    return [(found["severity"], found["evidence"]) for found in report["findings"] if found["code"] == "AMP411"]


@commands
def test_settings_that_the_checkpoint_overwrites_are_a_warning(capsys, check_report, command, tmp_path):
    status, report = reported(capsys, check_report, command, "other settings", *saved(tmp_path))
    ((severity, evidence),) = lost(report)
    assert (status, severity) == (0, "warning")
    assert evidence["settings"] == {
        "growth_interval": {"run": 500, "checkpoint": 2000, "replay": 2000},
        "backoff_factor": {"run": 0.25, "checkpoint": 0.5, "replay": 0.5},
    }
    (finding,) = [found for found in report["findings"] if found["code"] == "AMP411"]
    assert "scaler.set_growth_interval(500)" in finding["prescription"]["value"]


def test_settings_of_a_scaler_that_the_run_hands_over_are_a_note(capsys, check_report, tmp_path):
    _, report = reported(capsys, check_report, "bisect-nan", "own object", *saved(tmp_path, scale=65536.0))
    ((severity, evidence),) = lost(report)
    assert severity == "note"
    assert evidence["settings"]["growth_interval"] == {"run": 500, "checkpoint": 2000, "replay": 500}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("settled", {"scale": 32.0}),  # the scale is state
        ("other settings", {"growth_interval": 500, "backoff_factor": 0.25}),
        ("cuda", {"growth_interval": 500}),  # GradScaler's defaults: nobody asked for them
        ("disabled", {}),
    ],
)
def test_settings_that_nobody_loses_are_none(capsys, check_report, tmp_path, name, settings):
    _, report = reported(capsys, check_report, "bisect-nan", name, *saved(tmp_path, **settings))
    assert lost(report) == []


def test_a_frozen_counter_and_bad_settings_that_come_with_the_checkpoint_are_found(capsys, check_report, tmp_path):
    bad = saved(tmp_path, backoff_factor=0.0, growth_interval=100, _growth_tracker=150)
    _, report = reported(capsys, check_report, "bisect-nan", "settled", *bad)
    assert {"AMP403", "AMP404"} <= {found["code"] for found in report["findings"]}


def test_the_past_in_the_checkpoints_log_is_told(capsys, check_report, tmp_path):
    path = saved(tmp_path, _growth_tracker=0, scale=2.0**-20)[1]
    (tmp_path / "checkpoint.pt").rename(tmp_path / "model.pt")
    scales = [1024.0] * 300 + [2.0**k for k in range(9, -21, -1) for _ in range(20)]
    rows = [json.dumps({"step": step, "loss": 1.0 + step % 7, "scale": scale}) for step, scale in enumerate(scales)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    _, report = reported(capsys, check_report, "bisect-nan", "settled", "--checkpoint", str(Path(path).parent))
    (finding,) = [found for found in report["findings"] if found["code"] == "AMP723"]
    assert finding["severity"] == "warning"
    assert finding["evidence"]["scale"] < 1


def test_a_scale_that_a_backoff_of_zero_kills_is_named_where_it_dies(capsys, check_report):
    status, report = reported(capsys, check_report, "bisect-nan", "kills", factor=1e5)
    dead, settings = report["findings"]
    assert (status, dead["code"], dead["cause"], dead["where"]["step"]) == (1, "AMP401", "scaler_collapse", 1)
    assert dead["prescription"]["kind"] == "scaler"
    assert settings["code"] == "AMP404"
    assert settings["evidence"]["backoff_factor"] == 0.0
