"""The exit code says the same of every command; that of a process is in `process/`."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tests.cli.drive import behave
from tests.samples import HEALTHY

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


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_what_was_not_judged_is_said_beside_the_code_0(quiet, typed, stub_workflow):
    stub_workflow("scan", lambda *_, **__: replace(HEALTHY, verdict="not_judged"))
    result = typed("scan", "model.pt", *quiet)
    assert (result.returncode, result.stderr) == (
        0,
        "ampdoctor: not judged: nothing that was read shows whether it is healthy\n",
    )
