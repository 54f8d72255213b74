"""What is printed is run: here what torch alone can run; the other libraries are in test_emit_frameworks."""

from __future__ import annotations

import ast
import importlib
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampdoctor.evidence.targets import FRAMEWORKS
from ampdoctor.scaling.emit import emit
from ampdoctor.scaling.scalers import ScalerSettings

OURS = ScalerSettings(scale=1024.0, backoff_factor=0.25, growth_interval=500)
HOSTILE = ['say "hi"', "it's", "two\nlines", "\x1b[31mred", '"]}); raise SystemExit  #', "ünï", "\udc80", "\\"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


def run(emitted, **space):
    """The names that the fragment leaves behind."""
    exec(compile(emitted.text, "emitted", "exec"), space)
    return space


def code_in(note):
    return re.findall("`([^`]*)`", note)


def state_of(settings, tracker=0):
    state = {name: value for name, value in settings.arguments().items() if name != "init_scale"}
    return {"scale": settings.scale, **state, "_growth_tracker": tracker}


def test_the_printed_scaler_has_the_settings():
    scaler = run(emit(OURS, "torch", device="cpu"))["scaler"]
    assert scaler.state_dict() == state_of(OURS)
    assert 'GradScaler(\n    "cuda",' in emit(OURS, "torch").text
    assert any("FSDP1 needs" in note for note in emit(OURS, "torch").notes)
    assert importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler").ShardedGradScaler


def test_the_line_for_a_resumed_run_brings_the_settings_back_and_keeps_the_scale():
    emitted = emit(OURS, "torch", device="cpu")
    space = run(emitted)
    space["scaler"].load_state_dict(state_of(ScalerSettings(scale=64.0), tracker=1500))
    (line,) = [code for note in emitted.notes for code in code_in(note) if "load_state_dict" in code]
    exec(line, space)
    assert space["scaler"].state_dict() == state_of(replace(OURS, scale=64.0))


def test_a_half_loss_is_remarked_on_where_it_overflows():
    assert not any("loss" in note and "half" in note for note in emit(OURS, "torch").notes)
    (note,) = [note for note in emit(OURS, "torch", loss_in_half=True).notes if "loss" in note and "half" in note]
    assert "one of 63.9844 or more becomes inf" in note
    scaler = run(emit(OURS, "torch", device="cpu"))["scaler"]
    loss = torch.tensor([64.0], dtype=torch.float16)
    assert torch.isinf(scaler.scale(loss)).all()
    assert torch.isfinite(scaler.scale(loss[0])).all(), "and one without a dimension becomes fp32"
    assert code_in(note) == ["scaler.scale(loss.float())"]
    assert torch.isfinite(eval(code_in(note)[0], {"scaler": scaler, "loss": loss})).all()


# -- bf16 and fp32 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "in_fp32", "dtypes"),
    [
        ("bf16", [], [torch.bfloat16, torch.bfloat16]),
        ("fp32", [], [torch.float32, torch.float32]),
        ("bf16", ["head"], [torch.bfloat16, torch.float32]),
    ],
)
def test_the_step_without_a_scaler_computes_in_the_format_and_named_modules_in_fp32(precision, in_fp32, dtypes):
    model, seen = Net(), []
    for module in (model.body, model.head):
        module.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    before = model.head.weight.detach().clone()
    emitted = emit(OURS, "torch", fp32_modules=in_fp32, precision=precision, device="cpu")
    run(
        emitted,
        model=model,
        batch=torch.ones(2, 4),
        loss_fn=lambda model, batch: model(batch).float().sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert seen == dtypes
    assert not torch.equal(before, model.head.weight)
    assert "Scaler(" not in emitted.text


@pytest.mark.parametrize("framework", ["torch", "megatron"])
def test_modules_are_not_spoken_of_where_the_whole_run_is_in_fp32(framework):
    assert emit(OURS, framework, precision="fp32", fp32_modules=["head"]) == emit(OURS, framework, precision="fp32")


@pytest.mark.parametrize(("framework", "precision"), [("torch", "fp16"), ("lightning", "bf16")])
@given(names=st.lists(st.one_of(st.sampled_from(HOSTILE), st.text()), min_size=1, max_size=4))
def test_whatever_a_module_is_called_its_name_is_a_literal(framework, precision, names):
    emitted = emit(OURS, framework, fp32_modules=names, precision=precision)
    assert emitted.text.isascii()
    assert emitted.text.replace("\n", "").isprintable()
    applied = [
        node
        for node in ast.walk(ast.parse(emitted.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ampdoctor.apply"
    ]
    assert [ast.literal_eval(call.args[1])["value"] for call in applied] == [names]


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_a_configuration_says_in_a_note_which_modules_it_cannot_keep_in_fp32(framework):
    names = [f"layer.{n}" for n in range(10)]
    (note,) = [n for n in emit(OURS, framework, fp32_modules=names).notes if "layer.0" in n]
    assert "layer.7" in note
    assert "layer.8" not in note
    assert "and 2 more" in note
    assert all(n.isprintable() and n.isascii() for n in emit(OURS, framework, fp32_modules=HOSTILE).notes)


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(
    settings=st.builds(
        ScalerSettings,
        scale=st.floats(1.0, 2.0**40),
        growth_factor=st.floats(1.001, 16.0),
        backoff_factor=st.floats(0.001, 0.999),
        growth_interval=st.integers(1, 100_000),
        hysteresis=st.integers(1, 9),
    )
)
def test_every_usable_setting_gives_a_fragment_of_its_language(framework, settings):
    emitted = emit(settings, framework, loss_in_half=True)
    assert emitted.framework == framework
    assert emitted.text.endswith("\n")
    assert all(note.isprintable() for note in emitted.notes)
    assert len(set(emitted.notes)) == len(emitted.notes)
    if emitted.language == "python":
        compile(emitted.text, "emitted", "exec")
        assert max(map(len, emitted.text.splitlines())) <= 120
    elif emitted.language == "json":
        json.loads(emitted.text)
    else:
        assert re.fullmatch(r"AMP_ARGS=\(\n(    --[a-z0-9-]+( [0-9.e+-]+)?\n)*\)  # then: .*\n", emitted.text)


# -- notes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_a_factor_that_is_fixed_is_remarked_on_only_where_another_is_wanted(framework):
    assert not any("factor" in note for note in emit(ScalerSettings(), framework).notes)
    notes = emit(replace(OURS, growth_factor=4.0), framework).notes
    assert "the growth factor is fixed at 2 there, instead of 4" in notes
    assert "the backoff factor is fixed at 0.5 there, instead of 0.25" in notes
