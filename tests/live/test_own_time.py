"""What the watch costs: the calls of ours in a healthy step, and the clock that `run` prints."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ampdoctor
from ampdoctor.hooks.interfaces import OWN_TIME

FOLDER = str(Path(ampdoctor.__file__).parent)
MOST = 580
"""Python calls of ours in a step: each takes a microsecond and a half between kernels."""


def step_of(depth):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def calls_in(step):
    found = []

    def called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def test_a_step_makes_few_calls_of_ours_and_none_for_a_module_or_a_parameter(tmp_path):
    counts = []
    for depth in (4, 40):
        step = step_of(depth)
        with ampdoctor.watch(folder=tmp_path / str(depth)):
            for _ in range(20):
                step()
            counts.append(len(calls_in(step)))
    assert counts[1] <= MOST
    assert counts[1] - counts[0] <= 20


def test_the_clock_counts_what_the_loop_waits_for(tmp_path):
    step = step_of(4)
    with ampdoctor.watch(folder=tmp_path):
        for _ in range(3):
            step()
        before, began = OWN_TIME.seconds, time.perf_counter()
        step()
        taken, whole = OWN_TIME.seconds - before, time.perf_counter() - began
    assert 0 < taken < whole
    after = OWN_TIME.seconds
    step()
    assert after == pytest.approx(OWN_TIME.seconds)  # nobody watches
