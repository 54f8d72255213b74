"""Scan a path and print what the interpreter was asked to do meanwhile: `python audited.py PATH FORMAT`.

Everything that scan needs is imported first, by a scan of a harmless folder; what is imported, opened, started or
connected to after that is because of the path.
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


if __name__ == "__main__":
    target, form = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": {"w": torch.full((2,), float("nan"))}, "scaler": {"scale": 0.0}, "x": io.StringIO}
        torch.save(state, os.path.join(folder, "warm.pt"))  # noqa: PTH118
        scanned(folder, form)
        scanned(os.path.join(folder, "nothing"), form)  # noqa: PTH118
    events = []
    active = True

    def hook(event, arguments):
        if active and event.startswith(WATCHED):
            events.append(
                [event, [str(a) if isinstance(a, str | bytes | int | None) else type(a).__name__ for a in arguments]]
            )

    sys.addaudithook(hook)
    modules = set(sys.modules)
    code = scanned(target, form)
    active = False
    sys.stdout.write(json.dumps({"code": code, "events": events, "modules": sorted(set(sys.modules) - modules)}))
