"""The benchmark of alerts: faults act where they should, rivals fire by their formulas, and the table counts right."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from ampdoctor.evidence.log_records import DetailLine, StepLine

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.alerting import healthy, logs, rivals, scoring, tasks  # noqa: E402
from benchmarks.alerting.harm import STAYS, harm_step  # noqa: E402
from benchmarks.alerting.logs import Record  # noqa: E402
from benchmarks.alerting.loop import Fault, clean_loss, take_step  # noqa: E402
from benchmarks.alerting.mechanisms import MECHANISMS  # noqa: E402
from benchmarks.alerting.scoring import Alarm  # noqa: E402


def script():
    spec = importlib.util.spec_from_file_location("benchmark_alerts", ROOT / "benchmarks" / "alerts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SICK = [name for kind, name in logs.names() if kind == "sick"]


def made(name, onset):
    """A sick training and its twin, in which everything is wrong from `onset` on."""
    mechanism, number = name.rsplit("/", 1)
    mechanism = MECHANISMS[mechanism]
    fault = mechanism.make(Random(name), 100)
    fault.onset = onset
    runs = [logs._run(mechanism.tasks[int(number)], mechanism, 3, 100) for _ in range(2)]
    return fault, *runs


def weights(run):
    return torch.cat([p.detach().float().flatten() for p in run.model.parameters()])


@pytest.mark.parametrize("name", [name for name in SICK if name.endswith("/0")])
def test_a_fault_does_nothing_before_its_onset_and_something_from_then_on(name):
    fault, sick, twin = made(name, 0 if name.startswith(("underflow", "updates")) else 3)
    fault.begin(sick)
    for step in range(fault.onset):
        assert take_step(sick, fault, step) == take_step(twin, Fault(), step)
    assert fault.onset == 0 or torch.equal(weights(sick), weights(twin))
    for step in range(fault.onset, fault.onset + 20):
        take_step(sick, fault, step)
        take_step(twin, Fault(), step)
        if not torch.equal(weights(sick), weights(twin)):
            return
    pytest.fail("after 20 steps nothing has changed")


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_task_is_learned_and_is_the_same_again(name):
    first, again = (tasks.TASKS[name](Random(5), 100) for _ in range(2))
    before = clean_loss(first)
    losses = [take_step(first, Fault(), step)[0] for step in range(100)]
    assert [take_step(again, Fault(), step)[0] for step in range(5)] == losses[:5]
    assert clean_loss(first) < before


@pytest.mark.slow
@pytest.mark.parametrize("name", healthy.RUNS)
def test_a_healthy_training_takes_its_steps(name):
    run = healthy.RUNS[name][0](Random(1), 40)
    assert all(math.isfinite(take_step(run, Fault(), step)[0]) for step in (0, 1, 20, 39))


@pytest.mark.slow
@pytest.mark.parametrize("name", healthy.LOOPS)
def test_a_loop_of_its_own_writes_a_log(name, tmp_path):
    healthy.LOOPS[name][0](Random(1), 6, tmp_path, 2)
    assert '"kind":"detail"' in (tmp_path / "log.jsonl").read_text()


TWIN = [1.0] * 100


@pytest.mark.parametrize(
    ("sick", "applied", "harm"),
    [
        ([1.0] * 31 + [1.2] * 69, None, 30),
        ([1.0] * 31 + [1.2] * (STAYS - 1) + [1.0] * 30, None, None),
        ([1.0] * 31 + [1.2] * STAYS + [1.0] * 29, None, 30),
        ([1.0] * 81 + [math.nan] * 19, None, 80),
        ([1.0] * 31 + [1.2] * 69, {30: False, 31: False}, 32),
        ([1.0] * 31 + [1.2] * 69, dict.fromkeys(range(30, 99), False), 30),
        ([1.2] * 100, None, 10),
    ],
)
def test_harm_is_the_first_applied_update_after_which_the_loss_stays_above(sick, applied, harm):
    taken = [True] * 99
    for step, was in (applied or {}).items():
        taken[step] = was
    assert harm_step(sick, TWIN, taken, 10) == harm


def steps(values):
    """Step lines of (loss, norm)."""
    return [StepLine(step=i, loss=loss, gradient_norm=norm) for i, (loss, norm) in enumerate(values)]


def noisy(count):
    draw = Random(4)
    return [(2 + 0.02 * draw.uniform(-1, 1), 1 + 0.02 * draw.uniform(-1, 1)) for _ in range(count)]


QUIET = noisy(150)


@pytest.mark.parametrize(
    ("rule", "after", "fires"),
    [
        (rivals.ZClip, [(2.0, 1.2)], 150),
        (rivals.SixSigma, [(2.3, 1.0)], 150),
        (rivals.SixSigma, [(2.0, 1.3)], 150),
        (rivals.KillLossSpike, [(4.5, 1.0)] * 5, 154),
        (rivals.SpikeDetection, [(5.8, 1.0), (7.5, 1.0)], 151),
        (rivals.FactorTen, [(2.0, 9.0), (2.0, 11.0)], 151),
        (rivals.LossWatchDog, [(4.5, 1.0)] * 3, 152),
        (rivals.Turbulence, [(2.0, 1.4), (2.0, 1.6)], 151),
    ],
)
def test_a_rival_fires_where_its_formula_does_and_not_before(rule, after, fires):
    one = rule()
    said = [line.step for line in steps(QUIET + after) if one.add(line)]
    assert said == [fires]


SUDDEN = Record(name="a/0", kind="sick", seed=0, task="text", steps=200, every=20, onset=100, harm=100, sudden=True)


@pytest.mark.parametrize(
    ("alarms", "found"),
    [
        ([Alarm(100)], True),
        ([Alarm(100, late=True)], False),
        ([Alarm(101)], False),
        ([Alarm(99)], False),
        ([Alarm(20), Alarm(100)], True),
    ],
)
def test_in_time_is_before_the_update_and_after_the_onset(alarms, found):
    assert (scoring.in_time(SUDDEN, alarms) is not None) is found


def test_a_training_is_collected_once_and_judged(tmp_path, monkeypatch, capsys):
    drawn = logs._drawn
    monkeypatch.setattr(logs, "_drawn", lambda *args: (drawn(*args)[0], 300, 20))
    alerts = script()
    alerts.collect(0, "schedule jumps/0", tmp_path)
    (sick, twin) = logs.kept(0, tmp_path)
    assert (sick.kind, twin.kind) == ("sick", "twin")
    assert sick.onset <= sick.harm < sick.steps <= sick.harm + logs.AFTERWARDS
    lines = [line for line in logs.lines(sick, tmp_path) if isinstance(line, StepLine)]
    assert [line.step for line in lines] == list(range(sick.steps))
    assert max(line.learning_rates[0] for line in lines) > 10 * lines[sick.onset - 1].learning_rates[0]
    healthy_lines = [line for line in logs.lines(twin, tmp_path) if isinstance(line, StepLine)]
    assert [x.loss for x in healthy_lines[: sick.onset]] == [x.loss for x in lines[: sick.onset]]
    assert any(isinstance(line, DetailLine) for line in logs.lines(sick, tmp_path))

    monkeypatch.setattr(logs, "take_step", lambda *_: pytest.fail("it was kept"))
    alerts.collect(0, "schedule jumps/0", tmp_path)
    capsys.readouterr()
    alerts.judge(0, "", tmp_path, details=True)
    said = capsys.readouterr().out
    assert "Seed 0: 1 trainings that end in harm" in said
    assert all(f"| {rule.name} |" in said for rule in rivals.RIVALS)
    assert "| schedule jumps | " in said


def test_an_empty_cache_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["alerts.py", "--judge", "--cache", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script().main()
    assert ended.value.code == 2
    assert "give --collect first" in capsys.readouterr().err
