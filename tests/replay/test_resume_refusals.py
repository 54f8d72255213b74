"""Checkpoints that must not be put into a run: each is one sentence, and the run stays as the factory made it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ampdoctor.checkpoints.resume_state import load_state
from ampdoctor.errors import CheckpointError
from ampdoctor.replay import fit_checkpoint
from ampdoctor.replay.load_checkpoint import resume
from tests.replay.test_resume import SETTLED, State, make_run


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def stepped(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 3)
    optimizer = make(model.parameters())
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("content", "held"),
    [
        (5, "nothing that is recognised"),
        ({"model": {0: torch.ones(3, 2), 1: torch.ones(3)}}, "nothing that is recognised"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "only optimizer state"),
        ({"scaler": SETTLED}, "only a loss scaler"),
    ],
)
def test_a_file_that_loads_nothing_is_refused_unless_that_is_allowed(content, held, tmp_path):
    torch.save(content, tmp_path / "c.pt")
    state = load_state(tmp_path / "c.pt")
    model = nn.Linear(2, 3)
    before = copied(model)
    with pytest.raises(CheckpointError, match=f"holds no weights of the model, {held}"):
        resume(make_run(model), {}, None, state)
    assert "weights" in resume(make_run(model), {}, None, state, allow_partial=True).lacks
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_without_any_state_needs_no_weights():
    assert resume(make_run(nn.ReLU()), {}, None, State()).loaded == ()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s["param_groups"][0].update(lr="x"), "lr of its group 0 is of type str"),
        (lambda s: s["param_groups"][0].update(lr=torch.ones(2)), "lr of its group 0 is of type Tensor"),
        (lambda s: s["param_groups"][0].update(betas=(0.9, "y")), "betas of its group 0 is of type tuple"),
        (lambda s: s["param_groups"][0].pop("betas"), "its group 0 lacks betas"),
        (lambda s: s["param_groups"].__setitem__(0, 3), "its group 0 has no list of parameters"),
        (lambda s: s["param_groups"][0].update(params=[[], {}]), "its group 0 has no list of parameters"),
        (lambda s: s["state"].update({1: 5}), "the state of bias is of type int"),
        (lambda s: s["state"][0].update(exp_avg="x"), "exp_avg of weight is of type str"),
        (lambda s: s["state"][0].update(step="x"), "step of weight is no number"),
        (
            lambda s: s.update(state={50 + key: entry for key, entry in s["state"].items()}),
            "its state is of other parameters than its groups hold",
        ),
    ],
)
def test_an_optimizer_state_that_no_step_could_use_is_refused_before_anything_is_loaded(change, sentence):
    source, optimizer = stepped(torch.optim.AdamW)
    saved = optimizer.state_dict()
    change(saved)
    model = nn.Linear(2, 3)
    before = copied(model)
    own = torch.optim.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(CheckpointError, match=sentence):
        resume(make_run(model), {"optimizer": own}, None, State(copied(source), {"optimizer": saved}))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert own.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
        *(torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
        *(torch.optim.ASGD, torch.optim.Adafactor),
    ],
)
def test_the_state_of_every_optimizer_of_torch_is_accepted_and_steps_on(make):
    source, optimizer = stepped(make)
    model = nn.Linear(2, 3)
    own = make(model.parameters())
    file = State(copied(source), {"optimizer": optimizer.state_dict()})
    assert resume(make_run(model), {"optimizer": own}, None, file).loaded == ("weights", "optimizer")
    model(torch.randn(4, 2)).square().sum().backward()
    own.step()


@pytest.mark.parametrize("make", fit_checkpoint._ENTRIES)
def test_a_state_without_what_the_step_looks_up_is_refused(make):
    source, optimizer = stepped(make)
    for key in fit_checkpoint._ENTRIES[make]:
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][0][key]
        model = nn.Linear(2, 3)
        own = make(model.parameters())
        with pytest.raises(CheckpointError, match=f"the state of weight has no {key}"):
            resume(make_run(model), {"optimizer": own}, None, State(copied(source), {"optimizer": saved}))


def test_a_parameter_without_a_state_and_a_state_of_no_parameter_are_no_reason_to_refuse():
    source, optimizer = stepped(torch.optim.AdamW)
    saved = optimizer.state_dict()
    model = nn.Linear(2, 3)
    own = torch.optim.AdamW(model.parameters())
    for state in ({0: saved["state"][0], 7: saved["state"][1]}, {"calls": 3}):
        file = State(copied(source), {"optimizer": saved | {"state": state}})
        assert resume(make_run(model), {"optimizer": own}, None, file).loaded == ("weights", "optimizer")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"scale": 1e300}, "loss scale is 1e.300 after 830 clean steps: .* a float32 and an int32"),
        ({"_growth_tracker": 2**40}, "loss scale is 32 after 1099511627776 clean steps"),
    ],
)
def test_a_scaler_state_that_torch_cannot_hold_is_refused_before_anything_is_loaded(change, sentence):
    model = nn.Linear(2, 3)
    before = copied(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CheckpointError, match=sentence):
        resume(make_run(model, scaler={}), {}, scaler, State(copied(nn.Linear(2, 3)), scaler=SETTLED | change))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert scaler.get_scale() == 65536.0
