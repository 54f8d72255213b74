"""The ten runs train, in fp32 and in fp16, and what is read from a training is what happened in it."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from pathlib import Path

import pytest
import torch

from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from benchmarks.training import advice, table
from benchmarks.training.arm import Shadow, Trained, train

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("benchmark_recommend", ROOT / "benchmarks" / "recommend.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


recommend = script()
OF_TEXT = {"gpt12", "gpt36", "seq2seq", "rnn", "half"}


def named(name):
    if name not in OF_TEXT:
        pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install -e '.[bench]'")
    return f"benchmarks/training/{recommend.RUNS[name]}"


def losses(name, steps, **arguments):
    """The losses of some steps, and whether all weights are finite after them."""
    request = ReplayRequest(factory=named(name), arguments={"steps": steps, **arguments}, device="cpu")
    with open_replay(request) as replay:
        session = replay.session()
        outcomes = [session.step(step) for step in range(steps) if session.has_step(step)]
        finite = all(bool(parameter.isfinite().all()) for parameter in session.model.parameters())
        moved = sum(outcome.optimizer_steps for outcome in outcomes)
        session.close()
    return [outcome.loss for outcome in outcomes], finite, moved


@pytest.mark.slow
@pytest.mark.each_value_once
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", recommend.RUNS)
def test_a_run_takes_its_first_steps(name, precision):
    seen, finite, moved = losses(name, 3, precision=precision, scaler={"init_scale": 64.0})
    assert len(seen) == 3
    assert all(math.isfinite(loss) for loss in seen)
    assert finite
    assert moved >= 3


@pytest.mark.slow
@pytest.mark.each_value_once(of=lambda name: {name in OF_TEXT})  # that all begin to train, the test above holds
@pytest.mark.parametrize("name", recommend.RUNS)
def test_a_run_learns(name):
    seen, finite, _ = losses(name, 60, precision="fp32")
    assert finite
    assert statistics.fmean(seen[-10:]) < 0.97 * statistics.fmean(seen[:10])


@pytest.mark.parametrize(
    "name", ["half", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(OF_TEXT) if n != "half")]
)
def test_a_seed_decides_weights_and_order(name):
    first, again, other = (losses(name, 2, precision="fp32", seed=seed)[0] for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.slow
def test_a_summed_loss_makes_the_default_scaler_skip():
    trained = train(named("seq2seq"), {"steps": 8, "precision": "fp16"}, compare=True)
    assert trained.failure is None
    assert list(trained.skipped) == list(range(len(trained.skipped)))
    assert trained.scale == 65536.0 / 2 ** len(trained.skipped)
    assert 2 <= len(trained.skipped) < 8
    assert [shadow.step for shadow in trained.compared] == [1, 3, 5, 7]
    assert [shadow.skipped for shadow in trained.compared] == [s in trained.skipped for s in (1, 3, 5, 7)]


def test_comparing_steps_leaves_the_training_as_it_is():
    arguments = {"steps": 4, "precision": "fp16"}
    plain, compared = (train(named("rnn"), arguments, compare=compare) for compare in (False, True))
    assert plain.losses == compared.losses


def test_what_flushes_is_seen_and_predicted():
    arguments = {"steps": 4, "precision": "fp16", "scaler": {"init_scale": 2.0**-2}}
    trained = train(named("half"), arguments, compare=True)
    low, one = (
        statistics.fmean(s.flushed["activation_grad"] for s in side) for side in (trained.compared, trained.unscaled)
    )
    assert low > 1.5 * one > 0.01
    for shadow in [*trained.compared, *trained.unscaled]:
        assert shadow.predicted["activation_grad"] == pytest.approx(shadow.flushed["activation_grad"], rel=0.1)
        assert 0.0 < shadow.error < 1.0


def test_advice_is_asked_of_the_real_command():
    seen = advice.ask(named("rnn"), {"steps": 3, "precision": "fp16"})
    assert seen.failure is None
    assert seen.section["current"]["scale"] == 65536.0
    assert advice.Advice(**seen.to_dict()) == seen


def trained(loss=1.0, *, skipped=(), flushed=0.0, error=0.0):
    shadows = [
        Shadow(
            step=step,
            scale=1.0,
            skipped=step in skipped,
            flushed=dict.fromkeys(("activation_grad", "weight_grad"), flushed),
            predicted=dict.fromkeys(("activation_grad", "weight_grad"), flushed),
            error=error,
        )
        for step in range(2)
    ]
    return Trained(losses=[loss] * 20, skipped=list(skipped), scale=1.0, compared=shadows, unscaled=shadows)


def pairs(defaults, recommended):
    told = advice.Advice(scaler={"init_scale": 1.0})
    sides = enumerate(zip(defaults, recommended, strict=True))
    return [
        table.Pair(seed=seed, fp32=trained(), default=before, recommended=after, advice=told)
        for seed, (before, after) in sides
    ]


def verdict(defaults, recommended):
    return table.verdict(table.figures(pairs(defaults, recommended)), changed=True)


def test_a_loss_above_the_defaults_by_more_than_the_seeds_differ_is_worse():
    near = [trained(loss) for loss in (1.00, 1.01, 1.02)]
    assert verdict(near, [trained(loss) for loss in (1.05, 1.06, 1.07)]) == "WORSE: final loss"
    assert verdict(near, [trained(loss) for loss in (1.01, 1.02, 1.03)]) == "as good"


def test_what_a_file_holds_is_not_trained_again(monkeypatch, tmp_path):
    made = []

    def pair_of(name, seed, steps):
        made.append((name, seed))
        one = trained().to_dict()
        return {"fp32": one, "default": one, "recommended": one, "advice": advice.Advice().to_dict()}

    monkeypatch.setattr(recommend, "pair_of", pair_of)
    file, kept = tmp_path / "out.json", {}
    first = list(recommend.measured(["rnn"], 2, 20, file, kept))
    again = list(recommend.measured(["rnn"], 3, 20, file, recommend.json.loads(file.read_text())))
    assert made == [("rnn", 0), ("rnn", 1), ("rnn", 2)]
    assert [pair.default for pair in again[0][1][:2]] == [pair.default for pair in first[0][1]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
