"""A fork is what the process of its own would be, as far as its options go."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAID = "import sys; print([(s.write_through, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)])"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there are forks on Linux only")
def test_torchruns_unbuffered_processes_are_forks(python):
    asked = "import sys; print('torch' in sys.modules)"
    for options in ([], ["-u"], ["-P", "-u"]):
        done = subprocess.run([python, *options, "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout == "True\n", options


@pytest.mark.parametrize(("options", "unbuffered"), [([], ""), (["-u", "-P"], ""), ([], "1")])
def test_its_streams_are_those_of_python(options, unbuffered, python, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    fork, own = (
        subprocess.run(
            [program, *options, "-c", SAID], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        for program in (python, sys.executable)
    )
    assert fork.stdout == own.stdout
