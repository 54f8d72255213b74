"""Autocast's copies of the weights, kept across an update: gradients of old weights; and loops that are well."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor import TrainingRun
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.opening.request import ReplayRequest

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def net(out=4):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, out))


def data():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 16, generator=generator), torch.arange(8) % 4) for _ in range(2)]


def inner_loop(context: str, lr: float = 0.1, precision: str = "fp16", updates: int = 3) -> TrainingRun:
    """Some updates on each batch; what `context` says of autocast is all that differs."""
    torch.manual_seed(0)
    model = net()

    def autocast(*, cache=True):
        return torch.autocast("cpu", dtype=HALF[precision], cache_enabled=cache)

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
            elif context == "each, and the update in it":
                with autocast():
                    loss = update(model, batch, optimizer, scaler)
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
        precision=precision,
        scaler={"init_scale": 1024.0} if precision == "fp16" else None,
    )


def networks_in_one_context() -> TrainingRun:
    """Two networks, each updated once: the second's loss goes through the first, whose update is small."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"critic": net(1), "actor": net(16)})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-4) for name, part in model.items()}

    def step(model, batch, optimizer, scaler):
        with torch.autocast("cpu", dtype=torch.float16):
            real, made = model["critic"](batch[0]), model["critic"](model["actor"](batch[0]).detach())
            loss = functional.softplus(-real).mean() + functional.softplus(made).mean()
            optimizer["critic"].zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer["critic"])
            other = functional.softplus(-model["critic"](model["actor"](batch[0]))).mean()
            optimizer["actor"].zero_grad()
            scaler.scale(other).backward()
            scaler.step(optimizer["actor"])
            scaler.update()
        return loss

    return TrainingRun(model=model, batches=data(), step=step, optimizer=optimizers, scaler={"init_scale": 1024.0})


def replay(name, policy="cuda", **arguments):
    return bisect_nan(ReplayRequest(factory=f"{__file__}:{name}", arguments=arguments, policy=policy))


@pytest.mark.parametrize(("precision", "policy"), [("fp16", "cuda"), ("fp16", "native"), ("bf16", "cuda")])
def test_an_inner_loop_inside_one_context_learns_from_old_weights(precision, policy):
    (finding,) = replay("inner_loop", policy, context="around", precision=precision).findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP210", "error", "stale_casts")
    assert finding.evidence["gradient_error"] > 20 * finding.evidence["gradient_error_with_new_casts"]
    assert (finding.prescription.kind, finding.prescription.status) == ("code", "intervention")


@pytest.mark.parametrize("context", ["each", "each, and the update in it", "without a cache"])
def test_a_context_for_each_forward_and_one_without_a_cache_are_well(context):
    assert replay("inner_loop", context=context).findings == ()


def test_one_update_in_its_context_is_well():
    assert replay("inner_loop", context="around", updates=1).findings == ()


def test_small_updates_of_several_networks_are_no_harm():
    assert {finding.severity for finding in replay("networks_in_one_context").findings} <= {"note"}
