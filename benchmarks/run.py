"""Every benchmark of speed, one after the other, each in a process of its own: what `make bench` runs.

Run: python benchmarks/run.py [--quick]

README.md beside this file says how each is measured, and what came out on which machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "histogram.py": ((), ("--elements", "4194304", "--repeats", "3")),
    "overhead.py": (("--peers",), ("--repeats", "3")),
    "live.py": ((), ("--small", "--repeats", "2")),
    "until_sick.py": ((), ("--size", "1M", "--precision", "fp32", "--steps", "23")),
    "ranges.py": ((), ("--repeats", "2", "--blocks", "2", "--modules", "50", "--steps", "5")),
    "half_products.py": ((), ("--repeats", "1")),
    "real_sizes.py": ((), ("--model", "resnet50", "--steps", "1", "--cell", "bisect-nan")),
    "scan.py": ((), ("--gigabytes", "0.1", "--repeats", "1")),
    "startup.py": ((), ("--repeats", "3")),
    "health_log.py": ((), ("--steps", "3000")),
}
"""Options of each: in full, and quick."""
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
"""Made by `make peers`; where it is there, a step is timed in it, beside all peers and not only those in .venv."""


def python_for(script: str) -> str:
    """Return the interpreter that runs a script."""
    return str(PEERS_PYTHON) if script == "overhead.py" and PEERS_PYTHON.exists() else sys.executable


def machine() -> str:
    """Return in one line what the figures depend on; no name of a machine or person."""
    torch = importlib.metadata.version("torch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({platform.machine()}), Python {platform.python_version()}, torch {torch}"


def load() -> str:
    """Return how busy the machine already is: ratios stand a busy neighbour, absolute times do not."""
    return f"load average before the start: {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""


def main() -> int:
    """Run all; the exit code is that of the first one that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does everything still run?")
    quick = parser.parse_args().quick
    print(f"{machine()}\n{load()}", flush=True)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    for script, (full, small) in SCRIPTS.items():
        print(f"\n== benchmarks/{script}", flush=True)
        code = subprocess.run(
            [python_for(script), str(HERE / script), *(small if quick else full)],
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        ).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
