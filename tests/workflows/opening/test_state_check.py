"""State that cannot be right before step 0: found in a replay as in a file, and healthy look-alikes left alone."""

import pytest
import torch
from torch import nn

from ampdoctor.replay.session import Session
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.workflows.open_replay import sick_state


def found(model, optimizer=None):
    run = TrainingRun(
        model=model, batches=[torch.zeros(2, 4)], loss=lambda m, x: m(x).mean(), optimizer=optimizer, precision="bf16"
    )
    session = Session(run, device=torch.device("cpu"))
    return [(f.code, f.cause, f.where.module, f.where.op, f.where.nonfinite) for f in sick_state(session)]


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_a_negative_running_variance_is_named():
    model = net()
    model[1].running_var[2] = -0.5
    assert found(model) == [("AMP106", "bad_checkpoint", "1", "state:running_var", "none")]


def test_a_variance_that_the_layers_epsilon_lifts_above_zero_is_left_alone():
    model = net()
    model[1].running_var[2] = -5e-6
    assert found(model) == []


def test_a_negative_second_moment_is_named():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        zeros = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros - 1.0, "exp_avg_sq": zeros.clone()}
    optimizer.state[model[2].weight]["exp_avg_sq"][0, 1] = -1e-9
    assert found(model, optimizer) == [("AMP106", "bad_checkpoint", "2", "optimizer_state:exp_avg_sq", "none")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_clamped_to_fp16s_largest_number_are_named_also_where_they_are_stored_wider(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)
    with torch.no_grad():
        model[0].weight[1, 1] = -65504.0
    assert found(model) == [("AMP107", "bad_checkpoint", "0", "state:weight", "none")]


def test_large_weights_and_masks_are_left_alone():
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = 65505.0
    model.register_buffer("mask", torch.full((2, 2), torch.finfo(torch.float16).min))
    model.frozen_mask = nn.Parameter(torch.tensor([0.0, torch.finfo(torch.float16).min]), requires_grad=False)
    assert found(model) == []
