"""A look at a step in place leaves no trace in what the loop goes on with."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor.evidence.thresholds import Thresholds
from ampdoctor.live.recording.recorder import StepRecorder
from ampdoctor.workflows.diagnose_step import look


def test_a_graph_that_was_made_before_a_look_is_differentiated_after_it():
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    critic = nn.Sequential(nn.Linear(2, 1))
    its = torch.optim.SGD(critic.parameters(), lr=0.1)
    recorder = StepRecorder()
    with recorder.watching():
        fake = maker(torch.randn(4, 2))
        (critic(fake.detach()).mean() * float("inf")).backward()
        before = {name: tensor.clone() for name, tensor in (*maker.state_dict().items(), *critic.state_dict().items())}
        versions = [p._version for p in (*maker.parameters(), *maker.buffers(), *critic.parameters())]
        program = recorder.program(its, name="optimizer", scaler=None, step=0)
        recorder.away = True
        with recorder.pausing():
            seen = look(program, policy="native", device="cpu", thresholds=Thresholds(), settles=False)
        recorder.away = False
        assert seen.report.verdict == "sick"
        assert [p._version for p in (*maker.parameters(), *maker.buffers(), *critic.parameters())] == versions
        after = dict((*maker.state_dict().items(), *critic.state_dict().items()))
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        critic.zero_grad()
        critic(fake).mean().backward()
    assert all(p.grad is not None for p in maker.parameters())
