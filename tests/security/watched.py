"""Scan files one after the other, and print for each what came of it and what it took: `python watched.py FILE...`.

A process of its own, because memory is a matter of processes. Its address space is limited: what asks for more fails
as a MemoryError instead of disturbing the machine.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ampdoctor.errors import AmpdoctorError, LimitExceededError
from ampdoctor.workflows.scan import scan

HEADROOM = 2 << 30


def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def watch(path):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before, began = status("VmRSS"), time.process_time()
    outcome = {"error": None, "message": ""}
    try:
        outcome["verdict"] = scan(path).verdict
    except AmpdoctorError as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
        if isinstance(error, LimitExceededError):
            outcome |= {"limit": error.limit, "actual": error.actual}
    except BaseException as error:  # noqa: BLE001 - that is what a test then complains about
        outcome |= {"error": type(error).__name__, "message": str(error)[:300]}
    return outcome | {"seconds": time.process_time() - began, "growth": status("VmHWM") - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        warm = os.path.join(folder, "warm.pt")  # noqa: PTH118
        torch.save({"model": {"w": torch.ones(2, 2)}}, warm)
        scan(warm)
    used = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    for file in sys.argv[1:]:
        sys.stdout.write(json.dumps(watch(file)) + "\n")
        sys.stdout.flush()
