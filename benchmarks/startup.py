"""Start-up: what `ampdoctor --help` and a scan of a small file take, beside Python alone and beside `import torch`.

Run: python benchmarks/startup.py [--repeats 7]

Every repeat starts each process once, in turn; what is printed are medians of the CPU seconds (user and system), which
on an idle machine are the elapsed time, from the process's start to its end, and the largest resident size. Bytecode is
there, as in an installed package, even where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELP, SCAN, PYTHON, TORCH = "ampdoctor --help", "ampdoctor scan, 16 kB", "python -c pass", "python -c 'import torch'"
TARGET = 0.35
"""Seconds: below it, help and completion feel immediate."""
BEYOND_TORCH = 0.2
"""Seconds that a scan of a small file may take beyond `import torch`, without which it cannot begin."""

CONSOLE_SCRIPT = ("-c", "import sys; from ampdoctor.__main__ import main; sys.exit(main())")
"""What the installed `ampdoctor` runs; `python -m ampdoctor` takes a tenth of a second more."""

Taken = tuple[float, float]
"""CPU seconds, and megabytes at most."""


def taken(arguments: tuple[str, ...]) -> Taken:
    """Start one process, wait for its end, and return what it took."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def write(path: Path) -> None:
    """Write a safetensors file of one tensor."""
    values = array("f", (i / 4096 - 0.5 for i in range(4096))).tobytes()
    header = json.dumps({"weight": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, len(values)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


def measure(repeats: int) -> dict[str, list[Taken]]:
    """Return what every contender took, after one unmeasured start of each."""
    compileall.compile_dir(ROOT / "ampdoctor", quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.safetensors"
        write(small)
        contenders = {
            HELP: (*CONSOLE_SCRIPT, "--help"),
            SCAN: (*CONSOLE_SCRIPT, "scan", str(small)),
            PYTHON: ("-c", "pass"),
            TORCH: ("-c", "import torch"),
        }
        found: dict[str, list[Taken]] = {name: [] for name in contenders}
        for repeat in range(repeats + 1):
            for name, arguments in contenders.items():
                once = taken(arguments)
                if repeat:
                    found[name].append(once)
    return found


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    found = measure(repeats)
    times = {name: [seconds for seconds, _ in of] for name, of in found.items()}
    print(f"\nstart-up, median of {repeats}")
    for name, of in found.items():
        print(f"  {name:26}{statistics.median(times[name]) * 1e3:8.0f} ms CPU{max(mb for _, mb in of):8.0f} MB")
    ratio = statistics.median(a / b for a, b in zip(times[HELP], times[TORCH], strict=True))
    print(f"  {HELP} takes {ratio:.2f} x what {TORCH} alone takes")
    met = statistics.median(times[HELP]) <= TARGET
    print(f"  target: at most {TARGET} s: {'met' if met else 'MISSED'}")
    beyond = statistics.median(a - b for a, b in zip(times[SCAN], times[TORCH], strict=True))
    print(f"  {SCAN} takes {beyond:+.2f} s beyond {TORCH}")
    print(f"  target: at most {BEYOND_TORCH} s: {'met' if beyond <= BEYOND_TORCH else 'MISSED'}")


if __name__ == "__main__":
    main()
