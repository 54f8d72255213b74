from __future__ import annotations

import re

import pytest

from ampdoctor.evidence.log_records import LookLine, StepLine
from tests.health.logs import HEADER, steps, write

SICK = [HEADER, *steps(0, 40), StepLine(step=40, loss=float("nan"), skipped=False)]


@pytest.fixture
def run(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: typed("health", *arguments)


def test_exit_codes_and_a_written_report(run, tmp_path, check_report):
    write(tmp_path / "well" / "log.jsonl", [HEADER, *steps(0, 40)])
    write(tmp_path / "sick" / "log.jsonl", SICK)
    assert run("well").returncode == 0
    done = run("sick", "--output", "report.json", "--format", "json")
    assert (done.returncode, done.stdout) == (1, "")
    report = check_report((tmp_path / "report.json").read_text())
    assert [one["code"] for one in report["findings"]] == ["AMP722"]
    assert run("sick", "--fail-on", "never").returncode == 0


@pytest.mark.parametrize(
    ("log", "export"),
    [
        ("run", "openmetrics=run/log.jsonl"),
        ("run", "openmetrics=run/run.json"),
        ("run", "openmetrics=link"),
        ("lightning_logs/version_0", "csv=lightning_logs/version_0"),
        ("mine.csv", "openmetrics=mine.csv"),
    ],
)
def test_an_export_is_not_written_over_the_log(run, tmp_path, log, export):
    write(tmp_path / "run" / "log.1.jsonl", [HEADER, *steps(0, 20)])
    write(tmp_path / "run" / "log.jsonl", steps(20, 40))
    (tmp_path / "link").symlink_to("run/log.jsonl")
    table = "step,loss\n" + "".join(f"{at},2.5\n" for at in range(40))
    for name in ("mine.csv", "lightning_logs/version_0/metrics.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(table)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    done = run(log, "--export", export)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ampdoctor: error: ")
    assert done.stderr.count("\n") == 1
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert after == before


def test_the_people_read_the_verdict_the_run_and_the_command_of_its_bundle(run, tmp_path):
    look = LookLine(step=40, verdict="sick", bundle="bundle-40", reason="the loss is not finite")
    scaled = [StepLine(step=at, loss=2.0, loss_scale=65536.0 if at else 131072.0, skipped=at == 0) for at in range(40)]
    write(tmp_path / "run" / "log.jsonl", [HEADER, *scaled, *SICK[-1:], look])
    done = run("run")
    assert done.returncode == 1
    for said in (
        "verdict: sick (1 error",
        "ampdoctor rule AMP722",
        "run small (run)",
        "steps 0 to 40, fp16, loss 2 to 2, then not finite since step 40, still running",
        "skipped  1 step (2.44%)",
        "not finite  the loss of 1 step",
        "loss scale 131072 at first, 65536 at least, 131072 at most, 65536 in the end; 0 growths, 1 backoff",
        "    ampdoctor bisect-nan run/bundle-40\n",
        "next: the sick step was kept, and is replayed by:\n  ampdoctor bisect-nan run/bundle-40",
    ):
        assert said in re.sub(r"(?<=\w)  +(?=\w)", "  ", done.stdout)


def test_an_export_may_lie_beside_the_log_that_it_is_of(run, tmp_path):
    write(tmp_path / "run" / "log.jsonl", [HEADER, *steps(0, 40)])
    for _ in range(2):
        assert run("run", "--export", "csv=run", "--export", "openmetrics=run/run.prom").returncode == 0
    assert len((tmp_path / "run" / "steps.csv").read_text().splitlines()) == 81
