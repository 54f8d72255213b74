"""Scanning a checkpoint: ampdoctor beside weightlens, beside the loop that people write, and beside just reading it.

Run: python benchmarks/scan.py [--gigabytes 2] [--repeats 5]

For fp32 and bf16 a checkpoint of random weights in the shapes of a language model is written to a temporary folder, as
`.safetensors` and as `torch.save` writes it, and read once so that the cache is warm. Every repeat runs each contender
in a process of its own, in turn; a contender times itself after its imports. Printed are medians, and how far the peak
memory of the process grew over what it was after the imports. weightlens runs where `make peers` installed it.

Last come whole processes, from their start to their end, as a user waits for them: `ampdoctor scan FILE`, and Python
that imports torch, opens the same file as its library does (memory-mapped) and sums every tensor with all of torch's
threads. *Of that* is its time over the scan's, elapsed and in CPU seconds, the median over the repeats.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
MATRICES = ((4096, 4096), (1024, 4096), (4096, 4096), (11008, 4096), (4096, 11008), (4096,))
"""One block of a language model of 7 billion parameters; whole blocks are written until the size is reached."""


def write(dtype_name: str, size: float, folder: Path) -> None:
    """Write `weights.safetensors` and `weights.pt` of about `size` bytes each."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    left = size / dtype.itemsize
    while left > 0:
        for shape in MATRICES:
            weight = torch.randn(shape).mul_(0.02).to(dtype)
            weights[f"layers.{len(weights) // len(MATRICES)}.{len(weights)}.weight"] = weight
            left -= weight.numel()
    save_file(weights, folder / "weights.safetensors")
    torch.save(weights, folder / "weights.pt")


def ampdoctor_scan(path: Path) -> Callable[[], object]:
    """The whole command, from the path to the finished report."""
    from ampdoctor.workflows.scan import scan

    return lambda: scan(path)


def ampdoctor_exact(path: Path) -> Callable[[], object]:
    """The same with every element sorted by magnitude."""
    from ampdoctor.workflows.scan import scan

    return lambda: scan(path, exact=True)


def weightlens(path: Path) -> Callable[[], object]:
    """Its command line's own function, printing into nothing."""
    import torch  # noqa: F401 - its import is not what is compared
    from weightlens.cli import main

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            sys.argv = ["lens", "analyze", str(path)]
            main()

    return run


def naive_loop(path: Path) -> Callable[[], object]:
    """What people write with `torch.load(mmap=True)` for the same figures, one torch expression each."""
    import torch

    def figures(weight: torch.Tensor) -> list[float]:
        found = [weight.isnan().sum(), (weight == torch.inf).sum(), (weight == -torch.inf).sum(), (weight == 0).sum()]
        magnitude = weight.abs()
        nonzero = magnitude[magnitude > 0]
        found += [magnitude.max(), nonzero.min(), (magnitude == torch.finfo(weight.dtype).max).sum()]
        found += [weight.min(), weight.max()]
        for half in (torch.float16, torch.bfloat16):
            cast = weight.to(half)
            error = (cast.float() - weight.float()).norm() / weight.float().norm()
            found += [((cast == 0) & (weight != 0)).sum(), (magnitude < torch.finfo(half).tiny).sum()]
            found += [cast.isinf().sum(), error]
        return [float(f) for f in found]

    return lambda: {name: figures(w) for name, w in torch.load(path, mmap=True, weights_only=True).items()}


def read_and_sum(path: Path) -> Callable[[], object]:
    """Read the file into one buffer of 32 MB, again and again, and sum what is in it with all of torch's threads."""
    import torch

    dtype = torch.bfloat16 if "bfloat16" in path.parent.name else torch.float32

    def run() -> float:
        buffer = bytearray(32 * 1024 * 1024)
        total = 0.0
        with path.open("rb", buffering=0) as file:
            while (got := file.readinto(buffer)) >= dtype.itemsize:
                total += float(torch.frombuffer(buffer, dtype=dtype, count=got // dtype.itemsize).sum())
        return total

    return run


def floor(path: Path) -> Callable[[], object]:
    """The limit: the same blocks and threads as a scan, and one sum of each."""
    import torch

    from ampdoctor.checkpoints.folder import open_checkpoint
    from ampdoctor.checkpoints.tensor_statistics import stream

    def run() -> float:
        with open_checkpoint(path) as checkpoint:
            tensors = ((ref.name, ref.stored) for ref in checkpoint)
            sums = stream(
                tensors, lambda _key, blocks: sum(float(b.sum()) for _, b in blocks), jobs=torch.get_num_threads()
            )
            return sum(value for _, value, _ in sums)

    return run


CONTENDERS: dict[str, tuple[Callable[[Path], Callable[[], object]], str]] = {
    "ampdoctor": (ampdoctor_scan, "weights.safetensors"),
    "ampdoctor (.pt)": (ampdoctor_scan, "weights.pt"),
    "ampdoctor exact=true": (ampdoctor_exact, "weights.safetensors"),
    "weightlens 0.3.0": (weightlens, "weights.safetensors"),
    "loop over torch.load(mmap=True)": (naive_loop, "weights.pt"),
    "read and sum": (read_and_sum, "weights.safetensors"),
    "read and sum, block by block": (floor, "weights.safetensors"),
}
TARGETS = {"weightlens 0.3.0": 15.0, "loop over torch.load(mmap=True)": 5.0, "read and sum": 0.5}
"""How many times as fast as each ampdoctor has to be."""
SLOW = frozenset({"weightlens 0.3.0", "loop over torch.load(mmap=True)"})
"""They take minutes and are far from their targets: two repeats are enough."""
SAFETENSORS = """
import sys
import torch
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    print(sum(float(file.get_tensor(name).sum()) for name in file.keys()))
"""
TORCH = """
import sys
import torch
print(sum(float(tensor.sum()) for tensor in torch.load(sys.argv[1], mmap=True, weights_only=True).values()))
"""
CONSOLE_SCRIPT = "import sys; from ampdoctor.__main__ import main; sys.exit(main())"
"""What the installed `ampdoctor` runs."""
WHOLE = {"weights.safetensors": SAFETENSORS, "weights.pt": TORCH}
TARGET_WHOLE = 0.8
"""How fast a scan has to be as a whole process, of reading and summing."""
TARGET_GROWTH = 150.0
"""Megabytes by which the peak memory may grow, whatever the file's size."""


def peak_megabytes() -> float:
    """Return the largest resident size of this process so far."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def contend(name: str, folder: Path) -> None:
    """Run one contender in this process and print seconds and megabytes as JSON."""
    prepare, file = CONTENDERS[name]
    run = prepare(folder / file)
    import torch

    torch.ones(1 << 20).sum()  # the threads of torch are there before the clock starts
    before, began = peak_megabytes(), time.perf_counter()
    run()
    print(json.dumps({"seconds": time.perf_counter() - began, "megabytes": peak_megabytes() - before}))


def measured(name: str, folder: Path) -> dict[str, float]:
    """Run one contender in a process of its own."""
    python = str(PEERS_PYTHON) if name.startswith("weightlens") else sys.executable
    command = [python, __file__, "--contender", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def process(arguments: list[str]) -> dict[str, float]:
    """Start a process, wait for its end, and return its elapsed and CPU seconds and its largest resident size."""
    began = time.perf_counter()
    started = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(started.pid, 0)
    elapsed = time.perf_counter() - began
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, started.args)
    return {"elapsed": elapsed, "CPU": usage.ru_utime + usage.ru_stime, "megabytes": usage.ru_maxrss / 1024}


def compare_processes(folder: Path, repeats: int) -> None:
    """Time whole processes on the files of a folder and print the table."""
    compileall.compile_dir(ROOT / "ampdoctor", quiet=1)  # as an installed package has it
    print(f"\n{'whole processes':34}{'scan':>8}{'read and sum':>14}{'of that':>9}{'target':>8}{'peak memory':>16}")
    for file, reading in WHOLE.items():
        path = str(folder / file)
        pairs = [
            (process(["-c", CONSOLE_SCRIPT, "scan", path]), process(["-c", reading, path])) for _ in range(repeats + 1)
        ][1:]
        for clock in ("elapsed", "CPU"):
            ours, theirs = (statistics.median(pair[i][clock] for pair in pairs) for i in (0, 1))
            ratio = statistics.median(other[clock] / our[clock] for our, other in pairs)
            peaks = "{:.0f}, {:.0f} MB".format(*(max(pair[i]["megabytes"] for pair in pairs) for i in (0, 1)))
            line = f"{f'{file}, {clock}':34}{ours:6.2f} s{theirs:12.2f} s{ratio:7.2f} x{TARGET_WHOLE:>6g} x{peaks:>16}"
            print(line)


def compare(dtype: str, gigabytes: float, repeats: int) -> None:
    """Write a checkpoint, time all contenders and print the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / dtype
        folder.mkdir()
        subprocess.run(
            [sys.executable, __file__, "--write", dtype, "--gigabytes", str(gigabytes), "--folder", str(folder)],
            check=True,
        )
        for path in folder.iterdir():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        names = [n for n in CONTENDERS if PEERS_PYTHON.exists() or not n.startswith("weightlens")]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repeat in range(repeats):
            for name in names:
                if name in SLOW and repeat >= 2:
                    continue
                runs[name].append(measured(name, folder))
        size = (folder / "weights.safetensors").stat().st_size
        _print(dtype, size, names, runs)
        compare_processes(folder, repeats)


def _print(dtype: str, size: int, names: list[str], runs: dict[str, list[dict[str, float]]]) -> None:
    ours = statistics.median(r["seconds"] for r in runs["ampdoctor"])
    print(f"\n{dtype}, {size / 1e9:.2f} GB")
    print(f"{'':34}{'GB/s':>8}{'ampdoctor is':>14}{'target':>8}{'peak memory':>14}")
    for name in names:
        taken = statistics.median(r["seconds"] for r in runs[name])
        growth = max(r["megabytes"] for r in runs[name])
        target = f"{TARGETS[name]:g} x" if name in TARGETS else ""
        print(f"{name:34}{size / taken / 1e9:8.2f}{taken / ours:12.2f} x{target:>8}{growth:>+11.0f} MB")
    growth = max(r["megabytes"] for r in runs["ampdoctor"])
    print(f"peak memory of ampdoctor: {growth:.0f} MB of {TARGET_GROWTH:.0f} allowed")


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.gigabytes * 1e9, given.folder)
    elif given.contender:
        contend(given.contender, given.folder)
    else:
        for dtype in ("float32", "bfloat16"):
            compare(dtype, given.gigabytes, given.repeats)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
