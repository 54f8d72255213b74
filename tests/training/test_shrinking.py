"""A training under torchrun that goes on with 2 processes of 4, and then with 1, from its checkpoint.

Where the sums of the gradients keep their order, its losses and weights are the undisturbed training's bit for bit.
Where they do not, this bound holds. Let u be half a unit in the last place of the precision that the products are
computed in. A step's gradient, as the optimizer gets it, differs from the exact one by less than ROUNDINGS u times the
sum of the micro-batches' norms (both trainings are held to that, at their own weights). A difference of weights grows
in a step of SGD by no more than the norm r of I - rate H, H being the loss's Hessian, and each training adds its error:

    apart(t + 1) <= r apart(t) + 2 rate ROUNDINGS u summed(t)
    |loss - loss'| <= |gradient| apart + 2 ROUNDINGS u loss

in first order; the last term is the rounding of the losses themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.shrinking import GLOBAL_BATCH, RATES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("shrinking")]  # its trainings are run once

PRECISIONS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
ROUNDINGS = 8
SHRINKS = (6, 12)
END = 18
DRIVER = Path(__file__).with_name("shrinking.py")


def jobs(ranks):
    """What the processes train: of each precision a part of the shrinking training, and one that keeps its order."""
    place = (4, 2, 1).index(ranks)
    for precision in PRECISIONS:
        sgd = {"precision": precision, "optimizer": "sgd", "most": 4, "until": END, "exact": True}
        resumed = {"resume": f"{precision}-{2 * ranks}"} if place else {}
        saved = {"save_at": SHRINKS[place]} if place < len(SHRINKS) else {}
        yield {"name": f"{precision}-{ranks}", **sgd, **resumed, **saved}
        adam = {"precision": precision, "optimizer": "adamw", "most": 8, "counted": True}
        if ranks == 2:
            yield {"name": f"{precision}-two", **adam, "until": END, "save_at": 10}
        if ranks == 1:
            yield {"name": f"{precision}-one", **adam, "until": END, "resume": f"{precision}-two"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_cli, python):
    """By name, what each training wrote."""
    folder = tmp_path_factory.mktemp("shrinking")
    for ranks in (4, 2, 1):
        launch = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = run_cli(command=[*launch, str(DRIVER), str(folder), json.dumps(list(jobs(ranks)))], timeout=300)
        assert done.returncode == 0, done.stderr
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def by_step(training):
    return {row["step"]: row for row in training["rows"]}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_clusters_are_those_that_were_started_and_steps_keep_their_samples(trained, precision):
    cuts = {ranks: trained[f"{precision}-{ranks}"] for ranks in (4, 2, 1)}
    assert [(cut["ranks"], cut["micro_batch"]) for cut in cuts.values()] == [(4, 4), (2, 4), (1, 4)]
    whole = by_step(cuts[4])
    assert sorted(whole) == list(range(END))
    assert {row["samples"] for row in whole.values()} > {GLOBAL_BATCH}  # the end of an epoch is among them
    for ranks, start in zip((2, 1), SHRINKS, strict=True):
        rows = by_step(cuts[ranks])
        assert sorted(rows) == list(range(start, END))
        assert all(row["samples"] == whole[step]["samples"] for step, row in rows.items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_the_undisturbed_training_bit_for_bit_where_sums_keep_their_order(trained, precision):
    two, one = trained[f"{precision}-two"], trained[f"{precision}-one"]
    assert (two["ranks"], one["ranks"], two["micro_batch"], one["micro_batch"]) == (2, 1, 8, 8)
    losses = {step: row["loss"] for step, row in by_step(two).items()}
    assert losses[0] > 1.2 * losses[END - 1]
    assert {step: row["loss"] for step, row in by_step(one).items()} == {s: losses[s] for s in range(10, END)}
    assert one["weights"] == two["weights"]
    assert one["scale"] == (2.0 * two["scale"] if precision == "fp16" else 1.0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_step_has_the_exact_gradient_but_for_rounding(trained, precision):
    allowed = ROUNDINGS * PRECISIONS[precision]
    for ranks in (4, 2, 1):
        for row in trained[f"{precision}-{ranks}"]["rows"]:
            assert row["error"] <= allowed * row["summed"], row


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_curve_stays_the_undisturbed_one_within_the_bound(trained, precision):
    whole, (first, second) = by_step(trained[f"{precision}-4"]), SHRINKS
    two, one = by_step(trained[f"{precision}-2"]), by_step(trained[f"{precision}-1"])
    assert two[first]["loss"] == whole[first]["loss"]  # the checkpoint's own weights
    curve = {step: (two if step < second else one)[step] for step in range(first, END)}
    learned = whole[0]["loss"] - whole[END - 1]["loss"]
    grown = max(row["growth"] for row in whole.values())
    rounding, apart = 2.0 * ROUNDINGS * PRECISIONS[precision], 0.0
    for step, row in curve.items():
        there = whole[step]
        bound = there["gradient"] * apart + rounding * there["loss"]
        assert abs(row["loss"] - there["loss"]) <= bound < 0.2 * learned
        apart = grown * apart + RATES["sgd"] * rounding * max(there["summed"], row["summed"])
