"""`ampdoctor.apply`: in plain training loops, through copies, wrappers and compilation; whole or not at all."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampdoctor
from ampdoctor.errors import UsageError
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Report
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.reports.json_report import render_json, report_as_dict
from tests.precision.test_islands import Block

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
LOUD = {"kind": "fp32_modules", "value": ["blocks.1.down"]}
compiling = [  # what torch's compiler says of itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Net(nn.Module):
    """Its second block's `down` is beyond fp16; nothing before or after it is."""

    def __init__(self, gain=3e4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(0.1), Block(gain), Block(0.1)])
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(3)])

    def forward(self, x, *, recompute=None):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x) if recompute is None else checkpoint(block, x, use_reentrant=recompute))
        return x


def finite(model, steps=1, *, half=HALF, optimizer=None, scaler=None, **options):
    """Train as a user would; is every loss and gradient finite, and no step skipped?"""
    fine = True
    for _ in range(steps):
        with torch.autocast("cpu", dtype=half):
            loss = model(torch.rand(2, 4), **options).float().pow(2).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        fine &= bool(loss.isfinite()) and all(bool(gradient.isfinite().all()) for gradient in gradients)
        if optimizer is not None:
            optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        model.zero_grad()
    assert not torch.is_autocast_enabled("cpu")
    return fine


@pytest.fixture
def applied():
    """`apply`, taken back at the end: a dtype holds for the whole process."""
    handles = []

    def call(*args, **kwargs):
        handles.append(ampdoctor.apply(*args, **kwargs))
        return handles[-1]

    yield call
    for handle in reversed(handles):
        handle.remove()


def report_of(*prescriptions, **fields):
    findings = tuple(
        Finding(
            code="AMP201",
            name="forward-overflow",
            severity="error",
            message="m",
            where=Where(phase="forward"),
            prescription=prescription,
        )
        for prescription in prescriptions
    )
    return Report(command="bisect-nan", target={}, verdict="sick", findings=findings, **fields)


def cure(value=("blocks.1.down",), kind="fp32_modules", status="verified", **fields):
    return Prescription(kind=kind, value=value, status=status, **fields)


# -- fp32 modules ------------------------------------------------------------------------------------------------


def test_a_training_that_fails_trains():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with autocast_policy("cuda"):
        assert not finite(model)
        with ampdoctor.apply(model, LOUD) as handle:
            assert handle.modules == ("blocks.1.down",)
            assert finite(model, 5, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
            assert finite(model.eval())
        assert not finite(model)


def test_applied_twice_it_does_not_stack_and_removed_nothing_is_left():
    model = Net()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()]
    first = ampdoctor.apply(model, LOUD)
    second = ampdoctor.apply(model, LOUD)
    assert len(model.blocks[1].down._forward_pre_hooks) == 1
    second.remove()
    assert finite(model)  # the second has changed nothing that it could take back
    first.remove()
    first.remove()
    assert not finite(model)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()] == hooks
    assert not first.active


def test_copies_and_pickles_keep_it():
    model = Net()
    ampdoctor.apply(model, LOUD)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert finite(twin)
    assert finite(loaded)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    assert not finite(plain)
    model.load_state_dict(plain.state_dict())
    assert finite(model)


def test_a_replica_of_data_parallel_keeps_it():
    model = Net()
    ampdoctor.apply(model, LOUD)
    down = model.blocks[1].down
    replica = down._replicate_for_data_parallel()  # as nn.parallel.replicate makes it: parameters are attributes
    replica.weight, replica.bias = down.weight.detach().clone(), down.bias.detach().clone()
    with torch.autocast("cpu", HALF):
        x = torch.ones(2, 8, dtype=HALF)
        assert torch.equal(replica(x), down(x))
        assert replica(x).isfinite().all()
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing():
    model = Net()
    ampdoctor.apply(model, LOUD)
    assert all(finite(model, recompute=reentrant) for reentrant in (True, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "when"),
    [
        pytest.param(backend, when, marks=compiling)
        for backend, when in [("eager", "before"), ("aot_eager", "after"), ("aot_eager", "too late")]
    ],
)
def test_compiled(backend, when):
    """The blocks share their code, and one of them is an island; the gradients are those of the eager model."""
    model, eager = Net(), Net()
    ampdoctor.apply(eager, LOUD)
    if when == "before":
        ampdoctor.apply(model, LOUD)
    compiled = torch.compile(model, backend=backend)
    if when == "too late":
        assert not finite(compiled)
    if when != "before":
        handle = ampdoctor.apply(compiled, LOUD)
    x = torch.rand(2, 4)
    for net in (compiled, eager):
        with torch.autocast("cpu", HALF):
            loss = net(x).float().pow(2).mean()
        loss.backward()
        assert not torch.is_autocast_enabled("cpu")
    gradients = [p.grad for p in model.parameters()]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    torch.testing.assert_close(gradients, [p.grad for p in eager.parameters()], rtol=2e-2, atol=1e-4)
    # bit for bit: in half precision this gradient would be a rounded one
    assert torch.equal(model.blocks[1].down.bias.grad, eager.blocks[1].down.bias.grad)
    if when != "before":
        handle.remove()
        assert not finite(compiled)


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group: known by its name and torch's module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"


@pytest.mark.parametrize("name", ["blocks.1.down", "module.blocks.1.down", "blocks", ""])
def test_names_are_the_users_own_also_in_a_wrapper(name):
    model = DistributedDataParallel(Net())
    ampdoctor.apply(model, {"kind": "fp32_modules", "value": [name]})
    assert finite(model)
    with pytest.raises(UsageError, match="apply it before the model is wrapped"):
        ampdoctor.apply(DistributedDataParallel(Net().half()), LOUD)


# -- half models -------------------------------------------------------------------------------------------------


def half_step(model, optimizer, dtype=HALF):
    optimizer.zero_grad()
    loss = model(torch.rand(2, 4, dtype=dtype)).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    return bool(loss.isfinite())


@pytest.mark.parametrize("built", ["before", "after", "has stepped"])
def test_a_half_model_keeps_its_parameters_and_an_optimizer_its_state(built):
    model = Net(0.1).half()
    parameters = list(model.parameters())
    make = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # noqa: E731
    optimizer = None if built == "after" else make()
    if built == "has stepped":
        half_step(model, optimizer)
    handle = ampdoctor.apply(model, LOUD, optimizer=optimizer)
    optimizer = optimizer or make()
    down = model.blocks[1].down
    assert down.weight.dtype is SINGLE
    assert model.blocks[1].up.weight.dtype is HALF
    assert all(half_step(model, optimizer) for _ in range(5))
    assert optimizer.state[down.weight]["exp_avg"].dtype is SINGLE
    assert optimizer.state[model.blocks[1].up.weight]["exp_avg"].dtype is HALF
    moved = down.weight.detach().clone()
    handle.remove()
    assert torch.equal(down.weight, moved.half())
    if built != "after":  # the handle knows the optimizer
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {HALF}
        assert half_step(model, optimizer)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))


def test_a_recurrent_half_model():
    model = nn.Sequential(nn.GRU(4, 4, batch_first=True)).half()
    ampdoctor.apply(model, {"kind": "fp32_modules", "value": ["0"]})
    output, state = model(torch.rand(2, 3, 4, dtype=HALF))
    assert (output.dtype, state.dtype) == (HALF, HALF)


# -- another format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", BF16), ("float32", SINGLE)])
def test_every_region_of_the_process_computes_in_another_format(name, dtype, applied):
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    other = nn.Linear(4, 4)
    handle = applied(model, {"kind": "dtype", "value": name}, scaler=scaler)
    again = applied(model, {"kind": "dtype", "value": name})
    assert finite(model, 5, scaler=scaler, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    with torch.autocast("cpu", dtype=HALF):
        assert other(torch.rand(2, 4)).dtype is dtype
        with torch.autocast("cpu", enabled=False):
            assert other(torch.rand(2, 4)).dtype is SINGLE
    assert not scaler.is_enabled()
    again.remove()
    handle.remove()
    assert scaler.is_enabled()
    assert not finite(model)


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", BF16), ("float32", SINGLE)])
def test_a_half_model_in_another_format(name, dtype, applied):
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    handle = applied(model, {"kind": "dtype", "value": name}, optimizer=optimizer)
    again = applied(model, {"kind": "dtype", "value": name}, optimizer=optimizer)
    assert len(model._forward_pre_hooks) == 1
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(half_step(model, optimizer) for _ in range(5))
    assert copy.deepcopy(model)(torch.rand(2, 4, dtype=HALF)).dtype is dtype
    again.remove()
    assert {p.dtype for p in model.parameters()} == {dtype}
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {HALF}
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {HALF}
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_region_is_compiled_anew(applied):
    model = nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def region(x):
        with torch.autocast("cpu", dtype=HALF):
            return model(x)

    x = torch.rand(2, 4)
    assert region(x).dtype is HALF
    handle = applied(model, {"kind": "dtype", "value": "bfloat16"})
    assert region(x).dtype is BF16
    handle.remove()
    assert region(x).dtype is HALF


# -- loss scale and optimizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "init_scale", "value": 32.0}, {"scale": 32.0, "growth_interval": 2000}),
        ({"kind": "scaler", "value": {"init_scale": 8.0, "growth_interval": 5}}, {"scale": 8.0, "growth_interval": 5}),
    ],
)
@pytest.mark.parametrize("used", [True, False])
def test_a_loss_scale(change, expected, used):
    model, scaler = Net(0.1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if used:
        finite(model, scaler=scaler, optimizer=optimizer)
    before = scaler.state_dict()
    handle = ampdoctor.apply(model, change, scaler=scaler)
    assert scaler.state_dict().items() >= expected.items()
    assert finite(model, 2, scaler=scaler, optimizer=optimizer)
    assert scaler.get_scale() == expected["scale"]
    handle.remove()
    assert scaler.state_dict() == before


# -- what it takes, and what it refuses --------------------------------------------------------------------------


def test_every_form_of_a_prescription(tmp_path):
    report = report_of(cure())
    path = tmp_path / "report.json"
    path.write_text(render_json(report))
    as_object = report_as_dict(report)
    forms = [report, report.findings[0], cure(), as_object, as_object["findings"][0], path, str(path)]
    forms.append(as_object["findings"][0]["prescription"])
    for form in forms:
        model = Net()
        assert ampdoctor.apply(model, form).modules == ("blocks.1.down",)
        assert finite(model)


def test_a_report_with_several_findings():
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    report = report_of(
        cure(),
        cure(("blocks.0",)),
        cure(),
        cure(32.0, "init_scale"),
        cure(3, "skip_batch"),
        cure("add eps", "code", "not_run", reason="only the code can be changed"),
        None,
    )
    handle = ampdoctor.apply(model, report, scaler=scaler)
    assert handle.modules == ("blocks.1.down", "blocks.0")
    assert scaler.get_scale() == 32.0
    assert [sentence.partition(":")[0] for sentence in handle.left_out] == ["AMP201", "AMP201"]
    assert "batch 3" in handle.left_out[0]
    assert "only the code can be changed" in handle.left_out[1]


def test_fp32_for_the_whole_model_needs_no_islands_and_no_loss_scale(applied):
    model = Net(0.1).half()
    handle = applied(model, report_of(cure(), cure("float32", "dtype"), cure(32.0, "init_scale")))
    assert [change.kind for change in handle.changes] == ["dtype"]
    assert handle.left_out == (
        "init_scale: float32 needs no loss scale",
        "fp32_modules: float32 for the whole model does that already",
    )
    assert half_step(model, torch.optim.SGD(model.parameters(), lr=1e-3))


@pytest.mark.parametrize(
    ("prescription", "sentence"),
    [
        ({"kind": "fp32_modules", "value": ["blocks.1.dwn"]}, r"no module called 'blocks.1.dwn'"),
        ({"kind": "fp32_modules", "value": []}, "names no module"),
        ({"kind": "fp32_modules", "value": "blocks"}, "list of module names, not 'blocks'"),
        ({"kind": "dtype", "value": "float8"}, "bfloat16 or float32, not 'float8'"),
        (
            {"kind": "init_scale", "value": 32.0},
            r'pass scaler=.*GradScaler\("cuda", init_scale=32.0\), and a loop that scales its loss',
        ),
        ({"kind": "init_scale", "value": "Infinity"}, "finite number above 0"),
        ({"kind": "scaler", "value": True}, "object of GradScaler arguments"),
        ({"kind": "scaler", "value": {"scale": 1.0}}, "no setting 'scale'"),
        ({"kind": "scaler", "value": {"growth_factor": 0.5}}, "no training keeps a loss scale with"),
        ({"kind": "optimizer", "value": {"eps": 1e-3}}, r"eps=0.001\): pass optimizer="),
        ({"kind": "optimizer", "value": {"reset_state": ["w"]}}, "del optimizer.state"),
        ({"kind": "skip_batch", "value": 3}, "if index == 3: continue"),
        ({"kind": "code", "value": "clamp it"}, "only the code can be changed: clamp it"),
        ({"kind": "magic", "value": 1}, "kind 'magic', which is none of fp32_modules"),
        ({**LOUD, "status": "sure"}, "status 'sure'"),
        ({**LOUD, "status": "not_run"}, r"not verified \(it was not replayed\).*unverified=True"),
        (cure(status="failed", reason="step 3 is still non-finite"), "step 3 is still non-finite"),
        ({"findings": [], "verdict": "healthy"}, "its verdict is healthy"),
        ({"findings": {}}, "no list of JSON objects"),
        ({"findings": [], "schema_version": "3"}, "schema version '3'"),
        ({"code": "AMP201", "prescription": None}, "finding AMP201 has no prescription"),
        ({}, "is no prescription"),
        (3, "not int"),
        ("missing.json", "cannot be read"),
        (report_of(cure(2.0, "init_scale"), cure(4.0, "init_scale")), "asks for init_scale = 2.0 and for"),
        (
            report_of(cure(2.0, "init_scale"), cure({"init_scale": 4.0, "growth_interval": 5}, "scaler")),
            "asks for init_scale = 2.0 and for scaler = {'init_scale': 4.0",
        ),
        (cure([3]), r"list of module names, not \[3\]"),
        (report_of(cure(status="not_run")), "no change that apply can make: AMP201"),
    ],
)
def test_what_cannot_be_applied_is_refused_in_a_sentence(prescription, sentence):
    model = Net()
    with pytest.raises(UsageError, match=sentence) as caught:
        ampdoctor.apply(model, prescription)
    assert "\n" not in str(caught.value)
    assert not any(module._forward_pre_hooks for module in model.modules())


SGD = torch.optim.SGD(Net().parameters())


@pytest.mark.parametrize(
    ("model", "prescription", "options", "sentence"),
    [
        (Net(), LOUD, {"optimizer": [3]}, "optimizers, not int"),
        (Net(), LOUD, {"scaler": {}}, "GradScaler, not dict"),
        ([], LOUD, {}, r"torch\.nn\.Module, not list"),
        (Net(), cure({"lr": 1.0, "eps": 1e-3}, "optimizer"), {"optimizer": SGD}, "SGD has no setting 'eps'"),
        (Net(), cure(2.0, "init_scale"), {"scaler": torch.amp.GradScaler("cpu", enabled=False)}, "is disabled"),
    ],
)
def test_parts_that_cannot_be_changed_are_refused(model, prescription, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        ampdoctor.apply(model, prescription, **options)
    assert SGD.param_groups[0]["lr"] == 1e-3


def test_unverified_takes_what_no_replay_has_disproved():
    model = Net()
    report = report_of(cure(status="not_run"), cure(("blocks.0",), status="failed"))
    handle = ampdoctor.apply(model, report, unverified=True)
    assert handle.modules == ("blocks.1.down",)
    assert finite(model)


def test_all_or_nothing(monkeypatch):
    """A second change that cannot be made takes the first one back."""
    model = Net()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="pass scaler"):
        ampdoctor.apply(model, report_of(cure(), cure(32.0, "init_scale")))
    assert not finite(model)

    def fail(_state):
        raise MemoryError

    monkeypatch.setattr(scaler, "load_state_dict", fail)
    with pytest.raises(MemoryError):
        ampdoctor.apply(model, report_of(cure(), cure(32.0, "init_scale")), scaler=scaler)
    assert not model.blocks[1].down._forward_pre_hooks


def test_a_file_that_is_no_report(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("{")
    with pytest.raises(UsageError, match="is not the JSON that"):
        ampdoctor.apply(Net(), path)
    path.write_text(json.dumps([1]))
    with pytest.raises(UsageError, match="not list"):
        ampdoctor.apply(Net(), str(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused():
    with pytest.raises(UsageError, match="0 is a scripted module"):
        ampdoctor.apply(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), cure(("0",)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("init_scale", 10**400),
        ("init_scale", 1e-300),
        ("scaler", {"growth_interval": 2.5}),
        ("scaler", {"growth_factor": 1.0}),
        ("optimizer", {"eps": -1.0}),
        ("optimizer", {"eps": True}),
        ("optimizer", {"betas": 0.9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_would_end_a_training_are_refused(kind, value):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
    with pytest.raises(UsageError):
        ampdoctor.apply(model, {"kind": kind, "value": value}, optimizer=optimizer, scaler=scaler)
    assert (optimizer.state_dict(), scaler.state_dict()) == before
