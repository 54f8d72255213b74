"""`ampdoctor.watch`: from inside a loop; the guard; and what is known too late."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor.errors import SickTrainingError, UsageError
from ampdoctor.evidence.report_scaler import ScalerArguments
from ampdoctor.live.numbers.async_reader import AsyncReader
from ampdoctor.workflows.health import health
from ampdoctor.workflows.watcher import TrainingWatcher, standing


class Net(nn.Module):
    """Takes the logarithm of what ReLU has set to 0, if it is told so."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, floor):
        return self.last(torch.log(self.first(x).relu() + floor))


class Loop:
    """Trains `Net`, which is sick at some steps."""

    def __init__(self, optimizer=torch.optim.AdamW, *, sick=(5,), **settings):
        torch.manual_seed(0)
        self.model, self.sick = Net(), sick
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3, **settings)

    def __call__(self, steps=8, scaler=None):
        for step in range(steps):
            loss = self.model(torch.randn(16, 4), 0.0 if step in self.sick else 1e-3).pow(2).mean()
            self.optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()

    @property
    def state(self):
        moments = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments, torch.get_rng_state())]


def same(mine, theirs):
    assert len(mine) == len(theirs)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))


@pytest.fixture
def unreadable(monkeypatch):
    """A device whose numbers cannot be read before the update: the CPU stands in for it."""
    monkeypatch.setattr(
        TrainingWatcher, "_is_readable", lambda doctor, _: doctor.report is None and doctor._attentive > 0
    )


def test_the_first_sick_step_is_diagnosed_and_nothing_is_changed(tmp_path):
    bare, loop, told = Loop(), Loop(), []
    bare()
    torch.manual_seed(0)
    loop = Loop()
    with ampdoctor.watch(folder=tmp_path / "health", tell=told.append) as watch:
        assert watch.report is None
        loop()
        assert told == [watch.report]
    (finding,) = watch.report.findings
    assert finding.where.op == "aten.log"
    assert watch.report.run["step"] == 5
    assert (tmp_path / "health" / "bundle-5" / "manifest.json").is_file()
    torch.manual_seed(0)
    again = Loop()
    again()
    assert same(loop.state, again.state)


def test_a_healthy_loop_says_nothing_and_writes_its_log(tmp_path, caplog):
    loop = Loop(sick=())
    with ampdoctor.watch(loop.model, loop.optimizer, folder=tmp_path) as watch:
        loop()
    assert watch.report is None
    assert not caplog.records
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 8
    assert kinds[-1] == "end"


def test_without_tell_the_diagnosis_is_a_warning_with_the_bundle(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ampdoctor"), ampdoctor.watch(folder=tmp_path):
        Loop()()
    (record,) = caplog.records
    assert "aten.log" in record.getMessage()
    assert str(tmp_path / "bundle-5") in record.getMessage()


def test_stop_leaves_the_loop_past_its_own_except_and_is_an_ordinary_error_outside(tmp_path):
    loop, taken = Loop(), []
    loop.optimizer.register_step_post_hook(lambda *_: taken.append(None))

    def stubborn():
        try:
            loop()
        except Exception:  # noqa: BLE001 - what is tested
            taken.append("swallowed")

    watch = ampdoctor.watch(folder=tmp_path, on_sick="stop", tell=lambda _: None)
    with pytest.raises(SickTrainingError, match=r"step 5 is sick.*aten\.log") as error, watch:
        stubborn()
    assert error.value.report.findings[0].where.op == "aten.log"
    assert isinstance(error.value, Exception)
    assert taken == [None] * 5
    assert all(p.isfinite().all() for p in loop.model.parameters())
    assert standing() is None


def test_a_watch_inside_another_is_the_outer_one(tmp_path, caplog):
    with ampdoctor.watch(folder=tmp_path / "outer") as outer:
        with ampdoctor.watch(folder=tmp_path / "inner", on_sick="stop") as inner:
            Loop()()
        assert inner.report is outer.report is not None
        assert inner.folder == outer.folder
    assert "watched already" in caplog.records[0].getMessage()
    assert not (tmp_path / "inner").exists()


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"on_sick": "pray"}, {"look": "twice"}, {"optimizer": 3}, {"optimizer": [nn.ReLU()]}]
)
def test_arguments_that_make_no_sense_are_refused_at_once(wrong, tmp_path):
    with pytest.raises(UsageError), ampdoctor.watch(folder=tmp_path, **wrong):
        raise AssertionError
    assert standing() is None


FUSED = [torch.optim.AdamW, torch.optim.SGD]


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_guard_holds_a_sick_update_back_and_nothing_else(optimizer, tmp_path):
    settings = {"fused": True, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {})}
    bare = Loop(optimizer, sick=(), **settings)
    bare()
    guarded = Loop(optimizer, sick=(), **settings)
    with ampdoctor.watch(folder=tmp_path / "healthy", guard=True):
        guarded()
    assert same(bare.state, guarded.state)

    loop = Loop(optimizer, sick=(5,), **settings)
    with ampdoctor.watch(folder=tmp_path / "sick", guard=True, tell=lambda _: None) as watch:
        loop(5)
        before = loop.state[:-1]
        loop.sick = (0,)
        loop(1)
        assert same(before, loop.state[:-1])
        assert all(math.isfinite(float(t.float().sum())) for t in loop.state)
    assert watch.report.findings[0].where.op == "aten.log"
    assert not hasattr(loop.optimizer, "found_inf")
    assert not hasattr(loop.optimizer, "grad_scale")


def test_what_is_known_too_late_is_said_once_with_the_ways_out(unreadable, tmp_path):
    told = []
    with ampdoctor.watch(folder=tmp_path, tell=told.append) as watch:
        Loop(sick=(3, 5))()
    assert told == [watch.report]
    (note,) = watch.report.errors
    assert watch.report.verdict == "sick"
    assert note.what == "step 3"
    assert all(
        word in note.message for word in ("may be poisoned", "guard", "fused", "look=sync", "last good checkpoint")
    )
    assert "bundle" not in watch.report.run["kept"]


def test_with_a_guard_the_next_sick_step_is_looked_at_with_weights_intact(unreadable, tmp_path, caplog):
    loop = Loop(sick=(3, 6), fused=True)
    with ampdoctor.watch(folder=tmp_path, guard=True, tell=lambda _: None) as watch:
        loop()
    assert watch.report.run["step"] == 6
    assert watch.report.findings[0].where.op == "aten.log"
    assert all(p.isfinite().all() for p in loop.model.parameters())
    (record,) = caplog.records
    assert "step 3 was sick" in record.getMessage()
    assert "intact" in record.getMessage()


def test_a_scaler_of_another_class_is_told_when_it_is_named(tmp_path):
    class Scaler:
        """Halves the scale and skips where a gradient is not finite."""

        def __init__(self):
            self.factor, self.skipped = 4.0, 0

        def scale(self, loss):
            return loss * self.factor

        def unscale_(self, optimizer):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.div_(self.factor)

        def step(self, optimizer):
            self.unscale_(optimizer)
            if all(p.grad.isfinite().all() for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
            else:
                self.skipped += 1

        def update(self):
            pass

    scaler = Scaler()
    with ampdoctor.watch(scaler=scaler, folder=tmp_path, tell=lambda _: None) as watch:
        Loop(sick=(2,))(4, scaler)
    assert scaler.skipped == 1
    assert watch.report.run["step"] == 2
    assert set(vars(scaler)) == {"factor", "skipped"}


def test_the_log_has_the_settings_of_a_scaler_and_the_name_of_what_the_model_itself_returns(tmp_path, unreadable):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=77)
    with ampdoctor.watch(folder=tmp_path, every=2):
        for _ in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(16, 4)).pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    report = health([tmp_path])
    (run,) = report.health.runs
    assert run.scalers[0].arguments == ScalerArguments(
        init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=77
    )
    headers = [one for text in (tmp_path / "log.jsonl").read_text().splitlines() if (one := json.loads(text))]
    names = next(one["tensors"] for one in reversed(headers) if one["kind"] == "run")
    assert set(names) == {"weight", "bias", "(root)"}


@pytest.mark.parametrize("sick", [(2,), (2, 5)])
def test_a_fused_scalers_skip_that_is_heard_late_is_not_the_weights_harm(
    unreadable, sick, tmp_path, caplog, monkeypatch
):
    """The first was held back; the next one is looked at before its update, and is no scaler that settles."""
    monkeypatch.setattr("ampdoctor.live.loop_watch._holds_back", lambda _: None)  # as where only the device knows
    loop, scaler = Loop(sick=sick, fused=True), torch.amp.GradScaler("cpu", init_scale=4.0)
    with ampdoctor.watch(folder=tmp_path, tell=lambda _: None) as watch:
        loop(8, scaler)
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step" and line["skipped"]] == list(sick)
    assert steps[-1]["accepted"] == 8 - len(sick)
    (record,) = caplog.records
    assert "step 2 was sick" in record.getMessage()
    assert "intact" in record.getMessage()
    assert all(p.isfinite().all() for p in loop.model.parameters())
    assert (None if watch.report is None else watch.report.run["step"]) == (None if len(sick) == 1 else sick[1])


def test_a_fused_scaler_that_settles_where_only_the_device_knows_is_healthy(unreadable, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ampdoctor.live.loop_watch._holds_back", lambda _: None)
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    with ampdoctor.watch(folder=tmp_path) as watch:
        for _ in range(10):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**12
    assert watch.report is None
    assert not caplog.records


def test_a_step_that_the_guard_holds_back_on_a_device_is_logged_as_skipped(unreadable, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ampdoctor.live.loop_watch._holds_back", lambda one: None if hasattr(one, "found_inf") else False
    )
    with ampdoctor.watch(folder=tmp_path, guard=True, tell=lambda _: None):
        Loop(sick=(3,), fused=True)()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step" and line.get("skipped")] == [3]
    assert (lines[-1]["steps"], lines[-1]["accepted"]) == (8, 7)


@pytest.mark.parametrize("sick", [(), (4,)])
def test_readings_that_are_lost_are_told_and_a_sick_one_among_them_is_not_passed_over(
    sick, unreadable, tmp_path, caplog, monkeypatch
):
    put = AsyncReader.put

    def full(later, tag, tensors):
        if tag.number in (2, 3, 4):
            later.lost += 1
            return False
        return put(later, tag, tensors)

    monkeypatch.setattr(AsyncReader, "put", full)
    with ampdoctor.watch(folder=tmp_path, tell=lambda _: None) as watch:
        Loop(sick=sick)()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 1, 5, 6, 7]
    assert [line["steps"] for line in lines if line["kind"] == "lost"][-1] == 3
    said = [record.getMessage() for record in caplog.records]  # an alert comes when it is made
    first, last = (sentence for sentence in said if sentence.startswith("the numbers of"))
    assert first.startswith("the numbers of step 2 are lost")
    assert last == "the numbers of 3 of 8 steps were lost; none of them is judged"
    assert (watch.report is not None) == bool(sick)
    if sick:
        (note,) = watch.report.errors
        assert "step 5 was sick" in note.message
        assert "one of the 3 steps just before it" in note.message
