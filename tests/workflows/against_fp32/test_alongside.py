"""Steps are held beside fp32 while they are replayed: each once in half and once in fp32, and the first once more."""

from __future__ import annotations

import itertools
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

STEPS = 5


def make_run(*, lr=0.1, after_step=None, seen=None, fail_at=None, step=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    if seen is not None:
        model.register_forward_pre_hook(lambda module, _: seen.put(module[0].weight.detach().clone()))

    def loss(model, batch):
        x, number = batch
        out = model(x)
        return (out * (1e7 if number == fail_at else 1.0)).square().mean()

    return TrainingRun(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        loss=None if step is not None else loss,
        step=step,
        after_step=after_step,
        batches=[(torch.randn(6, 8), number) for number in range(STEPS)],
        precision="fp16",
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )


def diagnosed(steps=STEPS, **settings):
    request = {key: settings.pop(key) for key in ("compare_steps", "expect_failure") if key in settings}
    return bisect_nan(ReplayRequest(factory=lambda: make_run(**settings), steps=steps, **request))


def compared(report):
    (check,) = [check for check in report.checks if check.name == "gradients and updates agree with fp32"]
    return check


def test_a_healthy_step_runs_once_and_once_in_fp32():
    report = diagnosed()
    assert report.verdict == "healthy"
    assert report.run["replays"] == 2 * STEPS + 1
    assert report.run["deterministic"] is True
    check = compared(report)
    assert (check.result, check.headroom["steps"]) == ("ok", STEPS)
    assert 0 < check.headroom["largest_gradient_error"] < 1e-2


def test_every_step_begins_where_the_last_one_ended():
    weights, lone = SimpleQueue(), SimpleQueue()  # lists would be put back
    diagnosed(seen=weights)
    run = make_run(seen=lone)
    for batch in run.batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = run.loss(run.model, batch)
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()
    seen, alone = ([queue.get_nowait() for _ in range(queue.qsize())] for queue in (weights, lone))
    first, rest = seen[:3], seen[3:]  # the first step, its twin, and the first step again
    assert all(torch.equal(weight, alone[0]) for weight in first)
    for twin, own, expected in zip(rest[::2], rest[1::2], alone[1:], strict=True):
        assert torch.equal(twin, own)
        assert torch.allclose(own, expected, rtol=1e-3, atol=1e-5)


def test_a_step_of_several_updates_is_compared_at_its_last_one():
    """As PPO's epochs: the first update's gradients beside the last one's in fp32 would be far apart."""

    def step(model, batch, optimizer, scaler, autocast):
        for _ in range(4):
            with autocast():
                loss = model(batch[0]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    report = diagnosed(step=step, lr=1.0)
    assert report.verdict == "healthy"
    assert compared(report).headroom["largest_gradient_error"] < 3e-2
    assert report.run["replays"] == 2 * STEPS + 1


@pytest.mark.parametrize("where", ["list", "model"])
def test_state_that_a_step_of_the_users_own_keeps_is_put_back(where):
    """A pool of samples, a second network."""

    def factory():
        pool, other = [], nn.Linear(8, 16)

        def step(model, batch, optimizer, scaler, autocast):
            before = len(pool)
            with autocast():
                hidden = model[0](batch[0]) + (other(batch[0]) if where == "model" else 0)
                loss = (model[2](model[1](hidden)) * (1e7 if before == 3 else 1.0)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if where == "list":
                pool.append(loss.item())
            else:
                with torch.no_grad():
                    other.weight.mul_(0.5)
            return loss

        return make_run(step=step)

    report = bisect_nan(ReplayRequest(factory=factory, steps=STEPS))
    if where == "model":
        assert (report.verdict, compared(report).headroom["steps"]) == ("healthy", STEPS)
        assert report.run["replays"] == 2 * STEPS + 1
    else:
        assert (report.verdict, report.findings[0].where.step) == ("sick", 3)


def test_what_counts_its_steps_is_stepped_as_often_as_its_owner_does():
    counted = SimpleQueue()  # which is not put back
    report = diagnosed(after_step=lambda run, step: counted.put(step))
    assert report.verdict == "healthy"
    assert [counted.get_nowait() for _ in range(STEPS)] == list(range(STEPS))


def counted_by_closure():
    count = itertools.count().__next__
    return lambda model, batch: (model(batch[0]) * (1e7 if count() == 3 else 1.0)).square().mean()


def test_what_fails_at_its_fourth_call_fails_in_the_fourth_step():
    """A twin would be such a call as well: the failure would move to another step, or into fp32, which holds it."""

    def factory():
        run = make_run()
        run.loss = counted_by_closure()
        return run

    report = bisect_nan(ReplayRequest(factory=factory, steps=STEPS))
    assert (report.verdict, report.findings[0].where.step) == ("sick", 3)


def test_an_optimizer_that_counts_its_steps_finds_its_count():
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})
            self._count = 0

        @torch.no_grad()
        def step(self, closure=None):
            self._count = count = self._count + 1
            counts.put(count)
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.1 / count * parameter.grad)

    counts = SimpleQueue()

    def factory():
        run = make_run()
        run.optimizer = Counting(run.model.parameters())
        return run

    report = bisect_nan(ReplayRequest(factory=factory, steps=STEPS))
    assert report.verdict == "healthy"
    seen = [counts.get_nowait() for _ in range(counts.qsize())]
    assert seen == [1, *(count for count in range(1, STEPS + 1) for _ in range(2))], "each step, its twin, the proof"


def test_a_failing_step_is_the_one_that_fails():
    report = diagnosed(fail_at=1)
    finding = report.findings[0]
    assert (report.verdict, finding.where.step, finding.where.phase) == ("sick", 1, "loss")


@pytest.mark.parametrize(("wanted", "replays"), [(0, STEPS), (2, STEPS + 3), (STEPS + 9, 2 * STEPS + 1)])
def test_as_many_steps_are_compared_as_are_asked_for(wanted, replays):
    report = diagnosed(compare_steps=wanted)
    assert (report.verdict, report.run["replays"]) == ("healthy", replays)
    assert compared(report).headroom["steps"] == min(wanted, STEPS)
    said = [skipped.reason for skipped in report.skipped if skipped.what.endswith("with fp32")]
    assert len(said) == (wanted < STEPS)
    if wanted == 0:
        assert compared(report).result == "not_run"
        assert said == ["switched off (--no-compare)"]
