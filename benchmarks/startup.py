"""Start-up: how long `ampdoctor --help` takes, beside Python alone and beside `import torch`.

Run: python benchmarks/startup.py [--repeats 7]

Every repeat starts each process once, in turn; what is printed are medians of the CPU seconds (user and system), which
on an idle machine are the elapsed time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELP, PYTHON, TORCH = "ampdoctor --help", "python -c pass", "python -c 'import torch'"
CONTENDERS = {
    HELP: ("-m", "ampdoctor", "--help"),
    PYTHON: ("-c", "pass"),
    TORCH: ("-c", "import torch"),
}
TARGET = 0.35
"""Seconds: below it, help and completion feel immediate."""


def seconds(arguments: tuple[str, ...]) -> float:
    """Start one process, wait for its end, and return the CPU seconds that it took."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the times of every contender, after one unmeasured start of each."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for repeat in range(repeats + 1):
        for name, arguments in CONTENDERS.items():
            taken = seconds(arguments)
            if repeat:
                times[name].append(taken)
    return times


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    times = measure(repeats)
    print(f"\nstart-up, median of {repeats}")
    for name, taken in times.items():
        print(f"  {name:26}{statistics.median(taken) * 1e3:8.0f} ms CPU")
    ratio = statistics.median(a / b for a, b in zip(times[HELP], times[TORCH], strict=True))
    print(f"  {HELP} takes {ratio:.2f} x what {TORCH} alone takes")
    met = statistics.median(times[HELP]) <= TARGET
    print(f"  target: at most {TARGET} s: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    main()
