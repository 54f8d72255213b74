"""The lines to paste are run: each compiles, and those that change a training cure one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor.diagnosis.replay.nonfinite import MISUSE_ADVICE, for_optimizer
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Prescription, Report
from ampdoctor.evidence.report_health import HealthSection, LookMark
from ampdoctor.evidence.report_scaler import ScalerSection
from ampdoctor.reports.fix_code import TrainingContext, code_of, setting_of
from ampdoctor.reports.json_report import render_json
from tests.browser.health_pages import health_run
from tests.samples import OVERFLOW, SICK

CPU = TrainingContext(device="cpu")
PURE = TrainingContext(device="cpu", autocast=False)
EVIL = 'a"b\\c\x1b[31m\n::error::\u202e\U0001f600'


def made(kind, value, status="verified"):
    return Prescription(kind=kind, value=value, status=status)


def run(lines, **names):
    """Run lines as a user's script that has already imported torch would."""
    space = {"torch": torch, **names}
    exec(compile("\n".join(lines), "pasted", "exec"), space)
    return SimpleNamespace(**space)


class Inner(nn.Module):
    """Takes and returns nested tensors, in positions and keywords."""

    def __init__(self, gain):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        nn.init.constant_(self.fc.weight, gain)

    def forward(self, xs, *, mask):
        return {"y": self.fc(xs[0]) * mask}


class Net(nn.Module):
    def __init__(self, gain=3e4):
        super().__init__()
        self.up = nn.Linear(4, 4)
        nn.init.constant_(self.up.weight, 1.0)
        self.inner = Inner(gain)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        h = self.up(x)
        return self.norm(self.inner([h], mask=torch.ones_like(h))["y"])


def trained(model, dtype=torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        loss = model(torch.rand(2, 4)).float().pow(2).mean()
    loss.backward()
    return bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("way", ["apply", "torch"])
@pytest.mark.parametrize("names", [["inner"], ["inner.fc"], ["inner.fc", "up", "norm"] * 10])
def test_modules_in_fp32(way, names):
    assert not trained(Net())
    model = Net()
    code = code_of(made("fp32_modules", tuple(names)), CPU)
    lines = getattr(code, way)
    assert max(map(len, lines)) <= 100
    run(lines, model=model)
    assert trained(model)


@pytest.mark.parametrize("way", ["apply", "torch"])
@pytest.mark.parametrize("command", ["bisect-nan", "health"])
def test_a_run_on_a_cpu_is_cured_by_the_lines_of_its_report(command, way):
    """Autocast is switched off for the device on which it is on: that of the run, also where only its log tells it."""
    finding = replace(
        OVERFLOW, where=Where(phase="forward", step=4, file="runs/a"), prescription=made("fp32_modules", ["inner"])
    )
    report = Report(command=command, target={}, verdict="sick", findings=(finding,))
    if command == "health":
        looks = (LookMark(step=4, verdict="sick", device="cpu", precision="fp16", autocast=True),)
        run_of_log = replace(health_run(breaks=False), source="runs/a", looks=looks)
        report = replace(report, health=HealthSection(runs=(run_of_log,)))
    else:
        report = replace(report, run={"device": "cpu", "policy": "native", "precision": "fp16", "autocast": True})
    model, seen = Net(), []
    model.inner.fc.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    (shown_finding,) = json.loads(render_json(report))["findings"]
    run(shown_finding["prescription"]["code"][way], model=model)
    assert trained(model)
    assert seen == [torch.float32]


def test_each_finding_of_logs_is_of_the_training_that_its_log_is_of():
    looked = LookMark(step=4, verdict="sick", device="cpu", precision="bf16", autocast=False)
    on_cpu = replace(health_run(breaks=False), source="runs/cpu", looks=(looked,))
    on_gpu = replace(
        on_cpu, source="runs/gpu", looks=(replace(looked, device="cuda", precision="fp16", autocast=True),)
    )
    untold = replace(on_cpu, source="runs/old", looks=(LookMark(step=4, verdict="sick"),))
    report = Report(command="health", target={}, verdict="sick", health=HealthSection(runs=(on_cpu, on_gpu, untold)))

    def of(source, step=4):
        return setting_of(report, replace(OVERFLOW, where=Where(phase="forward", step=step, file=source)))

    assert of("runs/cpu") == of("runs/cpu", step=9) == TrainingContext(device="cpu", half="bfloat16", autocast=False)
    assert of("runs/gpu") == of("runs/old") == TrainingContext()


def test_modules_of_a_half_model_in_fp32():
    model = Net(0.1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(code_of(made("fp32_modules", ["inner"]), PURE).apply, model=model, optimizer=optimizer)
    assert model.inner.fc.weight.dtype is torch.float32
    assert model.up.weight.dtype is torch.float16
    y = model(torch.rand(2, 4, dtype=torch.float16))
    y.float().sum().backward()
    assert y.dtype is torch.float16
    assert model.inner.fc.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("way", ["apply", "torch"])
@pytest.mark.parametrize("names", [["ema"], ["ema.inner", "ema.up", "ema.norm"] * 10])
def test_half_parameters_that_nothing_calls_are_stored_in_fp32(way, names):
    model = Net(0.1)
    model.ema = Net(0.1).half().requires_grad_(requires_grad=False)
    lines = getattr(code_of(made("fp32_modules", names), CPU, "optimizer_precision"), way)
    assert max(map(len, lines)) <= 100
    run(lines, model=model, optimizer=torch.optim.SGD(model.inner.parameters(), lr=0.1))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.ema(torch.rand(2, 4)).isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_format(dtype):
    def loss_fn(model, batch):
        return model(batch).float().pow(2).mean()

    code = code_of(made("dtype", dtype), CPU)
    model = Net()
    names = {"loss_fn": loss_fn, "batch": torch.rand(2, 4), "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    run(code.torch, model=model, **names)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    handle = run([*code.apply[:-1], f"handle = {code.apply[-1]}"], model=Net()).handle
    try:
        assert trained(Net())
    finally:
        handle.remove()
    half = code_of(made("dtype", dtype), PURE)
    model = Net(0.1).half()
    run(half.torch, model=model)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(("kind", "value"), [("init_scale", 2.0**15), ("scaler", {"init_scale": 2.0**15})])
def test_a_loss_scale(kind, value):
    """Gradients of 2^-30 vanish in fp16 without it."""
    code = code_of(made(kind, value), CPU)
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    model = nn.ParameterList([weight])
    master = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([master], lr=1.0)
    scaler = run(code.torch[:1]).scaler
    assert scaler.get_scale() == 2.0**15
    other = torch.amp.GradScaler("cpu")
    run(code.apply, model=model, scaler=other)
    assert other.get_scale() == 2.0**15

    def gradient(scaling):
        product = (weight * torch.full((1,), 2.0**-15, dtype=torch.float16)).float() * 2.0**-15
        weight.grad = None
        scaling.scale(product.half().float().sum()).backward()
        return float(weight.grad)

    assert gradient(torch.amp.GradScaler("cpu", enabled=False)) == 0.0
    assert gradient(scaler) == 2.0**-15
    if kind == "scaler":
        loss = (master * 2.0**-3).sum()
        run(code.torch, loss=loss, optimizer=optimizer)
        assert master.item() == 1.0 - 2.0**-3


def test_an_optimizers_setting():
    code = code_of(made("optimizer", {"eps": 1e-3}), CPU)
    for lines in (code.apply, code.torch):
        optimizer = torch.optim.AdamW(Net().parameters())
        run(lines, optimizer=optimizer, model=Net())
        assert optimizer.param_groups[0]["eps"] == 1e-3


@pytest.mark.parametrize("misuse", [*MISUSE_ADVICE, "another"])
@pytest.mark.parametrize("variable", ["optimizer", "od", "self.opt"])
def test_of_the_order_of_calls_only_the_lines_that_a_misuse_lacks(misuse, variable):
    advice = for_optimizer(MISUSE_ADVICE.get(misuse, "follow the order"), variable)
    code = code_of(made("code", advice, "not_run"), CPU, "scaler_misuse")
    assert code.apply == ()
    assert 1 <= len(code.torch) <= 3
    compile("\n".join(code.torch), "pasted", "exec")
    if "(optimizer)" in MISUSE_ADVICE.get(misuse, ""):
        assert (variable in advice, variable in " ".join(code.torch)) == (True, True)
        assert variable == "optimizer" or not re.search(r"\boptimizer\b", " ".join(code.torch))


@pytest.mark.parametrize("misuse", ["clip_grad_norm_", "gradient clipping"])
def test_gradients_are_clipped_unscaled_by_the_lines(misuse):
    code = code_of(made("code", MISUSE_ADVICE[misuse], "not_run"), CPU, "scaler_misuse")
    model = nn.Linear(4, 1)
    before = model.weight.detach().clone()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=1.0)
    names = {"model": model, "scaler": scaler, "optimizer": optimizer, "max_norm": 0.5}
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    run(code.torch, **names)
    assert 0.1 < (model.weight - before).norm() <= 0.5


NAN_AT_5 = {"origin": "data"}, "nan"
INF_AT_5 = {"origin": "data"}, "inf"
FINITE = {"origin": "op"}, "inf"


def batches_of(shape, bad):
    """Nine batches, the sixth with a value that is not finite."""
    values = [torch.full((2,), bad if number == 5 else 1.0) for number in range(9)]
    return [{"tuple": (x, torch.tensor([3])), "dict": {"x": {"y": x}, "name": "a"}, "tensor": x}[shape] for x in values]


@pytest.mark.parametrize("shape", ["tuple", "dict", "tensor"])
@pytest.mark.parametrize(("evidence", "nonfinite"), [NAN_AT_5, INF_AT_5, FINITE])
def test_the_lines_leave_out_a_batch_of_any_epoch(shape, evidence, nonfinite):
    where = Where(step=5, phase="data", nonfinite=nonfinite)
    finding = replace(SICK.findings[0], where=where, evidence=evidence, prescription=made("skip_batch", 5))
    lines = code_of(finding.prescription, setting_of(SICK, finding), "bad_data").torch
    first = next(number for number, line in enumerate(lines) if line.startswith("for "))
    before, loop = lines[:first], [f"    {line}" for line in lines[first:]]
    kept = []
    every = batches_of(shape, float(nonfinite))
    epochs = every[:3], every[3:6], every[6:]
    run([*before, "for batches in epochs:", *loop, "        kept.append(id(batch))"], epochs=epochs, kept=kept)
    assert kept == [id(batch) for number, batch in enumerate(every) if number != 5]


@pytest.mark.parametrize("status", ["not_run", "intervention"])
@pytest.mark.parametrize("names", [["inner"], ["inner.fc", "up", "norm"] * 10])
def test_lines_for_what_is_not_proved_say_so(status, names):
    lines = code_of(made("fp32_modules", names, status), CPU).apply
    handle = run([*lines[:1], f"handle = {lines[1]}", *lines[2:]], model=Net()).handle
    assert {change.status for change in handle.changes} == {status}
    asked = [line.replace(", unverified=True", "") for line in lines]
    assert asked != list(lines)
    with pytest.raises(ampdoctor.errors.UsageError, match="is not verified"):
        run(asked, model=Net())


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("code", "clamp it"),
        ("fp32_modules", "a"),
        ("fp32_modules", ()),
        ("scaler", {"init_scale": "NaN"}),
        ("skip_batch", "first"),
    ],
)
@pytest.mark.parametrize("cause", [None, "optimizer_precision"])
def test_no_lines_where_words_must_do(kind, value, cause):
    code = code_of(made(kind, value), CPU, cause)
    assert (code.apply, code.torch) == ((), ())


def test_a_hostile_name_is_a_literal_in_one_line():
    code = code_of(made("fp32_modules", (EVIL,)), CPU)
    for line in (*code.apply, *code.torch):
        assert line.isascii()
        assert line.isprintable()
    names = []
    fake = SimpleNamespace(get_submodule=lambda name: names.append(name) or SimpleNamespace(forward=None))
    run(code.torch, model=fake)
    assert names == [EVIL]


@pytest.mark.parametrize(
    ("command", "run_section", "scaler", "scaled"),
    [
        ("scan", {}, None, True),
        ("bisect-nan", {"precision": "fp16"}, None, False),
        ("recommend", {"precision": "fp16"}, ScalerSection(), False),
        ("recommend", {"precision": "fp16"}, ScalerSection(current={"scale": 1024.0, "by_hand": True}), False),
        ("recommend", {"precision": "fp16"}, ScalerSection(current={"scale": 1024.0}), True),
    ],
)
def test_a_run_is_scaled_where_a_scaler_is_at_work(command, run_section, scaler, scaled):
    report = Report(command=command, target={}, verdict="healthy", run=run_section, scaler=scaler)
    assert setting_of(report).scaled is scaled


def test_the_json_report_holds_them_and_apply_reads_it(check_report):
    report = check_report(render_json(SICK))
    prescription = report["findings"][0]["prescription"]
    assert prescription["code"]["apply"][0] == "import ampdoctor"
    assert prescription["alternatives"][0]["code"] == {"apply": [], "torch": []}
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1)})
    with pytest.raises(ampdoctor.errors.UsageError, match=r"no module called 'encoder\.block"):
        ampdoctor.apply(model, json.loads(json.dumps(report)))
