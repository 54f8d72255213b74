"""A replay of what Accelerate has prepared is its documentation's loop: batch by batch and loss by loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ampdoctor import TrainingRun
from ampdoctor.errors import FactoryError
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest
from tests.replay.frameworks.beside import Seen, bare, machine, replayed, same

accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
SCRIPT = Path(__file__).parents[3] / "fixtures" / "loops" / "accelerate_loop.py"
POLICIES = ("cuda", "native")
NORM = 1.0


class Net(nn.Module):
    """A model that returns its loss, and notes what it was given."""

    def __init__(self, rows):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
        self.rows = lambda: rows  # not part of the state that a snapshot puts back

    def forward(self, inputs, labels):
        logits = self.body(inputs)
        loss = functional.cross_entropy(logits, labels)
        self.rows().append((float(inputs.double().sum()), float(loss.detach()), str(logits.dtype)))
        return {"loss": loss, "logits": logits}


def prepared(rows, *, accumulate=1, precision="fp16", items=100):
    scaling = accelerate.utils.GradScalerKwargs(init_scale=2.0**12, growth_interval=5)
    accelerator = accelerate.Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=accumulate, kwargs_handlers=[scaling]
    )
    accelerate.utils.set_seed(0)
    inputs = torch.randn(items, 8)
    data = [{"inputs": row, "labels": (row.sum() > 0).long()} for row in inputs]
    loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(5))
    model = Net(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.99**step)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def run_of(rows, **options):
    return lambda: TrainingRun.from_accelerate(*prepared(rows, **options), max_grad_norm=NORM)


def train(rows, steps, save=None):
    """The loop of Accelerate's documentation."""

    def loop(parts):
        accelerator, model, optimizer, loader, schedule = parts
        rows.clear()
        done = 0
        while True:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), NORM)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                done += accelerator.sync_gradients
                if save is not None and accelerator.sync_gradients and done == save[0]:
                    accelerator.save_state(save[1])
                    rows.clear()
                if done == steps:
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
                    return Seen(rows=list(rows), weights=weights, rate=optimizer.param_groups[0]["lr"])

    return loop


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("accumulate", "precision"), [(1, "fp16"), (2, "fp16"), (3, "bf16"), (1, "no")])
def test_it_is_replayed_as_it_trains(policy, accumulate, precision):
    rows, options = [], {"accumulate": accumulate, "precision": precision}
    alone = bare(lambda: prepared(rows, **options), train(rows, 20), policy=policy)
    same(alone, replayed(run_of(rows, **options), rows, 20, policy=policy))
    half = {"fp16": "torch.float16" if policy == "cuda" else "torch.float32", "bf16": "torch.bfloat16"}
    assert {row[2] for row in alone.rows} == {half.get(precision, "torch.float32")}


@pytest.mark.parametrize(("accumulate", "at"), [(1, 9), (3, 4)])
def test_it_goes_on_from_a_saved_state_with_the_batches_that_came_next(accumulate, at, tmp_path):
    rows, folder = [], tmp_path / f"step_{at}"
    alone = bare(lambda: prepared(rows, accumulate=accumulate), train(rows, at + 6, save=(at, str(folder))))
    same(alone, replayed(run_of(rows, accumulate=accumulate), rows, 6, checkpoint=folder))


def loss_of(model, batch):
    return functional.cross_entropy(model(**batch)["logits"].float(), batch["labels"])


def plain(rows):
    accelerator, model, optimizer, loader, schedule = prepared(rows)
    parts = {"optimizer": optimizer, "scheduler": schedule, "scaler": accelerator.scaler}
    return TrainingRun(model=model, batches=loader, loss=loss_of, **parts)


def test_prepared_objects_are_parts_of_any_run():
    report = bisect_nan(ReplayRequest(factory=lambda: plain([]), steps=4))
    assert (report.verdict, report.run["precision"]) == ("healthy", "fp16")
    assert report.run["replays"] == 9, "a step did not come back from its snapshot"


@pytest.mark.parametrize("make", [prepared, lambda rows: dict(enumerate([*prepared(rows)][::-1]))])
def test_a_factory_returns_its_parts_in_any_order(make):
    rows = []
    with machine(lambda: make(rows), loss=loss_of) as replay:
        session = replay.session()
        assert session.run.loss is loss_of
        assert session.has_step(0)
        assert session.step(0).optimizer_steps == 1


def without(*left_out):
    parts = dict(zip(("accelerator", "model", "optimizer", "loader", "schedule"), prepared([]), strict=True))
    return tuple(part for name, part in parts.items() if name not in left_out)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: without("optimizer"), "no optimizer"),
        (lambda: without("loader", "model"), "no model and no dataloader"),
        (lambda: (*without(), nn.Linear(1, 1)), "two parts that are each a loop's model"),
        (lambda: (*without(), 3), "int among what the factory returned"),
        (lambda: (*without("optimizer"), torch.optim.SGD([torch.zeros(1)])), "SGD, which Accelerator.prepare has not"),
    ],
)
def test_what_is_absent_or_too_much_is_one_sentence(make, said):
    with machine(make) as replay, pytest.raises(FactoryError, match=said) as raised:
        replay.session()
    assert "\n" not in str(raised.value)


def test_accelerates_own_state_is_as_before():
    from accelerate.state import AcceleratorState, PartialState

    before = dict(PartialState._shared_state)
    with machine(run_of([])) as replay:
        replay.session()
        assert AcceleratorState._shared_state["_mixed_precision"] == "fp16"
        assert PartialState().device.type == "cuda"
    assert PartialState._shared_state == before


def test_the_sick_script_is_diagnosed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = ReplayRequest(factory=str(SCRIPT), script_arguments=("--keep_empty",), steps=5)
    (finding,) = bisect_nan(request).findings
    assert (finding.code, finding.where.step, finding.where.op) == ("AMP202", 3, "aten.softmax")
    assert list(tmp_path.iterdir()) == []
