"""The benchmarks measure what they say: in small, without a word about how fast this machine is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from ampdoctor.evidence.run_facts import KINDS
from ampdoctor.ranges.profile import RunFacts

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = {"blocks": 1, "width": 64, "batch": 1, "context": 8, "vocabulary": 16}


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def overhead():
    return script("overhead")


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_every_contender_takes_a_step_and_leaves_no_hook(precision, overhead, capsys):
    contest = overhead.measure(precision, 2, peers=True, show_parts=True, **SMALL)
    everybody = {overhead.LOOP, overhead.BARE, overhead.PROBED, *(watcher.title for watcher in overhead.WATCHERS)}
    assert {*contest.times, *contest.absent} == everybody
    needed = {
        watcher.title for watcher in overhead.WATCHERS if watcher.needs.split(".")[0] in {"", "torch", "transformers"}
    }
    assert needed <= {*contest.times}
    assert {len(taken) for taken in contest.times.values()} == {2}
    assert all(seconds > 0 for taken in contest.times.values() for seconds in taken)
    assert len(contest.ratios(overhead.PROBED, overhead.BARE)) == 2
    for module in contest.session.model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
    said = capsys.readouterr().out
    assert all(f"| {name} |" in said for name in everybody)
    assert "target: below every peer that sees both ways" in said
    assert "    state " in said


def test_a_peer_that_fails_is_left_out_with_its_reason(overhead, monkeypatch, capsys):
    def attach(model, optimizer):
        raise ValueError("not today")

    broken = overhead.WATCHERS[0].__class__("broken", "f+b", attach)
    absent = overhead.WATCHERS[0].__class__("absent", "f+b", attach, needs="no_such_module")
    monkeypatch.setattr(overhead, "WATCHERS", (broken, absent))
    contest = overhead.measure("fp32", 1, peers=True, **SMALL)
    assert set(contest.times) == {overhead.LOOP, overhead.BARE, overhead.PROBED}
    said = capsys.readouterr().out
    assert "| broken | | | | | not run: ValueError: not today |" in said
    assert "| absent | | | | | not run: ModuleNotFoundError" in said


def test_targets_hold_the_probe_against_the_best_rival_alone(overhead):
    contest = overhead.Contest.__new__(overhead.Contest)
    contest.watchers = {watcher.title: watcher for watcher in overhead.WATCHERS}
    contest.times = {overhead.LOOP: [1.0], overhead.BARE: [1.0], overhead.PROBED: [1.02]}
    contest.times |= {watcher.title: [1.2 if watcher.sees == "f+b" else 1.01] for watcher in overhead.WATCHERS}
    contest.times[overhead.FLOOR] = [1.01]
    first, second = overhead.targets(contest)
    assert first.endswith("met (1.020)")
    assert "met (1.020; " in second
    assert "takes 1.200" in second
    contest.times["plain hooks, isfinite each"] = [1.01]
    assert "MISSED (1.020; plain hooks, isfinite each takes 1.010)" in list(overhead.targets(contest))[1]


def test_the_probe_looks_at_every_kind_of_tensor(overhead):
    from ampdoctor.replay.session import Session

    session = Session(overhead.make_run(precision="fp32", **SMALL), device=torch.device("cpu"))
    assert session.has_step(0)
    spent = overhead.parts(session)
    parameters = len(list(session.model.parameters()))
    leaves = sum(not list(module.children()) for module in session.model.modules())
    assert {kind: checks for kind, (_, checks) in spent.items()} == {
        "loss": 1,
        "output": leaves + 1,  # and the root's
        "output_grad": leaves + 1,
        "grad": parameters,
        "state": 1,  # at once
    }


@pytest.fixture(scope="module")
def ranges():
    return script("ranges")


def test_a_measured_step_is_held_against_the_bare_one(ranges, capsys):
    contest = ranges.measure_steps(2, **SMALL)
    assert {name: len(taken) for name, taken in contest.times.items()} == dict.fromkeys(contest.probes, 2)
    assert contest.ratios(ranges.BARE) == [1.0, 1.0]
    profile = contest.probes[ranges.MEASURED][1].profile(RunFacts(precision="fp16"))
    assert profile.steps == 3  # and the one that warms up
    assert {site.kind for site in profile.sites} == set(KINDS)
    assert {site.half for site in profile.sites if site.kind == "activation_grad"} == {True, False}
    assert f"target: at most {ranges.STEP_TARGET} x" in capsys.readouterr().out


@pytest.mark.slow
def test_start_up_is_timed_for_every_contender():
    startup = script("startup")
    times = startup.measure(1)
    everybody = (startup.HELP, startup.SCAN, startup.PYTHON, startup.TORCH)
    assert {name: len(taken) for name, taken in times.items()} == dict.fromkeys(everybody, 1)
    assert times[startup.PYTHON][0] < times[startup.TORCH][0]  # a child of this process counts its memory as well


def test_the_runner_knows_every_script_of_speed_and_stops_at_the_first_failure(monkeypatch, capsys):
    run = script("run")
    # no speed; an hour; a browser; what another one measures, or looks into
    others = {
        "run.py",
        "alerts.py",
        "diagnosis.py",
        "recommend.py",
        "html_report.py",
        "versions.py",
        "real_runs.py",
        "reports.py",
        "where.py",
    }
    assert set(run.SCRIPTS) == {path.name for path in FOLDER.glob("*.py")} - others
    started = []

    def fake(command, **options):
        started.append((Path(command[1]).name, tuple(command[2:])))
        return run.subprocess.CompletedProcess(command, 3 if len(started) == 2 else 0)

    monkeypatch.setattr(run.subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick"])
    assert run.main() == 3
    assert started == [(name, small) for name, (_, small) in run.SCRIPTS.items()][:2]
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_the_search_until_sick_takes_turns_with_the_loop_by_hand(capsys, monkeypatch):
    until_sick = importlib.import_module("benchmarks.until_sick")
    monkeypatch.setitem(until_sick.SIZES, "1M", {"blocks": 1, "width": 64})
    ratios = until_sick.measure("1M", 8, "fp16", 4, most=16)
    assert len(ratios) == 2
    assert all(ratio > 0 for ratio in ratios)
    assert "| fp16 | 8 |" in capsys.readouterr().out


def test_a_long_log_is_what_a_run_writes_and_is_looked_at(tmp_path, monkeypatch, capsys):
    health_log = script("health_log")
    monkeypatch.setattr(health_log, "SEGMENT", 200_000)
    size = health_log.write_log(tmp_path, steps=2000, every=100, tensors=3)
    files = sorted(tmp_path.glob("log*.jsonl"))
    assert sum(path.stat().st_size for path in files) == size
    assert len(files) > 2
    monkeypatch.setattr(sys, "argv", ["health_log.py", "--steps", "300", "--tensors", "2"])
    health_log.main()
    said = capsys.readouterr().out
    assert "a look: " in said
    assert "300 steps, 0 findings" in said
