"""The line that makes a parameter float16 is known, whichever way it does; nothing is left in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampdoctor.probes.user_code import HalfMade


def cast():
    return nn.Linear(2, 2).half()  # cast


def moved():
    return nn.Linear(2, 2).to(torch.float16)  # moved


def built():
    return nn.Linear(2, 2, dtype=torch.float16)  # built


def defaulted():
    torch.set_default_dtype(torch.float16)
    try:
        return nn.Linear(2, 2)  # defaulted
    finally:
        torch.set_default_dtype(torch.float32)


def loaded():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))  # loaded
    return model


def in_parts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model.apply(lambda module: module.half())  # in_parts


@pytest.mark.parametrize("make", [cast, moved, built, defaulted, loaded, in_parts], ids=lambda one: one.__name__)
def test_the_line_is_known(make):
    made = HalfMade()
    before = dict(vars(nn.Module))
    with made.recording():
        model = make()
    assert dict(vars(nn.Module)) == before
    source = made.of(model.parameters())
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[source.line - 1].endswith(f"# {make.__name__}")


def test_what_is_not_half_or_was_made_before_is_not_known():
    made, before = HalfMade(), nn.Linear(2, 2).half()
    with made.recording():
        wide = nn.Linear(2, 2).to(torch.float32)
    after = nn.Linear(2, 2).half()
    assert made.of([*before.parameters(), *wide.parameters(), *after.parameters()]) is None
