"""Histogram throughput against `tensor.sum()` and against the loop that a user would write instead.

Run: python benchmarks/histogram.py [--elements 67108864] [--repeats 5] [--threads 1]

Each repeat times all contenders one after the other, so that a busy neighbour slows all of them; what is printed are
medians, and ratios are medians of the ratios within a repeat. On one thread it is CPU seconds that are timed.
`bincount of bytes` is torch's own counting of as many bytes as the tensor has elements, on one thread: the least that
any histogram in torch takes, for it counts no other integer as fast.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

from ampdoctor.numerics.counting import count
from ampdoctor.probes.nonfinite import is_nonfinite

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def naive(tensor: torch.Tensor) -> tuple[object, ...]:
    """Compute six statistics as they are usually written: each its own pass, each waited for."""
    magnitude = tensor.abs()
    return (
        tensor.isnan().any().item(),
        tensor.isinf().any().item(),
        magnitude.max().item(),
        (magnitude <= 2.0**-25).sum().item(),
        (magnitude < 2.0**-14).sum().item(),
        (magnitude >= 65520.0).sum().item(),
    )


CONTENDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "histogram": count,
    "sum": lambda tensor: tensor.sum().item(),
    "bincount of bytes": lambda tensor: torch.bincount(tensor.view(torch.uint8)[: tensor.numel()], minlength=256),
    "naive loop": naive,
    "is_nonfinite": is_nonfinite,
    "isfinite().all()": lambda tensor: tensor.isfinite().all().item(),
}
RATIOS = (
    ("histogram", "naive loop"),
    ("histogram", "sum"),
    ("bincount of bytes", "sum"),
    ("is_nonfinite", "sum"),
    ("is_nonfinite", "isfinite().all()"),
)


def seconds(work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
    """Time one call."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work(tensor)
    return clock() - start


def measure(dtype: torch.dtype, elements: int, repeats: int) -> None:
    """Print one dtype's table."""
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(elements, generator=generator) * 1e-3).to(dtype)
    warm = tensor[: elements // 16 + 1]
    for work in CONTENDERS.values():
        work(warm)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(repeats):
        for name, work in CONTENDERS.items():
            times[name].append(seconds(work, tensor))
    gigabytes = tensor.numel() * tensor.element_size() / 1e9
    print(f"\n{dtype}, {elements:,} elements, {torch.get_num_threads()} threads, median of {repeats}")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"  {name:18}{median * 1e3:10.1f} ms {gigabytes / median:8.2f} GB/s")
    for name, other in RATIOS:
        ratio = statistics.median(b / a for a, b in zip(times[name], times[other], strict=True))
        print(f"  {name} is {ratio:.2f} x as fast as {other}")


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26, help="elements per tensor (default: 64 M)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for dtype in DTYPES:
        measure(dtype, options.elements, options.repeats)


if __name__ == "__main__":
    main()
