"""What a loop does with a backward that is not finite: uses it, leaves it out, or ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampdoctor.live.op_watch import StepWatch


class SickError(BaseException):
    """Ends a loop as a failed test is ended."""


def _stop(report):
    raise SickError(report)


def watched(loop, **parts):
    """What a watch says of a loop: (code, harmed), or None."""
    watch = StepWatch(_stop)
    try:
        with watch.watching(**parts):
            loop()
    except SickError:
        pass
    if watch.report is None:
        return None
    found = watch.report.findings[0]
    return found.code, found.evidence["harmed"]


def batches(*, bad=2, value=torch.nan, count=4):
    torch.manual_seed(0)
    made = [torch.randn(4, 8) for _ in range(count)]
    made[bad][0, 0] = value
    return made


def small(factor=1.0):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), 1e-3 * factor)


def norm_is_finite(model):
    return bool(nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite())


def each_is_finite(model):
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())


def clear(optimizer):
    optimizer.zero_grad()


def clear_in_place(optimizer):
    optimizer.zero_grad(set_to_none=False)


def guarded_loop(looks=norm_is_finite, clears=clear, **given):
    model, optimizer = small()
    for x in batches(**given):
        clears(optimizer)
        model(x).pow(2).mean().backward()
        if looks(model):
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def always(_model):
    return True


def never(_model):
    return False


@pytest.mark.parametrize("looks", [norm_is_finite, each_is_finite])
@pytest.mark.parametrize("clears", [clear, clear_in_place])
@pytest.mark.parametrize("value", [torch.nan, 1e25])
@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_loop_that_looks_at_its_gradients_and_leaves_the_step_out_is_well(looks, clears, value, bad):
    assert watched(lambda: guarded_loop(looks, clears, value=value, bad=bad)) is None


@pytest.mark.parametrize("bad", [0, 2])
def test_the_same_loop_is_sick_where_it_takes_the_step(bad):
    code, harmed = watched(lambda: guarded_loop(always, bad=bad))
    assert (code, harmed) == ("AMP204", ["loss"])


def test_a_last_backward_that_nobody_looked_at_is_sick():
    def loop():
        model, optimizer = small()
        for index, x in enumerate(batches(bad=3)):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            if index < 3:
                optimizer.step()

    assert watched(loop)[0] == "AMP204"


@pytest.mark.parametrize("looks", [norm_is_finite, never])
@pytest.mark.parametrize("known", [False, True])
def test_a_single_backward_without_a_step_is_sick(looks, known):
    model, optimizer = small()

    def loop():
        model(batches(bad=0)[0]).pow(2).mean().backward()
        looks(model)

    assert watched(loop, **({"model": model, "optimizers": [optimizer]} if known else {}))[0] == "AMP204"


def test_a_single_gradient_that_is_not_finite_is_sick_also_where_the_optimizer_is_known():
    model, optimizer = small()
    assert watched(lambda: model(torch.zeros(1, 8)).mul(0).sqrt().sum().backward(), optimizers=[optimizer]) is not None
    optimizer.zero_grad()
    assert watched(lambda: model(torch.ones(1, 8)).sum().backward(), optimizers=[optimizer]) is None


def accumulating(looks, *, clears):
    model, optimizer = small()
    for index, x in enumerate(batches(bad=2, count=8)):
        model(x).pow(2).mean().backward()
        if index % 2:
            if looks(model):
                optimizer.step()
            if clears:
                optimizer.zero_grad()


def test_gradients_of_several_backwards_are_judged_where_they_are_used():
    assert watched(lambda: accumulating(norm_is_finite, clears=True)) is None
    assert watched(lambda: accumulating(always, clears=True))[0] == "AMP204"


def test_finite_gradients_of_an_infinite_loss_are_sick_where_they_are_used():
    def loop(uses):
        model, optimizer = small()
        for factor in (1.0, 1e38, 1.0):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).sum() + torch.tensor([factor, factor]).mul(1e5).prod()
            loss.backward()
            if uses or bool(loss.isfinite()):
                optimizer.step()

    assert watched(lambda: loop(uses=False)) is None
    assert watched(lambda: loop(uses=True)) == ("AMP201", ["loss"])


def test_gradients_that_are_zero_though_the_loss_is_nan_are_not_cleared_by_that():
    def loop(uses):
        model, optimizer = small()
        for target in (1, -100, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.ones(4, 8)), torch.full((4,), target))
            loss.backward()
            if uses or bool(loss.isfinite()):
                optimizer.step()

    assert watched(lambda: loop(uses=False)) is None
    assert watched(lambda: loop(uses=True)) == ("AMP202", ["loss"])


def test_a_step_of_another_optimizer_does_not_use_what_was_left_out():
    def loop(*, looks):
        (one, first), (two, second) = small(), small()
        for index, x in enumerate(batches(bad=2)):
            first.zero_grad()
            one(x).pow(2).mean().backward()
            if looks(one):
                first.step()
            second.zero_grad()
            two(torch.full((1, 8), float(index))).pow(2).mean().backward()
            second.step()

    assert watched(lambda: loop(looks=norm_is_finite)) is None
    assert watched(lambda: loop(looks=always))[0] == "AMP204"


def test_a_loop_with_a_scaler_may_look_itself():
    def loop(*, looks):
        model, optimizer = small()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for x in batches():
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean()).backward()
            scaler.unscale_(optimizer)
            if looks(model):
                scaler.step(optimizer)
                scaler.update()
            else:
                scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    assert watched(lambda: loop(looks=norm_is_finite)) is None
    assert watched(lambda: loop(looks=always)) is not None


def test_a_closures_loss_is_its_steps():
    def loop(factor):
        model = nn.Linear(8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).pow(2).mean() * factor
            loss.backward()
            return loss

        optimizer.step(closure)

    assert watched(lambda: loop(1.0)) is None
    assert watched(lambda: loop(torch.nan)) is not None


def test_a_checkpointed_part_has_its_gradients_from_the_same_backward():
    def loop(*, reentrant, looks):
        model, optimizer = small()
        for x in batches():
            optimizer.zero_grad()
            out = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            out.pow(2).mean().backward()
            if looks(model):
                optimizer.step()

    for reentrant in (True, False):
        assert watched(lambda r=reentrant: loop(reentrant=r, looks=norm_is_finite)) is None
        assert watched(lambda r=reentrant: loop(reentrant=r, looks=always))[0] == "AMP204"


# -- gradients that are handed out ---------------------------------------------------------------------------------


def by_hand(model, *, factor=1.0, bad=None, looks=False, count=4):
    """Train with `torch.autograd.grad`; the last update is `factor` times too large."""
    for index, x in enumerate(batches(bad=bad) if bad is not None else [torch.ones(2, 8)] * count):
        loss = model(x).pow(2).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if looks and not all(bool(g.isfinite().all()) for g in gradients):
            continue
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient * (factor if index == count - 1 else 1.0))


@pytest.mark.parametrize("known", [False, True])
def test_a_training_by_autograd_grad_is_judged_by_its_parameters(known):
    for factor, well in ((1.0, True), (torch.inf, False)):
        model, _ = small()
        said = watched(lambda m=model, f=factor: by_hand(m, factor=f), **({"model": model} if known else {}))
        assert (said is None) == well


def test_a_loop_by_autograd_grad_may_leave_an_update_out():
    assert watched(lambda: by_hand(small()[0], bad=2, looks=True)) is None
    assert watched(lambda: by_hand(small()[0], bad=2)) is not None
    assert watched(lambda: by_hand(small()[0], bad=3)) is not None


def test_a_single_autograd_grad_by_the_parameters_is_sick_where_it_is_not_finite():
    def loop(function):
        model, _ = small()
        torch.autograd.grad(function(model(torch.ones(1, 8)).mul(0)).sum(), list(model.parameters()))

    assert watched(lambda: loop(torch.exp)) is None
    assert watched(lambda: loop(torch.log)) is not None
    assert watched(lambda: loop(torch.sqrt)) is not None  # of a finite loss


def test_a_training_by_functional_gradients_that_diverges_is_sick():
    def loop(rate):
        model, _ = small()
        weights = dict(model.named_parameters())

        def loss(weights):
            return torch.func.functional_call(model, weights, (torch.ones(2, 8),)).pow(2).mean()

        for _ in range(12):
            gradients = torch.func.grad(loss)(weights)
            weights = {name: weight - rate * gradients[name] for name, weight in weights.items()}

    assert watched(lambda: loop(1e-3)) is None
    assert watched(lambda: loop(1e6)) is not None


def test_a_penalty_and_a_saliency_map_are_no_training():
    def saliency(model):
        x = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(model(x).mul(0).log().sum(), x)
        torch.func.grad(lambda x: model(x).mul(0).log().sum())(torch.ones(8))

    def penalty(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.ones(2, 8, requires_grad=True)
            out = model(x).pow(2).sum()
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
            (out + (gradient.norm(2, dim=1) - 1).pow(2).mean()).backward()
            optimizer.step()

    for loop in (saliency, penalty):
        assert watched(lambda f=loop: f(small()[0])) is None
        model, _ = small()
        assert watched(lambda f=loop, m=model: f(m), model=model) is None


def test_a_model_that_came_as_it_is_may_be_used():
    def saliency(model):
        x = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)

    def inference(model):
        with torch.no_grad():
            model(torch.ones(2, 8))

    for use in (saliency, inference, lambda model: None):
        model, _ = small()
        with torch.no_grad():
            model.weight[0, 0] = torch.nan
        assert watched(lambda u=use, m=model: u(m), model=model) is None


def test_a_model_that_is_given_is_looked_at_at_the_end_whatever_was_done_with_it():
    def update(model):
        with torch.no_grad():
            model.weight.mul_(1e38).mul_(1e38)

    model, _ = small()
    assert watched(lambda: update(model), model=model) is not None
    model, _ = small()
    model.requires_grad_(requires_grad=False)
    assert watched(lambda: model(torch.ones(2, 8)), model=model) is None
