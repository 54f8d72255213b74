"""The exit code says the same of every command; that of a process is in `process/`."""

from __future__ import annotations

import functools

import pytest

from tests.cli.drive import behave

CODES = {"healthy": 0, "sick": 1, "refuse": 2, "user": 2, "crash": 2}
"""By what the workflow does."""


@pytest.mark.parametrize("form", ["human", "json"])
@pytest.mark.parametrize("behaviour", CODES)
@pytest.mark.parametrize("command", ["scan", "bisect-nan", "profile", "recommend"])
def test_the_exit_code_says_the_same_of_every_command(command, behaviour, form, typed, stub_workflow):
    stub_workflow(command.replace("-", "_"), functools.partial(behave, behaviour))
    result = typed(command, "model.pt" if command == "scan" else "run.py:make_run", "--format", form)
    assert result.returncode == CODES[behaviour]
    assert bool(result.stderr) == (result.returncode == 2)
    reported = form == "json" and behaviour in ("refuse", "user")  # what failed is a report, too
    assert bool(result.stdout) == (result.returncode in (0, 1) or reported)
