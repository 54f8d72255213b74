"""Where a command's time goes, by room, and what memory it holds over time.

Run: python benchmarks/where.py [--model gpt2] [--cell bisect-nan] [--steps 4] [--every 0.02]

Runs one cell of `real_sizes.py` in this process, on one thread, and looks at it from another thread, which costs about
1 %. Each look finds the innermost file of the package, or of the run, on the main thread's stack; what torch computes
counts for whoever asked for it. Printed are the shares of the looks by room, by what the steps are run for, and by
function, where the peak was seen, and the process's memory over time: a line wherever it has moved by 5 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACKAGE = ROOT / "ampdoctor"
SERVICES = {
    *("bisect_nan._attempted", "close_look.trace", "step_beside_fp32.beside_fp32", "rerun_step.run"),
    *("trials._in_fp32", "trials._run", "trials._wide_from", "measure.measured", "measure.shadowed"),
}
"""Functions that run steps: a step that is computed counts for one of them."""


class Look:
    """One look at the process.

    Args:
        frame: The innermost frame of the main thread; none is kept, because a frame keeps its tensors.
        memory: Bytes that the process holds.
    """

    def __init__(self, frame: FrameType | None, memory: float) -> None:
        self.memory = memory
        self.room = self.function = self.service = ""
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            name = frame.f_code.co_qualname
            ours = PACKAGE in path.parents
            if not self.room and (ours or path.parent == ROOT / "benchmarks"):
                self.room = str(path.parent.relative_to(PACKAGE)) if ours else "the run's own code"
                self.function = f"{path.stem}.{name}" if ours else name
            if ours and not self.service and f"{path.stem}.{frame.f_code.co_name}" in SERVICES:
                self.service = f"{path.stem}.{frame.f_code.co_name}"
            frame = frame.f_back


class Watch(threading.Thread):
    """Looks at the main thread until it is told to stop.

    Args:
        every: Seconds between two looks.

    Attributes:
        looks: What was seen.
    """

    def __init__(self, every: float) -> None:
        super().__init__(daemon=True)
        self.every = every
        self.looks: list[Look] = []
        self._over = threading.Event()
        self._main = threading.main_thread().ident

    def run(self) -> None:
        """Look."""
        page = os.sysconf("SC_PAGE_SIZE")
        statm = Path("/proc/self/statm")
        while not self._over.wait(self.every):
            memory = int(statm.read_text(encoding="ascii").split()[1]) * page
            self.looks.append(Look(sys._current_frames()[self._main or 0], memory))  # noqa: SLF001 - Python's own

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


def shares(looks: list[Look], what: str, most: int) -> None:
    """Print which values of an attribute were seen how often."""
    found = Counter(getattr(look, what) for look in looks)
    print(f"\nby {what}")
    for name, times in found.most_common(most):
        print(f"  {100 * times / len(looks):5.1f} %  {name or 'before and after'}")


def timeline(looks: list[Look], every: float) -> None:
    """Print memory over time."""
    peak = max(looks, key=lambda look: look.memory)
    print(f"\nmemory: at most {peak.memory / 1e9:.2f} GB, in {peak.room}, {peak.function} ({peak.service or 'search'})")
    shown: Look | None = None
    for at, look in enumerate(looks):
        moved = shown is None or abs(look.memory - shown.memory) > 0.05 * peak.memory
        if moved or (shown is not None and look.service != shown.service):
            print(f"  {at * every:6.1f} s  {look.memory / 1e9:5.2f} GB  {look.service or '-':32} {look.function}")
            shown = look


def main() -> int:
    """Watch what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--cell", default="bisect-nan")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=float, default=0.02, help="seconds between two looks")
    options = parser.parse_args()
    from benchmarks.real_sizes import cell

    watch = Watch(options.every)
    watch.start()
    cell(options.cell, options.model, options.steps)
    watch.stop()
    for what, most in (("room", 20), ("service", 12), ("function", 25)):
        shares(watch.looks, what, most)
    timeline(watch.looks, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
