"""`ampdoctor run`: what it hands to the watch and to the script, what it says, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ampdoctor.cli.main import main
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Report
from ampdoctor.workflows import watch as seam
from ampdoctor.workflows.log_listeners import Tally
from ampdoctor.workflows.requests import WatchRequest

FOUND = Finding(
    code="AMP201",
    name="forward-overflow",
    severity="error",
    message="step 7: an infinity from finite inputs",
    cause="forward_overflow",
    where=Where(step=7, phase="forward", module="ff.wo"),
)
SICK = Report(command="run", target={"factory": "train.py"}, verdict="sick", findings=(FOUND,))

SEEN = "600 steps watched, healthy, 0 skipped (the watch took 0.6 % of the time)"
BEGINS = "ampdoctor: watching train.py; log in {}; live view: ampdoctor health {} --follow"
NO_STEP = "ampdoctor: warning: no optimizer step was seen in this process: nothing of train.py was judged"

SICK_SCRIPT = """
import sys
import torch
sys.stderr.close()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for value in (1.0, float("nan"), 1.0):
    model(torch.full((1, 2), value)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def watch(monkeypatch):
    """The watch that is asked for: its `requests`; `found` is its report, and `fails` says where it raises."""

    one = SimpleNamespace(requests=[], found=None, fails=None, open=0)
    one.doctor = SimpleNamespace(place=SimpleNamespace(rank=0, world=1), trained=True, summary=lambda: SEEN)

    @contextmanager
    def watching(request, **_):
        one.requests.append(request)
        if one.fails == "before":
            raise RuntimeError("no hooks")
        one.open += 1
        yield (made := SimpleNamespace(report=None, doctor=one.doctor, ended=lambda error: None))
        one.open -= 1
        made.report = one.found
        if one.fails == "after":
            raise RuntimeError("no hooks")

    monkeypatch.setattr(seam, "watching", watching)
    return one


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Return a function that runs the command in this process, in a folder of its own: (code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["ampdoctor"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\nexec(sys.argv[1] if sys.argv[1:] else '')\n")
    before = signal.getsignal(signal.SIGINT)

    def call(*arguments):
        code = main(["run", *arguments])
        return (code, *capfd.readouterr())

    yield call
    signal.signal(signal.SIGINT, before)


def test_what_is_typed_before_the_script_is_ours_and_the_rest_is_its_own(run, watch, tmp_path):
    typed = "--every 7 --on-sick stop --look sync --guard --bundle-max 512MiB --record-batches 9 --no-bundle".split()
    typed += ["--health", "kept", "--threshold", "AMP107.saturated=0.1"]
    code, out, err = run(*typed, "train.py", "", "--every", "9", "--", "-m", "--health=x", "--help")
    assert (code, out) == (0, "['', '--every', '9', '--', '-m', '--health=x', '--help']\n")
    assert err.splitlines() == [BEGINS.format("kept", "kept"), f"ampdoctor: {SEEN}"]
    (request,) = watch.requests
    assert (request.script, request.is_module, request.health) == ("train.py", False, str(tmp_path / "kept"))
    assert request.arguments == ("", "--every", "9", "--", "-m", "--health=x", "--help")
    assert (request.every, request.on_sick, request.look, request.guard) == (7, "stop", "sync", True)
    assert (request.bundle, request.bundle_max, request.record_batches) == (False, 512 * 1024**2, 9)
    assert [moved.key for moved, _ in request.thresholds.moved] == ["AMP107.saturated"]
    assert watch.open == 0


def test_what_is_sick_is_said_on_stderr_and_is_the_exit_code(run, watch):
    watch.found = SICK
    code, out, err = run("train.py")
    assert (code, out) == (1, "[]\n")
    assert "ampdoctor rule AMP201" in err
    assert run("--fail-on", "never", "train.py")[0] == 0
    assert run("train.py", "sys.exit(5)")[0] == 5
    assert run("train.py", "sys.exit(0)")[0] == 1


@pytest.mark.parametrize(("statement", "code"), [("sys.exit(5)", 5), ("1 / 0", 1), ("sys.exit('text')", 1)])
def test_the_scripts_own_end_goes_first(run, watch, statement, code):
    answered, out, err = run("-q", "train.py", statement)
    assert (answered, out) == (code, f"{[statement]}\n")
    assert "ampdoctor" not in err
    assert watch.open == 0


def test_where_stderr_takes_nothing_the_script_ends_as_it_would(run_cli, tmp_path):
    (tmp_path / "train.py").write_text(SICK_SCRIPT)
    done = run_cli("run", "--health", "kept", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "trained\n", BEGINS.format("kept", "kept") + "\n")
    log = (tmp_path / "kept" / "log.jsonl").read_text()
    (look,) = [line for line in map(json.loads, log.splitlines()) if line["kind"] == "look"]
    assert look["device"] == "cpu"  # for which the lines to paste are made


def test_a_report_that_is_asked_for_is_written_whatever_was_found(run, watch, tmp_path, check_report):
    moves = "import os; os.mkdir('deeper'); os.chdir('deeper')"
    assert run("-q", "--output", "health.json", "--format", "json", "train.py", moves) == (0, f"{[moves]}\n", "")
    report = check_report((tmp_path / "health.json").read_text())
    assert (report["command"], report["verdict"]) == ("run", "not_judged")
    assert report["target"] == {"factory": "train.py", "arguments": [moves]}
    assert report["run"] == {}  # nothing was logged
    assert Path.cwd() == tmp_path / "deeper"
    os.chdir(tmp_path)
    watch.found = SICK
    assert run("--report", "json=sick.json", "-q", "train.py")[0] == 1
    report = check_report((tmp_path / "sick.json").read_text())
    assert (report["command"], report["verdict"]) == ("run", "sick")


@pytest.mark.parametrize("kind", ["no torch", "no training"])
def test_where_no_step_was_seen_that_is_said_also_with_q_and_not_of_a_script_that_fails(run, watch, kind):
    watch.doctor.trained, watch.doctor.summary = False, lambda: None
    watch.doctor = None if kind == "no torch" else watch.doctor
    assert run("--health", "a b", "train.py")[2].splitlines() == [BEGINS.format("'a b'", "'a b'"), NO_STEP]
    assert run("-q", "train.py")[2] == f"{NO_STEP}\n"
    assert run("-q", "train.py", "sys.exit(3)")[2] == ""


JUDGED = [(False, 0, 7, 0, "healthy"), (True, 0, 0, 0, "no finding"), (False, 1, 0, 0, "no finding")]
JUDGED += [(False, 0, 8, 0, "no finding"), (False, 0, 0, 1, "1 finding")]


@pytest.mark.parametrize(("gap", "code", "lost", "warned", "said"), JUDGED)
def test_healthy_is_said_where_steps_were_judged_and_nothing_was_found_or_missed(gap, code, lost, warned, said):
    tally = Tally(incomplete=gap)
    tally.warned |= {("AMP407", 3)} if warned else set()
    tally.ended(code)
    request = WatchRequest(health="/a b", named="a b", script="train.py")
    shown = tally.said(SimpleNamespace(attempted=40, taken=39), None, None, request, lost=lost)
    assert shown.startswith(f"40 steps watched, {said}, 1 skipped (the watch took ")
    assert shown.endswith("; what to do: ampdoctor health 'a b'") == (said == "1 finding")


@pytest.mark.parametrize(
    ("arguments", "warned", "said"),
    [
        ((), 0, "; fp16 without a GradScaler: lost gradients are found by ampdoctor bisect-nan train.py"),
        (("--lr", "1"), 0, "found by ampdoctor bisect-nan train.py -- --lr 1"),
        ((), 1, "; what to do: ampdoctor health 'a b'"),
    ],
)
def test_fp16_without_a_scaler_is_not_called_healthy(arguments, warned, said):
    tally = Tally(incomplete=False)
    tally.unscaled = True
    tally.warned |= {("AMP407", 3)} if warned else set()
    tally.ended(0)
    request = WatchRequest(health="/a b", named="a b", script="train.py", arguments=arguments)
    shown = tally.said(SimpleNamespace(attempted=40, taken=40), None, None, request, lost=0)
    assert "healthy" not in shown
    assert shown.endswith(said)


def test_rank_0_alone_says_what_was_watched(run, watch, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    watch.doctor.place.rank = 1
    assert run("train.py")[2] == ""


@pytest.mark.parametrize(("fails", "said"), [("before", "the watch cannot begin"), ("after", "the watch has failed")])
def test_a_watch_that_fails_costs_the_script_nothing(run, watch, fails, said):
    watch.fails = fails
    code, out, err = run("train.py", "sys.exit(3)")
    assert (code, out) == (3, "['sys.exit(3)']\n")
    assert f"{said}: RuntimeError: no hooks" in err


REFUSED = [
    ([], "Missing argument 'SCRIPT'"),
    ([""], "SCRIPT is empty"),
    (["trian.py"], "there is no file trian.py; is train.py meant?"),
    (["nothing.py"], "there is no file nothing.py"),
    (["folder"], "folder is a folder: name a script in it"),
    (["-m", "train.py"], "-m train.py: a module is named without .py; a file without -m"),
    (["-m", "no_such_module"], "cannot run no_such_module: No module named no_such_module"),
    (["book.ipynb"], "book.ipynb is a notebook: `jupyter nbconvert --to script book.ipynb` makes a script of it"),
    (["job.sh"], "job.sh is a script of the shell"),
    (["launch"], "launch is a script of the shell"),
    (["python", "train.py", "--lr", "1"], "python is no script: write `ampdoctor run train.py`"),
    (["torchrun", "--nproc-per-node", "2", "train.py"], "`torchrun -m ampdoctor run train.py`"),
    (["--bundle-max", "4 elephants", "train.py"], "--bundle-max 4 elephants: a size is a number with its unit"),
]


@pytest.mark.parametrize(("typed", "said"), REFUSED, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_what_cannot_be_run_is_one_sentence(run, watch, tmp_path, typed, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "book.ipynb").write_text("{}")
    (tmp_path / "job.sh").write_text("python train.py")
    (tmp_path / "launch").write_text("#!/bin/bash\npython train.py")
    code, out, err = run(*typed)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "given",
    [
        ("--export", "openmetrics=kept/log.jsonl"),
        ("--export", "openmetrics=kept"),
        ("--report", "json=kept/log.jsonl"),
        ("--export", "openmetrics=train.py"),
    ],
)
def test_no_part_of_its_own_log_is_written_over_also_of_one_that_is_yet_to_be(run, watch, tmp_path, given):
    for _ in range(2):
        code, out, err = run("--health", "kept", *given, "train.py", "print('ran')")
        assert (code, out) == (2, "")
        assert "ampdoctor: error: " in err
        assert "cannot write" in err
        (tmp_path / "kept").mkdir(exist_ok=True)
    assert watch.requests == []
    assert run("--health", "kept", "--export", "csv=kept", "--report", "json=kept/a.json", "train.py", "")[0] == 0


def test_where_the_log_goes_is_said_before_the_script_and_refused_before_it_runs(run, watch, tmp_path):
    code, _, err = run("-q", "--export", "csv=out", "--export", "csv=more", "train.py", "")
    assert (code, err) == (0, "")
    assert [str(one) for one in watch.requests[0].export] == [f"csv={tmp_path}/out", f"csv={tmp_path}/more"]
    code, out, err = run("--export", "grafana=x", "train.py", "")
    assert (code, out) == (2, "")
    assert err.startswith("ampdoctor: error: --export grafana=x: no such sink; there are tensorboard=DIR")
    assert len(watch.requests) == 1
