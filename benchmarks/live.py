"""What watching a live loop costs: a step of a training that is watched, beside the same step that is not.

Run: python benchmarks/live.py [--model transformer resnet] [--repeats 7] [--burst 3] [--threads 1] [--small]

Two trainings: a 12-block transformer language model (width 320, 4 x 384 tokens, AdamW) and a ResNet-18 on 64 x 64
images (batch 16, SGD with momentum), both in fp32, in which a step is fastest and watching therefore costs most.
Contestants take turns within a repeat, a burst of steps each after two that are not timed, on the same model and batch.
Ratios are those within a repeat, to the bare loop (where a contestant clips: to the bare loop that clips), and what is
printed are medians. Times are CPU seconds of the process. Attaching, once a training, is not timed.

"Details" is a step in which every tensor is looked at; at the default sampling one in 100 is. The monitors of Lightning
and Composer are done again from their source: they measure every tensor and read every figure, in each step that they
look at.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampdoctor.hooks.callbacks import on_clip  # the repository is on the path only now
from ampdoctor.live.numbers.async_reader import AsyncReader
from ampdoctor.live.numbers.step_numbers import EVERY, StepNumbers
from benchmarks.overhead import Transformer, language_model_loss
from benchmarks.peers.monitoring import (
    ComposerMonitor,
    LightningNorms,
    Loop,
    Monitor,
    TrainerMonitor,
    detect_anomaly,
    wandb_watch,
)
from benchmarks.training.resnet import Residual

BARE, CLIPS = "bare loop", "bare loop that clips"
NUMBERS, DETAILS = "norms, loss and scale each step", "details in each step"
UNTIMED = 2
"""Steps after attaching: the first shows the model, and at the second what looked for it goes."""
TARGET = 1.01
"""Of a watched step at the default sampling against a bare one."""


class Numbers(Monitor):
    """Tells `StepNumbers` what happens, and counts the details as the log's writer does."""

    def __init__(self, loop: Loop, every: int) -> None:
        self.numbers = StepNumbers(lambda _: None, lambda make: make({}, lambda _: 0) and None, every=every)
        self._named = list(loop.model.named_parameters())
        self._step = 0

    def began(self, step: int) -> None:
        """As in `Monitor`."""
        self._step = step
        self.numbers.begin_step(step)

    def lost(self, loss: Tensor) -> None:
        """As in `Monitor`."""
        self.numbers.loss(loss)

    def ready(self) -> None:
        """As in `Monitor`."""
        self.numbers.about_to_step("optimizer", self._named, number=self._step)

    def stepped(self) -> None:
        """As in `Monitor`."""
        self.numbers.stepped("optimizer", skipped=False)


class Ring(Monitor):
    """The deferred reading alone: a tensor a step is put into the ring and read when it has arrived."""

    def __init__(self) -> None:
        self._later: AsyncReader[int] = AsyncReader()
        self._numbers = torch.zeros(256)

    def stepped(self) -> None:
        """As in `Monitor`."""
        self._later.put(0, [self._numbers])
        for _ in self._later.ready():
            pass


@contextmanager
def _clip_heard(_: Loop) -> Iterator[None]:
    with on_clip(lambda _: None):
        yield


@contextmanager
def _numbers(loop: Loop, every: int = 0) -> Iterator[None]:
    monitor = Numbers(loop, every)
    with monitor.numbers.watching(), loop.calling(monitor):
        yield
    if monitor.numbers.failed is not None:
        raise RuntimeError(monitor.numbers.failed)


@contextmanager
def _watched(loop: Loop) -> Iterator[None]:
    watch = importlib.import_module("ampdoctor").watch
    with TemporaryDirectory() as folder, watch(loop.model, loop.optimizer, folder=Path(folder)):
        yield


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who watches, and how.

    Attributes:
        attach: A context manager around the loop; it gives another one to time where it cannot let go of its own.
        clips: The loop clips its gradients, and is held beside a bare one that does.
        missing: Says why it cannot take part; None where it can.
    """

    attach: Callable[[Loop], AbstractContextManager[Loop | None]]
    clips: bool = False
    missing: Callable[[], str | None] = lambda: None


def _not_installed(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


def _no_watch() -> str | None:
    return None if hasattr(importlib.import_module("ampdoctor"), "watch") else "ampdoctor has no watch yet"


CONTESTANTS = {
    "the deferred ring alone": Contestant(lambda loop: loop.calling(Ring())),
    "hearing the clipping alone": Contestant(_clip_heard, clips=True),
    NUMBERS: Contestant(_numbers),
    "the same, of a loop that clips": Contestant(_numbers, clips=True),
    DETAILS: Contestant(lambda loop: _numbers(loop, 1)),
    "ampdoctor.watch": Contestant(_watched, missing=_no_watch),
    "Lightning's grad_norm": Contestant(lambda loop: loop.calling(LightningNorms(loop.model))),
    "Composer's OptimizerMonitor, NaNMonitor": Contestant(lambda loop: loop.calling(ComposerMonitor(loop))),
    "detect_anomaly": Contestant(detect_anomaly),
    "wandb.watch, offline, log_freq 1": Contestant(wandb_watch, missing=_not_installed("wandb")),
    "msprobe's TrainerMon, weight gradients": Contestant(TrainerMonitor(), missing=_not_installed("msprobe")),
}


def transformer(*, small: bool) -> Loop:
    """The language model."""
    torch.manual_seed(0)
    blocks, width, batch, tokens, vocabulary = (1, 64, 1, 8, 16) if small else (12, 320, 4, 384, 4096)
    model = Transformer(blocks=blocks, width=width, vocabulary=vocabulary, context=tokens)
    ids = torch.randint(vocabulary, (batch, tokens + 1))
    return Loop(model, ids, language_model_loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


def resnet(*, small: bool) -> Loop:
    """ResNet-18 with the stem for small images."""
    torch.manual_seed(0)
    widths, batch, size = ((8, 16), 2, 8) if small else ((64, 128, 256, 512), 16, 64)
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for inner, outer in zip((widths[0], *widths[:-1]), widths, strict=True):
        layers += [Residual(inner, outer, 1 if inner == outer else 2), Residual(outer, outer, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    data = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Loop(model, data, lambda net, both: F.cross_entropy(net(both[0]), both[1]), optimizer)


MODELS = {"transformer": transformer, "resnet": resnet}


def take(loop: Loop, name: str, burst: int) -> float:
    """Returns the CPU seconds of a burst of steps, after those that meet the model."""
    contestant = CONTESTANTS.get(name)
    loop.max_norm = 1.0 if name == CLIPS or (contestant and contestant.clips) else None
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # of modes that are not ours
        if contestant is not None:
            loop = stack.enter_context(contestant.attach(loop)) or loop
        for _ in range(UNTIMED):
            loop.step()
        start = time.process_time()
        for _ in range(burst):
            loop.step()
        return time.process_time() - start


def measure(model: str, *, repeats: int, burst: int, small: bool = False) -> dict[str, list[float]]:
    """Measure and print one training's table; returns the seconds of each contestant's bursts."""
    loop = MODELS[model](small=small)
    absent = {name: reason for name, entry in CONTESTANTS.items() if (reason := entry.missing()) is not None}
    times: dict[str, list[float]] = {name: [] for name in (BARE, CLIPS, *CONTESTANTS) if name not in absent}
    names = list(times)
    take(loop, BARE, burst)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(take(loop, name, burst))
    print(f"\n{model}, {torch.get_num_threads()} threads, median of {repeats} bursts of {burst}\n")
    print(*table(times, burst), *(f"| {name} | | | not run: {why} |" for name, why in absent.items()), sep="\n")
    print(f"\ntarget: at most {TARGET} x: {summary(times)}")
    return times


def ratios(times: dict[str, list[float]], name: str) -> list[float]:
    """Returns a contestant's ratios to its bare loop within each repeat, sorted."""
    bare = CLIPS if name in CONTESTANTS and CONTESTANTS[name].clips else BARE
    return sorted(a / b for a, b in zip(times[name], times[bare], strict=True))


def table(times: dict[str, list[float]], burst: int) -> Iterator[str]:
    """Yields the lines of the table, as Markdown."""
    yield "| contestant | ms CPU a step | ratio | lowest to highest |"
    yield "| --- | --: | --: | --: |"
    for name, taken in times.items():
        found, milliseconds = ratios(times, name), statistics.median(taken) / burst * 1e3
        yield f"| {name} | {milliseconds:.0f} | {statistics.median(found):.3f} | {found[0]:.3f} to {found[-1]:.3f} |"


def summary(times: dict[str, list[float]]) -> str:
    """Returns what the numbers cost at the default sampling, from a plain step and one with details."""
    plain, detail = (statistics.median(ratios(times, name)) for name in (NUMBERS, DETAILS))
    cost = plain + max(detail - plain, 0.0) / EVERY
    return f"{'met' if cost <= TARGET else 'MISSED'} ({cost:.4f}, with details in one step of {EVERY})"


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="models of a few milliseconds: does everything run?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for model in options.model:
        measure(model, repeats=options.repeats, burst=options.burst, small=options.small)


if __name__ == "__main__":
    main()
