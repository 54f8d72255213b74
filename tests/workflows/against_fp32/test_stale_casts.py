"""Autocast's copies of the weights, kept across an update: gradients of old weights; and loops that are well."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest


def net(out=4):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, out))


def data():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 16, generator=generator), torch.arange(8) % 4) for _ in range(2)]


def inner_loop(context: str, lr: float = 0.1, updates: int = 3) -> TrainingRun:
    """Some updates on each batch; what `context` says of autocast is all that differs."""
    torch.manual_seed(0)
    model = net()

    def autocast(*, cache=True):
        return torch.autocast("cpu", dtype=torch.float16, cache_enabled=cache)

    def update(model, batch, optimizer, scaler):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def step(model, batch, optimizer, scaler):
        for _ in range(updates):
            if context == "each":
                optimizer.zero_grad()
                with autocast():
                    loss = functional.cross_entropy(model(batch[0]).float(), batch[1])
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        if context in ("around", "without a cache"):
            with autocast(cache=context == "around"):
                for _ in range(updates):
                    loss = update(model, batch, optimizer, scaler)
        return loss

    return TrainingRun(
        model=model,
        batches=data(),
        step=step,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        scaler={"init_scale": 1024.0},
    )


def replay(name, **arguments):
    return bisect_nan(ReplayRequest(factory=f"{__file__}:{name}", arguments=arguments))


def test_an_inner_loop_inside_one_context_learns_from_old_weights():
    (finding,) = replay("inner_loop", context="around").findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP210", "error", "stale_casts")
    assert finding.evidence["gradient_error"] > 20 * finding.evidence["gradient_error_with_new_casts"]
    assert (finding.prescription.kind, finding.prescription.status) == ("code", "intervention")


def warming_up() -> TrainingRun:
    """The first step's updates are a thousandth of the later ones'."""
    run = inner_loop("around", lr=1e-4)
    inner = run.step

    def step(model, batch, optimizer, scaler, step):
        optimizer.param_groups[0]["lr"] = 0.1 if step else 1e-4
        return inner(model, batch, optimizer, scaler)

    return dataclasses.replace(run, step=step, batches=data() * 2)


def test_a_first_step_in_which_old_copies_hardly_matter_does_not_end_the_comparison():
    (finding,) = replay("warming_up").findings
    assert (finding.code, finding.severity, finding.where.step) == ("AMP210", "error", 1)


@pytest.mark.parametrize("context", ["each", "without a cache"])
def test_a_context_for_each_forward_and_one_without_a_cache_are_well(context):
    assert replay("inner_loop", context=context).findings == ()


def swapped(write: str, healthy: str = "") -> TrainingRun:
    """A penalty holds the model's outputs against those of reference weights that are swapped in inside one context."""
    torch.manual_seed(0)
    model = net()
    generator = torch.Generator().manual_seed(1)
    reference = [p.detach() + 0.05 * torch.randn(p.shape, generator=generator) for p in model.parameters()]

    def swap(values):
        old = [p.detach().clone() for p in model.parameters()]
        for p, v in zip(model.parameters(), values, strict=True):
            if write == "copy_ of .data":
                p.data.copy_(v)
            elif write == ".data = ":
                p.data = v.clone()
        if write == "load_state_dict":
            model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
        if healthy == "cache cleared":
            torch.clear_autocast_cache()
        return old

    def step(model, batch, optimizer, scaler):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0]).float()
            if healthy != "a context each":
                policy = swap(reference)
                other = model(batch[0]).float()
                swap(policy)
        if healthy == "a context each":
            policy = swap(reference)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                other = model(batch[0]).float()
            swap(policy)
        loss = functional.cross_entropy(out, batch[1]) + 30 * (out - other.detach()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return TrainingRun(
        model=model,
        batches=data(),
        step=step,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="bf16",
        scaler=None,
    )


@pytest.mark.parametrize("write", ["copy_ of .data", ".data = ", "load_state_dict"])
def test_any_write_to_a_weight_whose_copy_is_kept_is_named_with_its_line(write):
    (finding,) = replay("swapped", write=write).findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP210", "error", "stale_casts")
    assert ("weights are replaced" if write == ".data = " else "copy_ at") in finding.message
    if "data" in write:
        assert finding.evidence["gradient_error"] > 20 * finding.evidence["gradient_error_with_new_casts"]
        assert (finding.prescription.kind, finding.prescription.status) == ("code", "intervention")
    else:  # fp32 refuses the step: the weight that its backward needs was written
        assert finding.evidence["gradient_error"] > 0.5
        assert (finding.prescription.kind, finding.prescription.status) == ("code", "not_run")
    if write.startswith("copy_"):
        assert finding.where.source.file.endswith("test_stale_casts.py")


def drifting() -> TrainingRun:
    """The best weights so far are swapped in inside the context: those that the run begins with, at first."""
    torch.manual_seed(0)
    model = net()
    best = copy.deepcopy(model.state_dict())

    def step(model, batch, optimizer, scaler):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0]).float()
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(best)
            with torch.no_grad():
                other = model(batch[0]).float()
            model.load_state_dict(own)
        loss = functional.cross_entropy(out, batch[1]) + 30 * (out - other).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return TrainingRun(
        model=model,
        batches=data() * 3,
        step=step,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        precision="bf16",
        scaler=None,
    )


def test_old_copies_that_are_equal_in_the_first_step_are_found_in_a_later_one():
    (finding,) = replay("drifting").findings
    assert (finding.code, finding.severity) == ("AMP210", "error")
    assert finding.where.step > 0
    assert "copy_ at" in finding.message  # not what copy.deepcopy does
    assert finding.where.source.file.endswith("test_stale_casts.py")


@pytest.mark.parametrize("healthy", ["cache cleared", "a context each"])
def test_weights_that_are_swapped_and_cast_anew_are_well(healthy):
    assert replay("swapped", write="copy_ of .data", healthy=healthy).findings == ()
