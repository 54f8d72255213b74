"""The corpus of sick and healthy runs loads as users' factories do, and trains as its own reference loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ampdoctor.errors import FactoryError
from ampdoctor.hooks.nested import copy_batch, iter_tensors
from ampdoctor.replay.factory import load_factory

RUNS = Path(__file__).parents[2] / "fixtures" / "corpus" / "runs.py"


@pytest.fixture(scope="module")
def runs():
    return load_factory(f"{RUNS}:make_run")


@pytest.fixture(scope="module")
def corpus(runs):
    return runs.function.__globals__


def cases():
    return sorted(path.stem for path in (RUNS.parent / "cases").glob("*.json"))


@pytest.mark.parametrize("case", cases())
def test_every_case_is_a_run_with_its_own_parts(runs, corpus, case):
    run = runs.make({"case": case})
    label = corpus["label"](case)
    script = corpus["load_case"](case)
    assert run.precision == {"float16": "fp16", "bfloat16": "bf16"}[label["precision"]]
    assert run.autocast is (label["mode"] == "autocast")
    assert (run.scaler is None) is not script.AMP["scaler"]
    assert run.step is None or run.step.__name__ == "train_step"
    assert (run.step is not None) is hasattr(script, "train_step")
    first = next(iter(run.batches()))
    copied = copy_batch(first)
    pairs = list(zip(iter_tensors(first), iter_tensors(copied), strict=True))
    assert pairs
    assert all(torch.equal(a, b) or a.isnan().any() for (_, a), (_, b) in pairs)
    again = runs.make({"case": case})
    state = zip(run.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in state)


def reference_loop(run, steps):
    """The loop that the corpus describes: (losses, skipped steps)."""
    optimizer = run.optimizer(run.model)
    scaler = run.scaler() if run.scaler else torch.amp.GradScaler("cpu", enabled=False)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[run.precision]
    losses, skipped = [], []
    for step, batch in zip(range(steps), run.batches(), strict=False):

        def autocast():
            return torch.autocast("cpu", dtype=dtype, enabled=run.autocast)

        scale = scaler.get_scale()
        if run.step is not None:
            loss = run.step(model=run.model, batch=batch, optimizer=optimizer, scaler=scaler, autocast=autocast)
        else:
            optimizer.zero_grad()
            with autocast():
                loss = run.loss(run.model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
        if scaler.get_scale() < scale:
            skipped.append(step)
    return losses, skipped


@pytest.mark.parametrize("case", ["t5_ffn_wo_overflow", "clip_before_unscale", "static_loss_scale_overflow"])
def test_a_case_shows_the_symptoms_of_its_label(runs, corpus, case):
    symptoms = corpus["label"](case)["symptoms"]
    losses, skipped = reference_loop(runs.make({"case": case}), 4)
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    assert (bad[0] if bad else None) == symptoms["loss"]
    assert skipped == [step for step in symptoms["skipped"] if step < 4]


def test_an_unknown_case_is_named_with_near_ones(runs):
    with pytest.raises(FactoryError, match="there is no case 't5_ffn_overflow': did you mean t5_ffn_wo_overflow"):
        runs.make({"case": "t5_ffn_overflow"})
