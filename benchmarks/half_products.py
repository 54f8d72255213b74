"""From which size on a half product pays its detour through fp32 kernels: what the table in `half_products` rests on.

Run: python benchmarks/half_products.py [--repeats 5]

Each op in growing sizes, plain and detoured in turn on one thread; the ratio is the median within the repeats. A row is
marked where the table chooses the slower one by more than a fifth. The exit code is 1 if a product of four times the
table's size, or more, is slower by the detour.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampdoctor.precision import fp16_matmul as table
from ampdoctor.precision.fp16_matmul import half_products  # the repository is on the path only now

Call = Callable[[], object]


def cells() -> Iterator[tuple[str, int, int, Call]]:
    """Yields op, multiplications, the table's least, and the call."""
    for side in (4, 8, 16, 24, 32, 48, 64, 96, 128, 192):
        a, b = torch.randn(side, side).half(), torch.randn(side, side).half()
        yield f"mm {side}", side**3, table.LEAST, lambda a=a, b=b: a @ b
    for side in (4, 8, 16, 32, 64):
        a = torch.randn(8, side, side).half()
        yield f"bmm 8 x {side}", 8 * side**3, table.LEAST, lambda a=a: torch.bmm(a, a)
    for channels, side in ((1, 4), (2, 4), (4, 6), (8, 8), (16, 16), (32, 32)):
        x, w = torch.randn(1, channels, side, side).half(), torch.randn(channels, channels, 3, 3).half()
        work = channels**2 * 9 * side**2
        least = table.LEAST_CONVOLUTION
        yield f"conv2d {channels} x {side}", work, least, lambda x=x, w=w: functional.conv2d(x, w, padding=1)
    for length in (4, 8, 16, 32, 64, 128):
        q = torch.randn(1, 4, length, 32).half()
        work = q.numel() * length
        yield (
            f"attention {length}",
            work,
            table.LEAST_ATTENTION,
            lambda q=q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        )


def seconds(call: Call) -> float:
    """Processor seconds of one call, from as many as take 20 ms."""
    call()
    count, spent = 1, 0.0
    while spent < 0.02:
        start = time.process_time()
        for _ in range(count):
            call()
        spent = time.process_time() - start
        count *= 4
    return spent / (count // 4)


def detoured_always() -> None:
    """Let everything take the detour that may."""
    for name, (work_of, _) in list(table.PRODUCTS.items()):
        table.PRODUCTS[name] = work_of, 0
    table.LEAST_ATTENTION = 0  # type: ignore[misc]


def main() -> int:
    """Measure and judge the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    asked = list(cells())
    detoured_always()
    wrong = 0
    for name, work, least, call in asked:
        ratios, plain = [], 0.0
        for _ in range(repeats):
            plain = seconds(call)
            with half_products():
                ratios.append(seconds(call) / plain)
        ratio, chosen = statistics.median(ratios), work >= least
        slower = ratio > 1.2 if chosen else ratio < 1 / 1.2
        wrong += work >= 4 * least and ratio > 1.2
        mark = "  <- the slower one is chosen" if slower else ""
        print(
            f"{name:16} {work:10,} multiplications  plain {plain * 1e6:10.1f} us  "
            f"detour x {ratio:6.3f}  {'detour' if chosen else 'plain'}{mark}",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
