"""Scan a path and print what the interpreter was asked to do for it: `python audited.py PATH FORMAT`.

A harmless folder is scanned first; what is imported, compiled, opened, started or connected to after that, and was not
then, is because of the path.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile

import torch

from ampdoctor.cli.main import main

WATCHED = (
    "import", "exec", "compile", "open", "os.", "socket.", "subprocess.", "ctypes.", "pickle.find_class", "shutil.",
    "urllib.", "marshal.", "code.__new__",
)  # fmt: skip


def scanned(path, form):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(["scan", path, "--format", form, "--no-progress"])


class Record:
    """The events since it was switched on, but for those that are known."""

    def __init__(self, known=()):
        self.known = {(event, *arguments) for event, arguments in known}
        self.events = []
        self.on = True
        sys.addaudithook(self.add)

    def add(self, event, arguments):
        if self.on and event.startswith(WATCHED):
            plain = [str(a) if isinstance(a, str | bytes | int | None) else type(a).__name__ for a in arguments]
            if (event, *plain) not in self.known:
                self.events.append((event, plain))


if __name__ == "__main__":
    target, form = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": {"w": torch.full((2,), float("nan"))}, "scaler": {"scale": 0.0}, "x": io.StringIO}
        torch.save(state, os.path.join(folder, "warm.pt"))  # noqa: PTH118
        for where in (folder, os.path.join(folder, "nothing")):  # noqa: PTH118
            scanned(where, form)
        usual = Record()
        scanned(folder, form)
        usual.on = False
    modules = set(sys.modules)
    seen = Record(usual.events)
    code = scanned(target, form)
    seen.on = False
    sys.stdout.write(json.dumps({"code": code, "events": seen.events, "modules": sorted(set(sys.modules) - modules)}))
