"""Run the command line with workflows that behave as told: for tests that need a process of their own.

`python tests/cli/drive.py BEHAVIOUR ARGUMENT...`: the arguments are those of ampdoctor.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import threading
import time
from types import ModuleType

from ampdoctor.cli.main import main
from ampdoctor.errors import CheckpointError, UserCodeError
from tests.samples import EVERY


class MuteError(RuntimeError):
    def __str__(self):
        raise SystemExit(1)


def behave(behaviour, path=None, *, progress=None, **options):
    """Do what a workflow may do: return a report, raise, make noise, wait."""
    if behaviour in EVERY:
        return EVERY[behaviour]
    if behaviour == "crash":
        raise ZeroDivisionError("float division\x1b[31m by zero")
    if behaviour == "refuse":
        raise CheckpointError(f"{path} is refused")
    if behaviour == "user":
        raise UserCodeError("the factory raised ValueError: no", "Traceback:\n  File 'run.py', line 3\nValueError: no")
    if behaviour == "mute":
        raise MuteError
    if behaviour == "import interrupted":
        half_way = ImportError("half")
        half_way.__context__ = KeyboardInterrupt()
        raise AttributeError("module 'sympy' has no attribute 'core'") from half_way
    if behaviour == "exit":
        sys.exit(1)
    if behaviour == "progress":
        for done in range(100):
            progress("tensors\x1b[2J", done, 100)
            time.sleep(0.02)
        return EVERY["healthy"]
    if behaviour == "noise":
        atexit.register(print, "at exit")
        threading.Thread(target=_late).start()
        subprocess.Popen(["sh", "-c", "sleep 0.2; echo child"])
        print("now")  # noqa: T201 what user code does
        return EVERY["sick"]
    if behaviour == "wait":
        sys.stderr.write("ready\n")
        sys.stderr.flush()
        time.sleep(60)
    raise AssertionError(behaviour)


def _late():
    time.sleep(0.2)
    os.write(1, b"late\n")
    print("later")  # noqa: T201 what user code does


def _replace(name, function):
    """Put a module in the place of one that would import torch."""
    module = ModuleType(name)
    setattr(module, function, functools.partial(behave, behaviour))
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:  # in a fork, with the real one as its attribute
        setattr(sys.modules[parent], leaf, module)


if __name__ == "__main__":
    behaviour = sys.argv.pop(1)
    for command in ("scan", "bisect_nan", "profile", "recommend"):
        _replace(f"ampdoctor.workflows.{command}", command)
    sys.exit(main())
