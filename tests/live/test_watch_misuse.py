"""A watched loop that breaks its scaler's protocol with finite numbers is found; one that only looks like it is not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ampdoctor.live.op_watch import StepWatch

SCALE = 1024.0


class SickError(BaseException):
    """Ends a loop as a failed test is ended."""


def _stop(report):
    raise SickError(report)


class Loop:
    """A model, its optimizer and a scaler, made inside the watch."""

    def __init__(self, rate=1e-3):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.parameters = list(self.model.parameters())

    def loss(self):
        return self.model(torch.ones(2, 4)).pow(2).mean()

    def backward(self):
        self.scaler.scale(self.loss()).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def told(steps, *, watch=None, **parts):
    """What a watch says of a loop's first steps."""
    watch = watch or StepWatch(_stop)
    try:
        with watch.watching(**parts):
            loop = Loop()
            for _ in range(3):
                steps(loop)
    except SickError:
        pass
    return watch.report


def steps_past_its_scaler(loop):
    loop.backward()
    loop.optimizer.step()


def clips_too_early(loop):
    loop.backward()
    clip_grad_norm_(loop.parameters, 0.1)
    loop.step()


def adds_a_loss_that_is_not_scaled(loop):
    loop.backward()
    loop.loss().backward()
    loop.step()


def updates_between_two_backwards(loop):
    loop.backward()
    loop.scaler.update(SCALE / 4)
    loop.backward()
    loop.step()


def unscales_before_the_last_backward(loop):
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.backward()
    loop.step()


def saves_and_clips_too_early(loop):
    loop.scaler.state_dict()  # asks for the scale, for a checkpoint
    clips_too_early(loop)


@pytest.mark.parametrize(
    ("steps", "place", "words"),
    [
        (steps_past_its_scaler, ("optimizer.step", 0), "2 gradients that are still scaled by 1024"),
        (clips_too_early, ("clip_grad_norm_", 0), "to 0.1 while they were still scaled by 1024"),
        (
            adds_a_loss_that_is_not_scaled,
            ("backward", 0),
            "2 gradients are in part those of a loss that was not scaled",
        ),
        (saves_and_clips_too_early, ("clip_grad_norm_", 0), "to 0.1 while they were still scaled by 1024"),
        (updates_between_two_backwards, ("scaler.step", 0), "divided by 256, but were scaled by 1024"),
        (unscales_before_the_last_backward, ("scaler.unscale_", 0), "gradients scaled by 1024 after scaler.unscale_"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_misuse_that_stays_finite_is_found_at_its_call(steps, place, words, known):
    loop = Loop()
    parts = {"model": loop.model, "optimizers": [loop.optimizer], "scaler": loop.scaler} if known else {}
    report = told((lambda _: steps(loop)) if known else steps, **parts)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP407", "error", "scaler_misuse")
    assert (finding.where.op, finding.where.step) == place
    assert words in finding.message
    assert finding.where.source.file == "tests/live/test_watch_misuse.py"
    assert finding.help[0].isupper()
    assert finding.evidence["edited"] == (2 if "clip" in steps.__name__ else 0)


def the_right_order(loop):
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    clip_grad_norm_(loop.parameters, 0.1)
    loop.step()


def accumulates(loop):
    for _ in range(3):
        (loop.scaler.scale(loop.loss()) / 3).backward()
    loop.step()


def averages_in_place(loop):
    for _ in range(3):
        loop.backward()
    for parameter in loop.parameters:
        parameter.grad.div_(3)
    loop.step()


def clips_nothing(loop):
    loop.backward()
    clip_grad_norm_(loop.parameters, 1e6)
    loop.step()


def clips_to_a_scaled_norm(loop):
    loop.backward()
    clip_grad_norm_(loop.parameters, 0.1 * loop.scaler.get_scale())
    loop.step()


def clears_in_place(loop):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def clears_with_new_zeros(loop):
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    for parameter in loop.parameters:
        parameter.grad = torch.zeros_like(parameter)


def clears_where_nobody_sees_it(loop):
    for parameter in loop.parameters:
        if parameter.grad is not None:
            parameter.grad.data.zero_()
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def freezes_midway(loop):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.parameters[0].requires_grad_(loop.parameters[0].grad is None)
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.parameters[0].requires_grad_()


def assigns_what_autograd_hands_out(loop):
    if loop.parameters[0].grad is None:
        loop.backward()
    else:
        loop.optimizer.zero_grad(set_to_none=False)
        gradients = torch.autograd.grad(loop.scaler.scale(loop.loss()), loop.parameters)
        for parameter, gradient in zip(loop.parameters, gradients, strict=True):
            parameter.grad.copy_(gradient)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def learns_the_scale_from_a_number(loop):
    loop.backward()
    clip_grad_norm_(loop.parameters, float(loop.scaler.scale(torch.tensor(0.1))))
    loop.step()


def forgets_to_clear(loop):
    """A misuse, but gradients may be cleared where nobody sees it: only fp32 can tell."""
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def unscales_by_hand_in_place(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad /= SCALE
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def unscales_by_hand_all_at_once(loop):
    loop.backward()
    torch._foreach_div_([parameter.grad for parameter in loop.parameters], SCALE)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clears_in_place_all_at_once(loop):
    gradients = [parameter.grad for parameter in loop.parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def unscales_by_hand_into_new_ones(loop):
    loop.backward()
    for parameter in loop.parameters:
        parameter.grad = parameter.grad / SCALE
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def scales_a_loss_by_hand(loop):
    loop.backward()
    (loop.loss() * loop.scaler.get_scale()).backward()
    loop.step()


def penalises_its_gradients(loop):
    scaled = torch.autograd.grad(loop.scaler.scale(loop.loss()), loop.parameters, create_graph=True)
    penalty = sum((gradient / SCALE).pow(2).sum() for gradient in scaled)
    loop.scaler.scale(loop.loss() + penalty).backward()
    loop.step()


def without_a_scaler(loop):
    loop.loss().backward()
    clip_grad_norm_(loop.parameters, 0.1)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def with_one_that_is_off(loop):
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop.backward()
    clip_grad_norm_(loop.parameters, 0.1)
    loop.step()


def skips_first(loop):
    if loop.scaler.get_growth_factor() == 2.0:
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_factor=1.5)
    loop.scaler.scale(loop.loss().half().float() * 4).backward()
    loop.scaler.unscale_(loop.optimizer)
    clip_grad_norm_(loop.parameters, 0.1)
    loop.step()


@pytest.mark.parametrize(
    "steps",
    [
        the_right_order,
        accumulates,
        averages_in_place,
        clips_nothing,
        clips_to_a_scaled_norm,
        clears_in_place,
        clears_with_new_zeros,
        clears_where_nobody_sees_it,
        freezes_midway,
        assigns_what_autograd_hands_out,
        learns_the_scale_from_a_number,
        forgets_to_clear,
        unscales_by_hand_in_place,
        unscales_by_hand_all_at_once,
        clears_in_place_all_at_once,
        unscales_by_hand_into_new_ones,
        scales_a_loss_by_hand,
        penalises_its_gradients,
        without_a_scaler,
        with_one_that_is_off,
        skips_first,
    ],
)
def test_what_only_looks_like_misuse_is_left_alone(steps):
    assert told(steps) is None


@pytest.mark.parametrize("plain", [False, True])
def test_two_models_with_one_scaler_are_well(plain):
    """A generator's backward leaves scaled gradients in the discriminator, whose own loss need not be scaled."""

    def loop():
        torch.manual_seed(0)
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        first, second = (torch.optim.Adam(model.parameters(), 1e-3) for model in (one, two))
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for _ in range(3):
            made = one(torch.randn(2, 4))
            second.zero_grad()
            judged = two(made.detach()).mean()
            (judged if plain else scaler.scale(judged)).backward()
            if plain:
                second.step()
            else:
                scaler.step(second)
            first.zero_grad()
            scaler.scale(two(made).mean()).backward()
            scaler.unscale_(first)
            clip_grad_norm_(one.parameters(), 0.01)
            scaler.step(first)
            scaler.update()

    watch = StepWatch(_stop)
    with watch.watching():
        loop()
    assert watch.report is None


def test_a_closure_is_well():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).mean()
        loss.backward()
        return loss

    watch = StepWatch(_stop)
    with watch.watching():
        for _ in range(2):
            optimizer.step(closure)
    assert watch.report is None


class Fused(torch.optim.SGD):
    """Takes the scaler as an argument, and does by itself what that would do."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler._check_inf_per_device(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / grad_scaler._scale
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("made", [Fused, lambda parameters: torch.optim.Adam(parameters, fused=True)])
def test_a_fused_optimizer_unscales_by_itself(made):
    def steps(loop):
        if type(loop.optimizer) is torch.optim.SGD:
            loop.optimizer = made(loop.parameters)
        loop.backward()
        loop.step()

    assert told(steps) is None


def test_what_another_loss_left_is_not_used_by_a_closure_that_clears_it():
    def steps(loop):
        loop.backward()

        def closure():
            loop.optimizer.zero_grad()
            loss = loop.loss()
            loss.backward()
            return loss

        loop.optimizer.step(closure)

    assert told(steps) is None


def test_a_loop_may_copy_save_and_transform_what_is_watched():
    def steps(loop):
        the_right_order(loop)
        copied = copy.deepcopy(loop.model)
        assert all(map(torch.equal, copied.parameters(), loop.parameters))
        assert pickle.loads(pickle.dumps(loop.model)).weight.equal(loop.model.weight)
        torch.func.grad(lambda x: loop.scaler.scale(loop.model(x).sum()))(torch.ones(2, 4))
        torch.vmap(torch.func.grad(lambda x: loop.scaler.scale(x.pow(2).sum())))(torch.ones(3, 4))

    assert told(steps) is None


def test_gradients_that_overflow_past_the_scaler_are_told_as_that():
    def steps(loop):
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loop.model(torch.ones(2, 4)).float().sum()
        loop.scaler.scale(loss).backward()
        loop.optimizer.step()

    (finding,) = told(steps).findings
    assert (finding.code, finding.where.op) == ("AMP407", "optimizer.step")
    assert "would have skipped the step" in finding.message
