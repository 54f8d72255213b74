"""Run a few lines of training code under probes, as the tests of this folder need it."""

from __future__ import annotations

import torch
from torch import nn

from ampdoctor import TrainingRun
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.op_trace import OpTraceProbe
from ampdoctor.replay.session import Session


class Inline(nn.Module):
    """A module from a function."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args):
        return self.function(self, *args)


def session_of(model, loss, batches, **changes):
    given = {"precision": "fp32", **changes}
    return Session(TrainingRun(model=model, batches=batches, loss=loss, **given), device=torch.device("cpu"))


def stepped(session, *probes, steps=1):
    """The first steps of a session under the probes; gives their outcomes."""
    with session.watched(*probes):
        outcomes = [session.step(step) for step in range(steps) if session.has_step(step)]
    assert len(outcomes) == steps
    return outcomes


def trace_of(model, loss, batch=None, **changes):
    """(trace, nonfinite) of one step."""
    tracer, sums = OpTraceProbe(), NonFiniteProbe()
    session = session_of(model, loss, [torch.ones(2) if batch is None else batch], **changes)
    stepped(session, sums, tracer)
    session.close()
    return tracer.trace, sums.report


def births_of(model, loss, batch=None, **changes):
    """The origins that harm something."""
    return [origin for origin in trace_of(model, loss, batch, **changes)[0].origins if origin.affected]


def only_birth(model, loss, batch=None, **changes):
    origins = births_of(model, loss, batch, **changes)
    assert len(origins) == 1, [(b.where.op, b.where.phase, b.affected) for b in origins]
    return origins[0]


def here(mark, file):
    """The line that ends with the mark."""
    with open(file, encoding="utf-8") as lines:  # noqa: PTH123 - a test's own file
        return next(number for number, text in enumerate(lines, 1) if text.rstrip().endswith(f"# {mark}"))
