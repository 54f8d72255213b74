"""Scans of what real, tiny trainings saved: gradients that vanish after 1,000 steps, halved moments, odd buffers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from ampdoctor.workflows.scan import scan

FIRST_SICK = 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


def batches():
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, 4, generator=generator)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, (x @ teacher).argmax(1)


def trained(steps, *, init_scale=2.0**12, collapse_at=None):
    """A run under fp16 autocast with what it logged; from `collapse_at` on 50 steps overflow, whatever the scale."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    log = []
    for step, (x, y) in zip(range(1, steps + 1), batches(), strict=False):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(x), y)
        scaled = scaler.scale(loss)
        if collapse_at is not None and collapse_at <= step < collapse_at + 50:
            scaled = scaled * math.inf  # a bad shard of data: every scale overflows
        scaled.backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        log.append({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": 1e-3})
    return model, optimizer, scaler, log


def save(folder, model, optimizer, scaler, log, **more):
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    if scaler is not None:
        torch.save(scaler.state_dict(), folder / "scaler.pt")
    state = {"global_step": log[-1]["step"], "log_history": log, **more}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_gradients_that_read_zero_after_some_steps_are_explained_by_log_and_checkpoint_alone(tmp_path):
    """Overflows that no scale cures bring the scale down to 2^-38; after them every gradient flushes to zero."""
    run = trained(400, collapse_at=FIRST_SICK)
    assert run[2].get_scale() < 2.0**-30
    assert run[3][-1]["grad_norm"] == 0
    report = scan(save(tmp_path, *run))
    assert report.verdict == "sick"
    (vanished,) = [f for f in report.findings if f.code == "AMP702"]
    assert (vanished.severity, vanished.cause) == ("error", "scaler_collapse")
    assert vanished.where.global_step == FIRST_SICK + 50
    assert (vanished.prescription.kind, vanished.prescription.value) == ("dtype", "bfloat16")
    assert [one.kind for one in vanished.prescription.alternatives] == ["scaler"], "if it must stay in fp16"
    assert {f.code for f in report.findings if f.severity == "error"} == {"AMP402", "AMP702"}
    assert report.scaler.recommended is None, "what overflows at a scale of 1 does so under a fresh one as well"


def test_the_same_run_without_the_bad_shard_is_healthy(tmp_path):
    report = scan(save(tmp_path, *trained(150)))
    assert (report.verdict, [f.code for f in report.findings if f.severity != "note"]) == ("healthy", [])
    assert {c.name: c.result for c in report.checks}["training log"] == "ok"


def test_pure_fp16_without_a_scaler_is_named(tmp_path):
    """A loss averaged over ever more elements: in the end every gradient flushes, though weights and loss are fine."""
    torch.manual_seed(0)
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    log = []
    for step, (x, y) in zip(range(1, 61), batches(), strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x.half()).float(), y) * (1e-7 if step > 20 else 1e-5)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
        optimizer.step()
        log.append({"step": step, "loss": loss.item(), "grad_norm": norm.item()})
    report = scan(save(tmp_path, model, optimizer, None, log))
    (vanished,) = [f for f in report.findings if f.code == "AMP702"]
    assert (vanished.severity, vanished.cause, vanished.where.global_step) == ("error", "grad_underflow", 21)
    assert "no loss scaler" in vanished.message
    assert vanished.prescription.kind == "scaler"


def test_a_weight_zero_filled_on_the_way_to_the_file_is_named(tmp_path):
    model, optimizer, _scaler, _log = trained(50)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["model"]["fc1.weight"] = torch.zeros_like(state["model"]["fc1.weight"])
    torch.save(state, tmp_path / "c.pt")
    (finding,) = scan(tmp_path / "c.pt").findings
    assert (finding.code, finding.where.tensor) == ("AMP111", "fc1.weight")


@pytest.mark.parametrize("sick", [False, True])
@pytest.mark.parametrize(
    "laid",
    [
        lambda t: t,
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    ],
)
def test_moments_are_compared_element_by_element_however_they_lie_in_memory(tmp_path, laid, sick):
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(16, 8, 3, 3, generator=generator) * 1e-3
    absent = torch.rand(first.shape, generator=generator) < 0.5
    first[absent] = 0
    second = torch.where(~absent if sick else absent, 0.0, 1e-5).half()
    state = {0: {"step": torch.tensor(100.0), "exp_avg": laid(first), "exp_avg_sq": second}}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "params": [0]}
    weight = torch.randn(first.shape, generator=generator)
    torch.save(
        {"model": {"c.weight": weight}, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "c.pt"
    )
    assert [f.code for f in scan(tmp_path / "c.pt").findings] == (["AMP502"] if sick else [])


@pytest.mark.parametrize("kind", ["RMSprop", "Adam", "Adagrad", "Adadelta"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_epsilon_that_fp16_loses_whichever_moment_it_is_added_to(tmp_path, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8, generator=generator).to(dtype))
    optimizer = getattr(torch.optim, kind)([weight], lr=1e-3)
    weight.grad = (torch.rand(8, 8, generator=generator) + 1).to(dtype)
    optimizer.step()
    torch.save({"model": {"a.weight": weight.data.clone()}, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    lost = dtype == torch.float16 and kind != "Adadelta"  # whose eps is 1e-6
    assert ("AMP503" in {f.code for f in scan(tmp_path / "c.pt").findings}) == lost
    if lost:
        fresh = nn.Parameter(weight.detach().clone())
        fresh.grad = torch.zeros_like(fresh)
        getattr(torch.optim, kind)([fresh], lr=1e-3).step()
        assert bool(fresh.isnan().all())


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.arange(600).expand(1, -1))
        self.embed = nn.Embedding(600, 8)
        self.norm = nn.BatchNorm1d(8)


@pytest.mark.parametrize(
    ("dtype", "codes"), [(torch.float32, []), (torch.float16, []), (torch.bfloat16, ["AMP110"]), (torch.int32, [])]
)
def test_positions_that_a_cast_rounded(tmp_path, dtype, codes):
    """Merging tools cast every tensor: bf16 holds whole numbers up to 256, fp16 up to 2048."""
    state = Positions().state_dict()
    state["position_ids"] = state["position_ids"].to(dtype)
    torch.save(state, tmp_path / "c.pt")
    assert [f.code for f in scan(tmp_path / "c.pt").findings] == codes


def test_impossible_buffers(tmp_path):
    state = Positions().state_dict()
    state["norm.num_batches_tracked"] = torch.tensor(-3)
    state["norm.running_var"] = torch.zeros(8)
    torch.save(state, tmp_path / "c.pt")
    assert [(f.code, f.where.tensor) for f in scan(tmp_path / "c.pt").findings] == [
        ("AMP106", "norm.num_batches_tracked"),
        ("AMP110", "norm.running_var"),
    ]


def test_foreign_objects_are_a_note_with_their_names(tmp_path):
    import argparse

    torch.save({"model": Net().state_dict(), "args": argparse.Namespace(lr=0.1)}, tmp_path / "c.pt")
    report = scan(tmp_path / "c.pt")
    assert report.verdict == "healthy"
    assert [(f.code, f.severity, f.evidence["names"]) for f in report.findings] == [
        ("AMP109", "note", ["argparse.Namespace"])
    ]


def test_step_counters_that_a_cast_stopped(tmp_path):
    model, optimizer, _scaler, _log = trained(3)
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["step"] = torch.tensor(5000.0).bfloat16() * 0 + 256
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "c.pt")
    (finding,) = scan(tmp_path / "c.pt").findings
    assert (finding.code, finding.severity, finding.cause) == ("AMP504", "error", "bad_checkpoint")
    assert finding.where.op == "optimizer_state:step"
    names = [name for name, _ in model.named_parameters()]
    assert [where.tensor for where in (finding.where, *finding.also)] == names
    assert finding.evidence["update_length"] == pytest.approx(0.475, abs=1e-3)


@pytest.mark.parametrize("count", [1e-30, -3.0, float("nan"), float("inf")])
def test_a_half_step_counter_that_is_no_number_of_steps_ends_no_scan(tmp_path, count):
    state = {
        0: {"step": torch.tensor(count, dtype=torch.bfloat16), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    torch.save(
        {"model": {"w": torch.ones(2)}, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "c.pt"
    )
    assert scan(tmp_path / "c.pt").verdict in ("healthy", "sick")
