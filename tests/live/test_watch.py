"""A loop that is somebody else's, watched."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampdoctor.live.op_watch import StepWatch
from ampdoctor.workflows.open_replay import open_replay
from ampdoctor.workflows.requests import ReplayRequest
from fixtures.corpus import runs
from tests.corpus.reports import kind_and_phase, sort_of

QUICK_HEALTHY = ("healthy_initial_scale_skips", "healthy_nan_masked_by_relu", "healthy_dead_relu_zero_grads")
QUICK_SICK = ("bce_half_backward", "exp_before_clamp", "nan_pixel_in_batch", "clip_logit_scale_overflow")
SILENT = {
    "rmsnorm_silent_zero": "its infinity becomes a finite zero",
    "scaler_state_lost_on_resume": "its scaler skips steps until it has settled, as any does",
}
"""Cases that only a comparison with fp32, or with the checkpoint, tells from health."""


class SickError(BaseException):
    """Ends a loop as a failed test is ended."""


def _stop(report):
    raise SickError(report)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def installed():
    """What a watch puts in place, as it is now."""
    modules, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return (
        len(modules._global_forward_pre_hooks),
        len(modules._global_forward_hooks),
        len(modules._global_forward_hooks_always_called),
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        [getattr(torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update", "state_dict")],
        torch.autograd.backward,
        torch.autograd.Variable._execution_engine,
        torch.nn.utils.clip_grad._clip_grads_with_norm_,
        torch.set_anomaly_enabled,
        torch.backends.mha.get_fastpath_enabled(),
        len(_get_current_dispatch_mode_stack()),
        torch._C._len_torch_function_stack(),
    )


@pytest.mark.parametrize("ends", ["well", "sick", KeyboardInterrupt, ZeroDivisionError])
def test_everything_is_undone_however_the_loop_ends(ends):
    before = installed()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.full((1, 2), torch.nan if ends == "sick" else 1.0)
    watch = StepWatch(_stop)
    expected = {"sick": SickError}.get(ends, ends)

    def loop():
        with watch.watching():
            assert installed() != before
            step(model, optimizer, x)
            if isinstance(ends, type):
                raise ends

    if expected == "well":
        loop()
    else:
        with pytest.raises(expected):
            loop()
    assert installed() == before
    step(model, optimizer, torch.full((1, 2), torch.nan))  # nobody looks any more
    assert (watch.report is not None) == (ends == "sick")


def test_it_is_told_once_and_then_looks_no_more():
    told = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepWatch(told.append).watching():
        for _ in range(3):
            step(model, optimizer, torch.full((1, 2), torch.nan))
    assert [(r.verdict, r.findings[0].cause, r.findings[0].where.step) for r in told] == [("sick", "bad_data", 0)]


def test_the_loop_computes_what_it_computes_without_the_watch():
    def train():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer, torch.randn(6, 4))
        return [p.detach().clone() for p in model.state_dict().values()]

    alone = train()
    with StepWatch(_stop).watching():
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_modules_are_named_as_in_the_model_also_where_a_part_was_called_before_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with torch.no_grad():
        model[1][0].weight.fill_(3e38)
    report = None

    def note(found):
        nonlocal report
        report = found

    with StepWatch(note).watching():
        model[0](torch.ones(1, 2)).sum().backward()
        model(torch.full((1, 2), 100.0)).pow(2).sum().backward()
    assert report.findings[0].where.module == "1.0"


def test_a_second_model_has_its_class_before_its_names():
    told = []
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    with StepWatch(told.append).watching():
        (second(first(torch.ones(1, 2))) + 0 * second[0].weight.sum()).sum().backward()
        with torch.no_grad():
            second[0].weight.fill_(3e38)
        second(torch.full((1, 2), 100.0)).sum().backward()
    assert told[0].findings[0].where.module == "Sequential.0"


def test_a_parameter_that_is_nan_from_the_start_is_said_to_be():
    model = nn.Linear(2, 2)
    model.weight.data[0, 1] = torch.nan
    told = []
    with StepWatch(told.append).watching(model):
        model(torch.ones(1, 2)).sum().backward()
    assert (told[0].findings[0].cause, told[0].findings[0].where.tensor) == ("bad_checkpoint", "weight")


def test_a_scaler_of_the_users_own_is_watched_where_it_is_named():
    class Scaler:
        def __init__(self):
            self.own = torch.amp.GradScaler("cpu", init_scale=2.0**120)

        def is_enabled(self):
            return True

        def get_scale(self):
            return 2.0**120

        def scale(self, loss):
            return loss * 2.0**120

        def unscale_(self, optimizer):
            pass

        def step(self, optimizer):
            if all(torch.isfinite(p.grad).all() for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()

        def update(self):
            pass

    scaler, told = Scaler(), []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepWatch(told.append, max_skipped=2).watching(scaler=scaler):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), 1e4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert told[0].run["steps_skipped"] == 3
    assert vars(scaler).keys() == {"own"}


def seen_at_once(case):
    """A culprit that makes something non-finite in the step itself; the rest is for a replay beside fp32 to find."""
    label = runs.label(case)
    if "silent_kind" in label:  # what becomes non-finite there is finite again before the step ends
        return False
    return label["nonfinite"] in ("nan", "inf") and label["kind"] != "bad_checkpoint" and case not in SILENT


def watched_case(case, tmp_path):
    checkpoint = None
    if runs.has_checkpoint(case):
        checkpoint = str(tmp_path / "checkpoint.pt")
        runs.write_checkpoint(case, checkpoint)
    request = ReplayRequest(
        factory="fixtures/corpus/runs.py:make_run",
        arguments={"case": case},
        checkpoint=checkpoint,
        app_dir=str(runs.CASES),
    )
    watch = StepWatch(_stop)
    with open_replay(request) as replay:
        session = replay.session()
        try:
            with watch.watching(session.model):
                for index in range(8):
                    if not session.has_step(index):
                        break
                    session.attempt(index)
        except SickError:
            pass
        finally:
            session.close()
    return watch.report


@pytest.mark.each_value_once(of=lambda case: {sort_of(case)})
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK_HEALTHY else pytest.mark.slow)
        for case in runs.case_ids()
        if runs.label(case)["kind"] == "healthy"
    ],
)
def test_a_healthy_run_of_the_corpus_is_left_alone(case, tmp_path):
    assert watched_case(case, tmp_path) is None


@pytest.mark.each_value_once(of=kind_and_phase)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK_SICK else pytest.mark.slow)
        for case in runs.case_ids()
        if seen_at_once(case)
    ],
)
def test_a_sick_run_of_the_corpus_fails_at_its_step_and_module(case, tmp_path):
    label, report = runs.label(case), watched_case(case, tmp_path)
    assert report is not None
    where = report.findings[0].where
    assert where.step == label["step"]
    moved = label["cuda_policy"] == "moves"  # then the label's module is the one of the CPU's autocast
    assert moved or where.module in (label["culprit_module"], *label.get("culprit_modules_ok", ()))


def test_one_scaler_of_many_optimizers_settles():
    models = [nn.Linear(2, 2) for _ in range(5)]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    taken = 0
    with StepWatch(_stop).watching():
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                losses = [model(torch.ones(1, 2)).float().sum() for model in models]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
                scaler.step(optimizer)
                after = optimizer.param_groups[0]["params"]
                taken += not all(map(torch.equal, before, after))
            scaler.update()
    assert 0 < taken < 20
