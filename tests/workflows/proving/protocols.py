"""Steps that keep to a scaler's protocol in unusual ways, and steps that break it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun

SCALE = 1024.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(functional.gelu(self.first(x)))


def _run(step, *, model=None, optimizer=None, fused=False, scaler=SCALE, count=4):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return TrainingRun(
        model=model or Net(),
        batches=[
            (torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)) for _ in range(count)
        ],
        step=step,
        optimizer=optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, fused=fused)),
        scaler={"init_scale": scaler} if scaler else None,
    )


def _one_each(model):
    return {name: torch.optim.SGD(model[name].parameters(), lr=1e-3) for name in model}


def _loss(model, x, y):
    return functional.mse_loss(model(x), y)


def _clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


# -- healthy -----------------------------------------------------------------------------------------------------


def accumulates(parts=3, *, zeroed_in_place=False, fused=False):
    """Micro-batches, then unscale, clip, step."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad(set_to_none=not zeroed_in_place)
        for i in range(parts):
            with autocast():
                loss = _loss(model, batch[0][i::parts], batch[1][i::parts]) / parts
            scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
            _clip(model)
        scaler.step(optimizer)
        scaler.update()
        return loss

    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)

    return _run(step, optimizer=optimizer)


def adversaries():
    """Two optimizers, one scaler for one of them: the generator's backward goes through the critic, already stepped."""
    model = nn.ModuleDict({"g": Net(), "d": nn.Linear(4, 1)})

    def step(model, batch, optimizer, scaler, autocast):
        with autocast():
            fake = model["g"](batch[0])
            critic = model["d"](fake.detach()).mean() - model["d"](batch[1]).mean()
        optimizer["d"].zero_grad(set_to_none=False)
        critic.backward()
        optimizer["d"].step()
        optimizer["g"].zero_grad()
        with autocast():
            loss = -model["d"](fake).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer["g"])
        _clip(model["g"])
        scaler.step(optimizer["g"])
        scaler.update()
        return loss

    def optimizers(model):
        return {name: torch.optim.Adam(model[name].parameters(), lr=1e-3) for name in ("d", "g")}

    return _run(step, model=model, optimizer=optimizers)


def two_losses(*, by_hand=False):
    """Both scaled; the second with the scaler's own number where `by_hand`."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            out = model(batch[0])
            first, second = functional.mse_loss(out, batch[1]) * 0.01, functional.l1_loss(out, batch[1])
        scaler.scale(first).backward(retain_graph=True)
        (second * scaler.get_scale() if by_hand else scaler.scale(second)).backward()
        scaler.step(optimizer)
        scaler.update()
        return first

    return _run(step)


def scaled_twice(*, divided=False):
    """A penalty is scaled by itself, and again with the loss that it is added to; divided in between, it is right."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = functional.mse_loss(model(batch[0]), batch[1])
        penalty = scaler.scale(1e-3 * sum(p.square().sum() for p in model.parameters()))
        scaler.scale(loss + (penalty / scaler.get_scale() if divided else penalty)).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step)


def regularised_after_unscaling():
    """The penalty on the weights is fp32 and unscaled, and joins gradients that are unscaled as well."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        sum(p.square().sum() for p in model.parameters()).backward()
        _clip(model)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step)


def gradient_penalty(*, unscaled=True, scale=SCALE):
    """On the inputs, as torch's AMP examples write it; without the division where not `unscaled`."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        with autocast():
            loss = _loss(model, x, batch[1])
        grads = torch.autograd.grad(scaler.scale(loss), [x], create_graph=True)
        if unscaled:
            grads = [grad * (1.0 / scaler.get_scale()) for grad in grads]
        with autocast():
            loss = loss + sum(grad.float().square().sum() for grad in grads).sqrt()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step, scaler=scale)


def cached_gradients(factor=1.0, scale=SCALE):
    """The second backward starts from gradients that the first one scaled."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with torch.no_grad(), autocast():
            out = model(batch[0])
        out = out.float().requires_grad_()
        loss = functional.mse_loss(out, batch[1]) * factor
        scaler.scale(loss).backward()
        with autocast():
            again = model(batch[0])
        (again.float() * out.grad).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step, scaler=scale)


# -- sick --------------------------------------------------------------------------------------------------------


def unscaled_early():
    """`unscale_` after the first of three micro-batches."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        for i in range(3):
            with autocast():
                loss = _loss(model, batch[0][i::3], batch[1][i::3]) / 3
            scaler.scale(loss).backward()
            if i == 0:
                scaler.unscale_(optimizer)
                _clip(model)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step)


def one_loss_unscaled(*, fused=False):
    """The second loss goes backward without `scale`."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            out = model(batch[0])
            first, second = functional.mse_loss(out, batch[1]) * 0.01, functional.l1_loss(out, batch[1])
        scaler.scale(first).backward(retain_graph=True)
        second.backward()
        scaler.step(optimizer)
        scaler.update()
        return first

    return _run(step, fused=fused)


def edited_while_scaled(*, divides=False, clips=False, hooks=False, ascends=False):
    """Where fp32 clips too, what is clipped alone comes out at 1/scale of it, as what is divided twice."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        parameters = list(model.parameters())
        for parameter in parameters if hooks else ():
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        for again in range(1 + ascends):
            with autocast():
                loss = _loss(model, *batch)
            scaler.scale(loss).backward()
            if ascends and not again:
                with torch.no_grad():
                    moves = [p.grad * 1e-2 for p in parameters]
                    torch._foreach_add_(parameters, moves)
                optimizer.zero_grad()
        with torch.no_grad():
            if ascends:
                torch._foreach_sub_(parameters, moves)
            if divides:
                torch._foreach_div_([p.grad for p in parameters], scaler.get_scale())
        if clips:
            _clip(model)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return _run(step)


def critic_not_cleared():
    """The generator's scaled backward leaves gradients in the critic, whose own loss is plain."""
    model = nn.ModuleDict({"g": Net(), "d": nn.Linear(4, 1)})

    def step(model, batch, optimizer, scaler, autocast):
        with autocast():
            fake = model["g"](batch[0])
            loss = functional.softplus(-model["d"](fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer["g"])
        scaler.update()
        with autocast():
            critic = functional.softplus(model["d"](fake.detach())).mean() - model["d"](batch[1]).mean()
        critic.backward()
        optimizer["d"].step()
        optimizer["g"].zero_grad()
        optimizer["d"].zero_grad()
        return loss

    return _run(step, model=model, optimizer=_one_each)


def scaled_by_another(how, *, fused=False):
    """What divides the gradients is not what multiplied the loss; `same`: two scalers of one scale, which is well."""
    other = torch.amp.GradScaler("cpu", init_scale=SCALE if how == "same" else 16.0)

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        for i in range(3):
            with autocast():
                loss = _loss(model, batch[0][i::3], batch[1][i::3]) / 3
            scaler.scale(loss).backward()
            if how == "within":
                scaler.update(scaler.get_scale() * 2)
        if how == "before":
            scaler.update(SCALE / 16)
        if how in ("same", "two"):
            other.scale(torch.ones(1))
        stepped = other if how in ("same", "two") else scaler
        stepped.step(optimizer)
        stepped.update(SCALE if how in ("before", "within") else None)
        return loss

    return _run(step, fused=fused)


def never_comes_down(how, scale=2.0**24):
    """A scaler made in each step backs off after it, and is forgotten; one that is not updated does not back off."""

    def step(model, batch, optimizer, scaler, autocast):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if how == "anew" else scaler
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, *batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update() if how == "anew" else scaler._per_optimizer_states.clear()
        return loss

    return _run(step, scaler=None if how == "anew" else scale, count=8)


def stepped_again(how, *, overflow_at=None, count=4):
    """The optimizer steps once more after the scaler; or it only looks like that."""
    done = []

    def step(model, batch, optimizer, scaler, autocast):
        done.append(None)
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, *batch) * (1e3 if len(done) - 1 == overflow_at else 1.0)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if how == "by_hand" or (how == "where_skipped" and scaler.get_scale() < before):
            optimizer.step()  # AGAIN
        if how == "by_the_scaler":
            scaler.step(optimizer)  # AGAIN
            scaler.update()
        if how == "another_backward":
            optimizer.zero_grad()
            scaler.scale(_loss(model, *batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    run = _run(step, count=count)
    run.precision = "fp16"
    return run


# -- refused by torch --------------------------------------------------------------------------------------------


def refused(how):
    """A call out of turn, for which torch's scaler raises; or an optimizer that raises by itself."""

    def step(model, batch, optimizer, scaler, autocast):
        optimizer.zero_grad()
        with autocast():
            loss = _loss(model, *batch)
        (loss if how == "unscaled" else scaler.scale(loss)).backward()
        if how == "twice":
            scaler.unscale_(optimizer)
            scaler.unscale_(optimizer)  # TWICE
        if how == "past_it":
            optimizer.step()  # PAST
        else:
            scaler.step(optimizer)  # STEP
        scaler.update()

    model, made = Net(), None
    if how == "half":
        model = model.half()  # HALF
    if how == "no_gradients":
        made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    if how == "its_own":

        class Failing(torch.optim.SGD):
            def step(self, closure=None):
                raise AssertionError("out of order")

        made = Failing(model.parameters(), lr=1.0)
    run = _run(step, model=model, optimizer=made)
    if how == "half":
        run.batches = [(x.half(), y.half()) for x, y in run.batches]
    return run
