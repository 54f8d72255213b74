"""What of a loop outside its models is recorded: from a call's return to the backward, and no more."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ampdoctor.hooks.program import Op
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.replay.recorded_step import run_of


def names(program):
    return [one.function.__name__ for one in program.instructions if isinstance(one, Op)]


def trained(train, optimizer, model):
    """The program of a step, and its gradients."""
    recorder = StepRecorder()
    with recorder.watching():
        train(recorder)
        program = recorder.program(optimizer, name="optimizer", scaler=None, step=0)
    return program, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_backward_ends_the_recording_though_it_is_told_itself():
    model, heard = nn.Linear(2, 1), []

    def train(recorder):
        loss = model(torch.ones(3, 2)).mean()
        assert recorder._tape.is_open
        loss.backward()
        heard.append(recorder._tape.is_open)
        torch.ones(3) / torch.ones(3)  # the next batch, in the making
        with recorder.pausing():
            pass
        heard.append(torch._C._len_torch_function_stack())

    depth = torch._C._len_torch_function_stack()
    program, _ = trained(train, torch.optim.SGD(model.parameters()), model)
    assert heard == [False, depth + 1]  # before the first update, updates by hand are looked for
    assert names(program) == ["mean"]


def test_arithmetic_on_data_in_a_loss_is_run_again_and_what_is_taken_out_of_it_is_given():
    torch.manual_seed(0)
    model, rewards, picked = nn.Linear(2, 1), torch.randn(100), torch.tensor([3, 5, 8])

    def train(_):
        out = model(torch.ones(3, 2))
        mine = rewards[picked]
        mine = (mine - mine.mean()) / mine.std()
        with torch.no_grad():
            ignored = rewards * 2
        (F.mse_loss(out[:, 0], mine) + 0 * ignored.sum()).backward()

    program, real = trained(train, torch.optim.SGD(model.parameters()), model)
    assert "std" in names(program)
    assert {tensor.numel() for tensor in program.given} == {
        6,
        3,
        100,
        1,
    }  # what entered, was taken, has no gradients; a seed
    run = run_of(program)
    run.step(run.model, run.batches[0], torch.amp.GradScaler("cpu", enabled=False))
    assert all(torch.equal(p.grad, real[name]) for name, p in model.named_parameters())
