"""Every shape of model: the module, call, op and line of an origin are found, and the user's objects stay as they were.

Each shape is driven through an origin in its forward, in its backward and, where it matters, in its optimizer, and
through none.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ampdoctor.errors import AmpdoctorError
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.requests import ReplayRequest

FILE = Path(__file__).with_name("shapes.py")
MODELS = Path(__file__).with_name("shape_models.py")
NAME = "shapes_of_models"
SHAPES = (
    "plain",
    "reentrant",
    "nonreentrant",
    "called_twice",
    "tied",
    "frozen_backbone",
    "weight_norm",
    "custom_function",
    "compiled_model",
    "lstm",
    "fast_path",
    "shared_submodule",
    "user_hooks",
    "data_parallel",
    "gradient_penalty",
    "two_optimizers",
    "accumulation",
    "own_chunks",
    "loader_workers",
)
MODULES = {"shared_submodule": "left.inner", "user_hooks": "first"}
"""Where the origin is, other than in `culprit`."""
LATER_CALL = {
    "forward": ("called_twice", "shared_submodule", "own_chunks"),
    "backward": ("called_twice", "shared_submodule"),
}
"""Shapes in which the second call of the module is the sick one."""
UPDATED = ("plain", "tied", "frozen_backbone", "weight_norm", "compiled_model", "fast_path", "two_optimizers")
"""Shapes in which parameters have other names or owners, or another step: what the name of a sick update hangs on."""
AT_ONCE = ("lstm",)
"""Its cells squash a loud batch, so the origin is in the weights and there from the first step."""

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")]


def line_of(mark, file=MODELS):
    lines = file.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


@pytest.fixture
def shapes(monkeypatch):
    spec = importlib.util.spec_from_file_location(NAME, FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)
    spec.loader.exec_module(module)
    return module


def replay(shape, origin):
    return bisect_nan(ReplayRequest(factory=f"{NAME}:make_run", arguments={"shape": shape, "origin": origin}))


def only_finding(shape, origin, shapes):
    report = examined(shape, origin, shapes)
    assert report.verdict == "sick"
    assert not report.errors
    assert report.run["deterministic"]
    (finding,) = report.findings
    return finding


def examined(shape, origin, shapes):
    """The report; and neither what the user handed over nor the process is changed by it."""
    expected = state_of(shapes.make_run(shape, origin))
    shapes.LAST.clear()
    before = process_state()
    report = replay(shape, origin)
    after = process_state()
    assert [key for key in before if not same(before[key], after[key])] == []
    assert [key for key, value in state_of(shapes.LAST[0]).items() if not same(expected[key], value)] == []
    return report


def state_of(run):
    """Everything that the user handed over, as plain values; the parts of its optimizers by the order of parameters."""
    model = run.model
    optimizers = run.optimizer if isinstance(run.optimizer, dict) else {"": run.optimizer}
    return {
        "tensors": [(name, t.dtype, t.requires_grad, t.clone()) for name, t in _tensors(model)],
        "gradients": [name for name, p in model.named_parameters() if p.grad is not None],
        "flags": [(name, module.training) for name, module in model.named_modules()],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "hooks": [(name, *map(len, _hooks(module))) for name, module in model.named_modules()],
        "tensor hooks": [
            (name, len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ()))
            for name, p in model.named_parameters()
        ],
        "optimizers": [
            (key, [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups], dict(o.state))
            for key, o in optimizers.items()
        ],
        "optimized": [[len(g["params"]) for g in o.param_groups] for o in optimizers.values()],
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "generator": _generator(run),
    }


def _tensors(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _hooks(module):
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._forward_hooks_always_called,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _generator(run):
    generator = getattr(run.batches, "generator", None)
    return None if generator is None else generator.get_state()


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def process_state():
    global_hooks = torch.nn.modules.module
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002 - what user code draws from
        "torch": torch.get_rng_state(),
        "hooks": len(global_hooks._global_forward_hooks) + len(global_hooks._global_forward_pre_hooks),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()),
        "argv": list(sys.argv),
        "engine": torch.autograd.Variable._execution_engine,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "scale": torch.amp.GradScaler.scale,
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_forward_birth(shape, shapes):
    finding = only_finding(shape, "forward", shapes)
    where = finding.where
    assert (finding.cause, where.phase, where.op, where.nonfinite) == ("forward_overflow", "forward", "aten.mul", "inf")
    assert where.step == (0 if shape in AT_ONCE else 1)
    assert where.module == MODULES.get(shape, "culprit")
    assert where.call == (shape in LATER_CALL["forward"])
    assert where.micro_batch == 0
    assert not where.recompute
    assert where.source.line == line_of("CUSTOM forward" if shape == "custom_function" else "BIRTH forward")
    assert Path(where.source.file).name == MODELS.name
    assert where.forward_source is None
    assert finding.prescription.verified


@pytest.mark.parametrize("shape", SHAPES)
def test_a_backward_birth(shape, shapes):
    finding = only_finding(shape, "backward", shapes)
    where = finding.where
    custom = shape == "custom_function"
    assert (finding.cause, where.step, where.phase) == ("invalid_op", 0, "backward")
    assert where.op == ("aten.div" if custom else "aten.sqrt")
    assert where.nonfinite == "inf"
    assert where.module == MODULES.get(shape, "culprit")
    assert where.call == (shape in LATER_CALL["backward"])
    assert where.micro_batch == 0
    if custom:
        assert where.source.line == line_of("CUSTOM backward")
    else:
        assert where.source is None
        assert where.forward_source.line == line_of("BIRTH backward")


@pytest.mark.parametrize("shape", UPDATED)
def test_an_optimizer_birth(shape, shapes):
    finding = only_finding(shape, "optimizer", shapes)
    where = finding.where
    module = MODULES.get(shape, "culprit")
    assert finding.cause == ("optimizer_precision" if shape == "fast_path" else "invalid_op")
    assert (where.step, where.phase, where.op, where.nonfinite) == (0, "optimizer", "aten.div", "nan")
    assert (where.module, where.tensor, where.call) == (module, f"{module}.spare".strip("."), 0)
    assert where.source.line == line_of("BIRTH optimizer")
    assert finding.evidence["harmed"] == [f"param:{where.tensor}"]


@pytest.mark.parametrize("shape", [*SHAPES, "scripted_child"])
def test_no_birth(shape, shapes):
    report = examined(shape, "", shapes)
    assert (report.verdict, report.findings, report.run["deterministic"]) == ("healthy", (), True)


@pytest.mark.parametrize(
    ("origin", "phase", "op"), [("forward", "forward", "aten.log"), ("backward", "backward", "aten.sqrt")]
)
def test_a_scripted_child_is_opaque_and_said_to_be(origin, phase, op, shapes):
    report = examined("scripted_child", origin, shapes)
    (finding,) = report.findings
    where = finding.where
    assert (where.phase, where.module, where.op, where.step, where.nonfinite) == (phase, "culprit", op, 0, "inf")
    call = where.source if origin == "forward" else where.forward_source
    assert call.line == line_of("CALL"), "the call from Python: there is no line inside"
    assert [note for note in report.run["notes"] if "scripted" in note and "culprit" in note]


def test_lbfgs_is_refused_in_a_sentence(shapes):
    with pytest.raises(AmpdoctorError, match="LBFGS evaluates the loss again in each step"):
        replay("lbfgs", "")


def test_a_tied_weight_is_harmed_in_one_of_the_modules_that_use_it(shapes):
    finding = only_finding("tied_and_loud", "", shapes)
    where = finding.where
    assert (where.phase, where.module, where.op, where.step) == ("forward", "head", "aten._to_copy", 0)
    assert finding.evidence["also_named"] == {"embed.weight": ["head.weight"]}


def test_a_birth_inside_a_recurrent_layer(shapes):
    finding = only_finding("loud_lstm", "", shapes)
    where = finding.where
    assert (where.phase, where.module, where.op, where.step) == ("forward", "rnn", "aten._to_copy", 0)
    assert where.source.line == line_of("RNN")
    assert "rnn.weight_hh_l0" in finding.message
    assert finding.prescription.verified
