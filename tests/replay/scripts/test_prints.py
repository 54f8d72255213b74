"""What a script prints while it is replayed many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdoctor.errors import UserCodeError
from ampdoctor.workflows.bisect_nan import bisect_nan
from ampdoctor.workflows.recommend import recommend
from ampdoctor.workflows.requests import ReplayRequest

PRINTING = """
import logging
import sys

import torch

log = logging.getLogger(__file__)
log.addHandler(logging.StreamHandler())
log.propagate = False
print("setup")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.ones(2, 4)).mean()
    print("before", step)
    log.warning("log %d", step)
    if step == int(sys.argv[1]):
        raise ValueError("no such step")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("after", step, file=sys.stderr)
"""


@pytest.mark.parametrize("last", [9, 3])
def test_what_a_script_prints_is_shown_once_however_often_it_is_replayed(last, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PRINTING)
    steps = range(6)
    if last == 3:
        with pytest.raises(UserCodeError, match="no such step"):
            bisect_nan(ReplayRequest(factory="train.py", script_arguments=("3",)))
        steps = range(4)
    else:
        recommend(ReplayRequest(factory="train.py", script_arguments=("9",), steps=6))
    expected = ["setup"]
    for step in steps:
        expected += [f"before {step}", f"log {step}", f"after {step}"]
    if last == 3:
        expected.pop()
    assert capfd.readouterr().err.splitlines() == expected


def test_a_script_that_breaks_in_its_first_step_shows_what_it_printed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PRINTING)
    with pytest.raises(UserCodeError, match="no such step"):
        bisect_nan(ReplayRequest(factory="train.py", script_arguments=("0",)))
    assert capfd.readouterr().err.splitlines()[:2] == ["setup", "before 0"]
