from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from ampdoctor.live.numbers.step_numbers import SAMPLED, StepNumbers


class Told:
    """Numbers and what they have told."""

    def __init__(self, **options):
        self.steps, self.makes = [], []
        self.numbers = StepNumbers(self.steps.append, self.makes.append, **options)

    @property
    def details(self):
        return [make({}, str) for make in self.makes]


def model_and(optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))
    return model, optimizer(model.parameters(), lr=0.1, **options)


def train(
    steps, model, optimizer, numbers=None, *, scaler=None, max_norm=None, micro=1, fused=False, data_seed=1, poison=()
):
    """A loop as users write it, which tells numbers what it does."""
    generator = torch.Generator().manual_seed(data_seed)
    named = list(model.named_parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        if numbers:
            numbers.begin_step(step)
        for _ in range(micro):
            x = torch.randn(8, 6, generator=generator)
            out = model(x)
            if numbers and numbers.looking:
                out.register_hook(lambda grad: numbers.incoming("", grad) and None)
            loss = out.pow(2).mean() / micro
            if step in poison:
                loss = loss * math.inf
            scaled = scaler.scale(loss) if scaler else loss
            if numbers:
                numbers.loss(loss)
            scaled.backward()
        if scaler and not fused:
            if numbers:
                numbers.unscaling(model.parameters())
            scaler.unscale_(optimizer)
        norms.append(math.sqrt(sum(float(p.grad.double().pow(2).sum()) for _, p in named)))
        if max_norm:
            clip_grad_norm_(model.parameters(), max_norm)
        before = named[0][1].detach().clone()
        if numbers:
            found = scaler and scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            numbers.about_to_step(
                "optimizer",
                named,
                number=step,
                scale=scaler and scaler._scale,
                found_inf=found and next(iter(found.values())),
                growth_tracker=scaler and scaler._growth_tracker,
                unscaled=not fused,
            )
        if scaler:
            scaler.step(optimizer)
        else:
            optimizer.step()
        if numbers:
            numbers.stepped("optimizer", skipped=torch.equal(before, named[0][1]) if fused else None)
        if scaler:
            scaler.update()
    return norms


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_norms_losses_and_the_scale_of_each_step():
    told = Told(every=0)
    model, optimizer = model_and()
    norms = train(3, model, optimizer, told.numbers, micro=2)
    assert [s.step for s in told.steps] == [0, 1, 2]
    assert [s.gradient_norm for s in told.steps] == pytest.approx(norms, rel=1e-5)
    assert {(s.norm_clipped, s.norm_local, s.max_norm, s.loss_scale) for s in told.steps} == {
        (False, False, None, None)
    }
    assert [s.micro_steps for s in told.steps] == [2, 2, 2]
    assert all(s.loss == sum(s.losses) > 0 for s in told.steps)
    assert told.makes == []
    assert told.numbers.failed is None


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_everything_is_unscaled(fused):
    plain, scaled = Told(every=0), Told(every=0)
    train(4, *model_and(fused=fused), plain.numbers)
    train(4, *model_and(fused=fused), scaled.numbers, scaler=scaler_of(1024.0), fused=fused)
    assert [s.loss_scale for s in scaled.steps] == [1024.0] * 4
    assert [s.growth_tracker for s in scaled.steps] == [0, 1, 2, 3]
    assert [s.gradient_norm for s in scaled.steps] == pytest.approx([s.gradient_norm for s in plain.steps], rel=1e-4)
    assert [s.loss for s in scaled.steps] == pytest.approx([s.loss for s in plain.steps], rel=1e-5)
    assert {s.skipped for s in scaled.steps} == {False}


def test_a_skipped_step_says_so_and_names_the_gradients():
    told = Told()
    train(3, *model_and(), told.numbers, scaler=scaler_of(8.0), poison={1})
    assert [s.skipped for s in told.steps] == [False, True, False]
    assert [s.loss_scale for s in told.steps] == [8.0, 8.0, 4.0]
    assert not math.isfinite(told.steps[1].gradient_norm)
    assert "0.weight" in told.steps[1].sick
    assert told.steps[2].sick == ()


@pytest.mark.parametrize("fused", [False, True])
def test_what_clipping_computes_is_not_computed_again(fused, monkeypatch):
    told, bare = Told(every=0), Told(every=0)
    train(3, *model_and(fused=fused), bare.numbers, scaler=scaler_of(64.0), max_norm=0.05, fused=fused)
    monkeypatch.setattr("ampdoctor.live.numbers.step_numbers.norms_of", lambda *_, **__: pytest.fail("computed again"))
    with told.numbers.watching():
        norms = train(3, *model_and(fused=fused), told.numbers, scaler=scaler_of(64.0), max_norm=0.05, fused=fused)
    assert told.numbers.failed is None
    assert [s.gradient_norm * (64.0 if fused else 1.0) for s in told.steps] == pytest.approx(norms, rel=1e-5)
    assert {s.max_norm for s in told.steps} == {0.05}
    assert all(s.gradient_norm < 0.051 for s in bare.steps)  # nobody was hearing


def test_clipping_of_a_part_is_not_the_norm_of_all():
    told = Told(every=0)
    model, _ = model_and()
    named = list(model.named_parameters())
    with told.numbers.watching():
        told.numbers.begin_step(0)
        model(torch.ones(4, 6)).pow(2).mean().backward()
        clip_grad_norm_(model[0].parameters(), 1e-3)
        told.numbers.about_to_step("optimizer", named, number=0)
        told.numbers.stepped("optimizer")
    assert told.steps[0].norm_clipped


def test_details_are_the_tensors_own():
    told = Told(every=2)
    model, optimizer = model_and()
    train(3, model, optimizer, told.numbers, scaler=scaler_of(1024.0))
    first, second = told.details
    assert (first.step, second.step, first.reason, first.loss_scale) == (0, 2, SAMPLED, 1024.0)
    by = {(t.role, t.tensor): t for t in first.tensors}
    assert {role for role, _ in by} == {"gradient", "parameter", "activation_gradient"}
    weight, gradient, back = by["parameter", "0.weight"], by["gradient", "0.weight"], by["activation_gradient", ""]
    fresh = model_and()[0][0].weight.detach()
    assert weight.norm == pytest.approx(float(fresh.norm()), rel=1e-6)
    assert weight.amax == pytest.approx(float(fresh.abs().max()))
    assert (weight.elements, weight.sampled, weight.format) == (30, 30, "fp32")
    assert weight.update_ratio == pytest.approx(0.1 * gradient.norm / weight.norm, rel=1e-5)  # SGD
    expected = math.log2(65504 / (gradient.amax * 1024.0))
    assert (gradient.log2_headroom, gradient.scale) == (pytest.approx(expected), None)
    assert (back.scale, back.elements) == (1024.0, 8)
    assert told.numbers.failed is None


@pytest.mark.parametrize(("dtype", "half"), [(torch.float32, None), (torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_what_half_loses_is_said_of_the_half_that_the_run_computes_in(dtype, half):
    told = Told(every=1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told.numbers.begin_step(0)
    model(torch.ones(8, 6, dtype=dtype)).pow(2).mean().backward()
    told.numbers.about_to_step("optimizer", list(model.named_parameters()), number=0)
    optimizer.step()
    told.numbers.stepped("optimizer")
    for one in told.details[0].tensors:
        if one.role == "gradient":
            largest = None if half is None else math.log2(torch.finfo(dtype).max) - math.log2(one.amax)
            assert one.log2_headroom == (None if half is None else pytest.approx(largest))
            assert (one.flushed_share is None) == (half is None)


def test_clipping_is_taken_out_of_what_half_loses():
    told, clipped = Told(every=1), Told(every=1)
    train(1, *model_and(), told.numbers, scaler=scaler_of(8.0))
    with clipped.numbers.watching():
        train(1, *model_and(), clipped.numbers, scaler=scaler_of(8.0), max_norm=1e-4)
    for one, other in zip(told.details[0].tensors, clipped.details[0].tensors, strict=True):
        if one.role == "gradient" and one.amax:
            assert one.log2_headroom is not None
            assert other.amax < one.amax / 100
            assert other.log2_headroom == pytest.approx(one.log2_headroom, abs=1e-3)


def test_a_skipped_step_moves_nothing_and_says_no_ratio():
    told = Told(every=1)
    train(1, *model_and(), told.numbers, scaler=scaler_of(8.0), poison={0})
    parameters = [t for t in told.details[0].tensors if t.role == "parameter"]
    assert {t.update_ratio for t in parameters} == {None}
    assert {t.nonfinite for t in parameters} == {0}
    assert any(t.nonfinite for t in told.details[0].tensors if t.role == "gradient")


def test_an_error_ends_the_numbers_and_not_the_loop(monkeypatch):
    def fails(_):
        raise ValueError("the disk is full\nreally")

    numbers = StepNumbers(fails, lambda _: None)
    train(3, *model_and(), numbers)
    assert numbers.failed == "ValueError: the disk is full"
    assert not numbers.looking


class Seen(TorchDispatchMode):
    """A mode of the user's, which sees every op."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_s_sees_nothing_of_it():
    ops = []
    for told in (None, Told(every=1)):
        model, optimizer = model_and()
        with Seen() as seen, torch.device("meta"):
            model[3](torch.ones(1, device="cpu"))
            for p in model.parameters():
                p.grad = torch.ones(p.shape, device="cpu")
            if told:
                told.numbers.begin_step(0)
                told.numbers.incoming("", model[0].bias)
                told.numbers.loss(model[0].bias.grad[:1])
                told.numbers.about_to_step("o", list(model.named_parameters()), number=0, scale=4.0)
            else:
                _ = model[0].bias.grad[:1]
            optimizer.step()
            if told:
                told.numbers.stepped("o")
                assert told.numbers.failed is None
                assert len(told.details[0].tensors) == 13
                assert told.steps[0].losses == (1.0,)
            ops.append(seen.ops)
    assert ops[0] == ops[1] != []


def test_a_compiled_step_is_left_alone():
    told = Told(every=1)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        told.numbers.begin_step(0)
        told.numbers.about_to_step("o", [("w", parameter)], number=0)
        return x + 1

    step(torch.ones(1))
    assert told.numbers._open == {}
    assert told.numbers.failed is None


def test_a_graph_that_is_captured_is_left_alone(monkeypatch):
    told = Told(every=1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    train(2, *model_and(), told.numbers)
    assert told.steps == []
    assert told.numbers.failed is None
