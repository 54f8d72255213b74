"""What `bisect-nan --until-sick` costs a step: its own loop beside the same loop written by hand, step by step in turn.

Run: python benchmarks/until_sick.py [--steps 66] [--precision fp32] [--size 40M] [--tokens 512] [--parts]
     python benchmarks/until_sick.py --guard

The whole command's search runs, as far as it goes before the first firing: batches drawn and kept, random states, the
cheap look, a snapshot now and then. Whenever it says that a step is done, the hand-written loop takes a step on a
model, optimizer, scaler and DataLoader of its own, under the same emulation of CUDA's casts, so that a busy neighbour
slows both. Times are CPU seconds of the process, on one thread; what is printed are ratios over stretches of steps as
long as the distance of two snapshots, so that each holds the cost of one. `--guard` shows instead what the mark
`amp_finite` adds to a test of the loop by hand on a small model, a step: each second of its tests has none.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampdoctor import ReplayRequest, TrainingRun, bisect_nan  # the repository is on the path only now
from ampdoctor.workflows.close_look import stretch
from ampdoctor.workflows.requests import MOST_UNTIL_SICK
from benchmarks.overhead import Transformer, language_model_loss

TARGET = 1.10
VOCABULARY, CONTEXT = 8192, 256
SIZES: dict[str, dict[str, int]] = {"1M": {"blocks": 4, "width": 64}, "40M": {"blocks": 10, "width": 512}}
SIZES_OF_TESTS: dict[str, dict[str, int]] = {"tiny": {"blocks": 2, "width": 16}}
"""Of each size, what its model is made of; most of the smaller one is its embedding, as in small language models."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def parts(size: str, tokens: int) -> tuple[torch.nn.Module, DataLoader[Any]]:
    """Return a model and a loader that shuffles random tokens by a generator of its own."""
    torch.manual_seed(0)
    model = Transformer(vocabulary=VOCABULARY, context=CONTEXT, **(SIZES | SIZES_OF_TESTS)[size])
    context = min(tokens, CONTEXT)
    ids = torch.randint(VOCABULARY, (256, context + 1), generator=torch.Generator().manual_seed(1))
    order = torch.Generator().manual_seed(2)
    return model, DataLoader(TensorDataset(ids), batch_size=max(tokens // context, 1), shuffle=True, generator=order)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of the next token, of a batch of the loader's."""
    return language_model_loss(model, batch[0])


def make_run(size: str, tokens: int, precision: str) -> TrainingRun:
    """The run that is replayed."""
    model, batches = parts(size, tokens)
    return TrainingRun(
        model=model,
        batches=batches,
        loss=loss_of,
        optimizer=partial(_optimizer),
        precision=precision,
        scaler={"init_scale": 1024.0} if precision == "fp16" else None,
    )


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def by_hand(size: str, tokens: int, precision: str) -> Iterator[float]:
    """Yield the loss of each step of the same training, as a user writes it."""
    model, batches = parts(size, tokens)
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=precision == "fp16")
    while True:
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", _DTYPES[precision]) if precision in _DTYPES else nullcontext():
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield loss.item()


@dataclass
class Turns:
    """A `Progress` that takes a step by hand after each step of the search, and times both.

    Attributes:
        step: Takes a step by hand.
        search: CPU seconds of each step of the search.
        hand: CPU seconds of each step by hand.
    """

    step: Callable[[], Any]
    profile: cProfile.Profile | None = None
    search: list[float] = field(default_factory=list)
    hand: list[float] = field(default_factory=list)
    _left: float | None = None

    def __call__(self, what: str, done: int, total: int | None, *, unit: str = "") -> None:  # noqa: ARG002 - a Progress
        """The search says that it has come so far."""
        if what != "replaying":
            return
        begin = time.process_time()
        if self.profile is not None:
            self.profile.disable()
        if done and self._left is not None:
            self.search.append(begin - self._left)
            self.step()
            self.hand.append(time.process_time() - begin)
        if self.profile is not None:
            self.profile.enable()
        self._left = time.process_time()


def measure(
    size: str, tokens: int, precision: str, steps: int, *, show_parts: bool = False, most: int = MOST_UNTIL_SICK
) -> list[float]:
    """Measure and print one table row; return the ratios of its stretches."""
    loop = by_hand(size, tokens, precision)
    turns = Turns(lambda: next(loop), cProfile.Profile() if show_parts else None)
    request = ReplayRequest(
        factory=partial(make_run, size, tokens, precision), until_sick=True, max_steps=most, compare_steps=0
    )
    every = stretch(most)

    class Enough(KeyboardInterrupt):
        """As many steps as are wanted: the search reports what it knows, as after Ctrl-C."""

    def progress(what: str, done: int, total: int | None, *, unit: str = "") -> None:
        turns(what, done, total, unit=unit)
        if what == "replaying" and done == steps + 1:
            raise Enough

    report = bisect_nan(request, progress=progress)
    if report.findings:
        raise RuntimeError(f"the measured run is not healthy: {report.findings[0].message}")
    search, hand = turns.search[1:], turns.hand[1:]  # the first step makes the optimizer's state
    cuts = range(0, len(search) - every + 1, every)
    found = sorted(sum(search[at : at + every]) / sum(hand[at : at + every]) for at in cuts)
    count = sum(parameter.numel() for parameter in parts(size, tokens)[0].parameters())
    print(
        f"| {count / 1e6:.1f} M | {precision} | {tokens} | {statistics.median(hand) * 1e3:.0f} | {len(search)} "
        f"| {found[0]:.3f} to {found[-1]:.3f} | {sum(search) / sum(hand):.3f} |",
        flush=True,
    )
    if turns.profile is not None:
        turns.profile.disable()
        pstats.Stats(turns.profile).sort_stats("cumtime").print_stats("ampdoctor|_cpython", 60)
    return found


_TESTS = """
import pytest
from benchmarks.until_sick import by_hand
@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n % 2 else pytest.mark.amp_finite) for n in range(10)])
@pytest.mark.parametrize("steps", [1, 10, 40])
def test_training(steps, number):
    loop = by_hand("tiny", 16, "fp16")
    for _ in range(steps):
        next(loop)
"""


class TestTimes:
    """A plugin of pytest's: CPU seconds of each test, from outside of what watches it."""

    __test__ = False

    def __init__(self) -> None:
        self.seconds: dict[int, tuple[list[float], list[float]]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Time one test; the first marked one imports what watches."""
        begin = time.process_time()
        result = yield
        steps, number = item.callspec.params["steps"], item.callspec.params["number"]
        if number > 1:
            self.seconds.setdefault(steps, ([], []))[number % 2].append(time.process_time() - begin)
        return result


def guarded() -> dict[int, float]:
    """Measure and print what the guard adds to a step; return it in ms, by the number of steps in a test."""
    times, found = TestTimes(), {}
    with TemporaryDirectory() as folder:
        file = Path(folder, "test_training.py")
        file.write_text(_TESTS, "utf-8")
        if pytest.main([str(file), "-q", "-p", "no:cacheprovider", "-p", "no:randomly"], plugins=[times]):
            raise RuntimeError("a test has failed")
    print("\n| steps in a test | ms CPU a step, bare | with the guard | added |\n| ---: | ---: | ---: | ---: |")
    for steps, both in times.seconds.items():
        marked, bare = (statistics.median(taken) * 1e3 / steps for taken in both)
        found[steps] = marked - bare
        print(f"| {steps} | {bare:.1f} | {marked:.1f} | {marked - bare:.1f} |", flush=True)
    return found


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3 * stretch(MOST_UNTIL_SICK))
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16", "fp16"), help="default: fp32, fp16")
    parser.add_argument("--size", action="append", choices=tuple(SIZES), help="default: both")
    parser.add_argument("--tokens", type=int, default=512, help="in a step (default: 512)")
    parser.add_argument("--parts", action="store_true", help="also show where the search's time goes, profiled")
    parser.add_argument("--guard", action="store_true", help="show what the pytest guard adds to a step instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.guard:
        guarded()
        return
    print(f"target: at most {TARGET:.2f}; a snapshot every {stretch(MOST_UNTIL_SICK)} steps\n")
    print("| parameters | precision | tokens | ms CPU by hand | steps | lowest to highest | ratio |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for size in options.size or SIZES:
        for precision in options.precision or ("fp32", "fp16"):
            measure(size, options.tokens, precision, options.steps, show_parts=options.parts)


if __name__ == "__main__":
    main()
