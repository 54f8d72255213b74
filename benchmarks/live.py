"""What watching a live loop costs: a step of a training that is watched, beside the same step that is not.

Run: python benchmarks/live.py [--part own models] [--model transformer resnet] [--repeats 7] [--burst 3] [--small]

**Own time** is seen in small steps: of transformers (width 64, 2 x 32 tokens), of many modules without a parameter and
of many parameters in one module, in bf16 autocast, with AdamW's foreach step and clipping, on one thread. Bursts of the
bare and of the watched loop take turns, on the same model; of each burst the lower quartile of its steps counts, and
what is printed are medians. It is CPU time of the thread that trains; what the log's threads take meanwhile, and what
the watch's own clock says (`ampdoctor run` prints it), have columns of their own. No step of a burst is looked at.
*Look*: a step in which all tensors are looked at, on the thread that trains, over a bare step.

**Models**: three trainings in fp32, in which a step is fastest and watching costs most: small steps (12 blocks, width
64), in which each monitor's own work can be seen; a 12-block transformer language model (width 320, 4 x 384 tokens,
AdamW); a ResNet-18 on 64 x 64 images (batch 16, SGD with momentum). Contestants take turns within a repeat, a burst of
steps each after two that are not timed, on the same model and batch. Ratios are those within a repeat, to the bare loop
(where a contestant clips: to the bare loop that clips), and what is printed are medians. Times are CPU seconds of the
process. Attaching, once a training, is not timed.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ampdoctor  # the repository is on the path only now
from ampdoctor.hooks import interfaces
from ampdoctor.hooks.callbacks import on_clip
from ampdoctor.hooks.interfaces import OWN_TIME
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


def small_steps(*, small: bool) -> Loop:
    """A language model whose step takes 20 ms, so that what a monitor does on the host can be seen."""
    torch.manual_seed(0)
    model = Transformer(blocks=1 if small else 12, width=64, vocabulary=256, context=32)
    ids = torch.randint(256, (2, 33))
    return Loop(model, ids, language_model_loss, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))


MODELS = {"small-steps": small_steps, "transformer": transformer, "resnet": resnet}


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
        time.sleep(0.5)  # threads of a contestant finish what they do with the first steps
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
    if model != "small-steps":
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


# -- own time --

SETTLES, STEPS = 17, 14
"""All tensors are looked at in steps 0 and 17, what is beside the models after steps 16 and 32: 18 to 31 are timed."""
FIXED, EACH = 0.5e-3, 4e-6
"""The goal: seconds a step, and besides for each module and for each parameter."""


class Parameters(nn.Module):
    """Many parameters in one module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(64) for _ in range(count))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) of ids to (batch, tokens, 64)."""
        return torch.stack(list(self.parts)).sum(0) + ids.unsqueeze(-1)


def small(blocks: int) -> nn.Module:
    """A transformer whose step takes milliseconds."""
    return Transformer(blocks=blocks, width=64, vocabulary=256, context=32)


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "transformer, 4 blocks": partial(small, 4),
    "transformer, 12 blocks": partial(small, 12),
    "transformer, 24 blocks": partial(small, 24),
    "12 blocks and 200 identities": lambda: nn.Sequential(small(12), *(nn.Identity() for _ in range(200))),
    "300 parameters in a module": lambda: Parameters(300),
}


class SmallLoop:
    """A step of some milliseconds, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._ids = torch.randint(64, (2, 33))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        self.parameters = list(model.parameters())[:20]

    def step(self) -> None:
        """Take a step."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(self.model(self._ids[:, :-1]).flatten(0, 1), self._ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def times(self, count: int) -> list[tuple[float, float, float, float]]:
        """Take steps; return of each the seconds of this thread, of all others, by the watch's clock, and the pace."""
        found = []
        for _ in range(count):
            here, every, own = time.thread_time(), time.process_time(), OWN_TIME.seconds
            self.step()
            here = time.thread_time() - here
            found.append((here, time.process_time() - every - here, OWN_TIME.seconds - own, pace(self.parameters)))
        return found


def pace(parameters: Sequence[Tensor]) -> float:
    """Return the seconds of fixed work like the watch's: 60 calls in Python, records in a dict, 20 calls of torch."""
    began = time.thread_time()
    found = {}
    for number in range(60):
        found[number] = _record(number, key=number)
    _ = [(one.detach(), id(one.grad)) for one in parameters]
    return time.thread_time() - began


def _record(number: int, *, key: int) -> dict[str, int]:
    return {"number": number, "key": key}


def lower(steps: Sequence[tuple[float, ...]], column: int) -> float:
    """Return the lower quartile: a busy neighbour only makes steps longer."""
    return statistics.quantiles([step[column] for step in steps], n=4)[0]


def own_time(repeats: int) -> None:
    """Measure and print the table, and what fits the watch's own clock by the numbers of modules and parameters."""
    columns = (
        "modules, parameters",
        "bare, ms",
        "own time, ms",
        "goal, ms",
        "own clock, ms",
        "own clock / pace",
        "other threads, ms",
        "look",
    )
    print(f"\n| model | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}", sep="\n")
    sizes, clocks = [], []
    for name, make in SHAPES.items():
        torch.manual_seed(0)
        loop = SmallLoop(make())
        loop.times(UNTIMED)
        rows: list[tuple[float, ...]] = []
        for _ in range(repeats):
            bare = lower(loop.times(STEPS), 0)
            watch = partial(ampdoctor.watch, loop.model, loop.optimizer, every=SETTLES)
            with TemporaryDirectory() as folder, watch(folder=folder):
                loop.times(SETTLES)
                time.sleep(0.5)  # until the log's thread has counted what was sampled
                looked = loop.times(1)[0][0]
                time.sleep(0.5)
                steps = loop.times(STEPS)
            clock, paces = (statistics.median(step[column] for step in steps) for column in (2, 3))
            others = statistics.mean(step[1] for step in steps)
            rows.append((bare, lower(steps, 0) - bare, clock, clock / paces, others, looked / bare))
        bare, mine, clock, paces, others, looked = (statistics.median(column) for column in zip(*rows, strict=True))
        modules, parameters = (len(list(each)) for each in (loop.model.modules(), loop.model.parameters()))
        sizes.append([1.0, modules, parameters])
        clocks.append(clock)
        spread = sorted(row[1] for row in rows)
        milliseconds = mine, spread[0], spread[-1], FIXED + EACH * (modules + parameters), clock
        shown = "{:.2f} ({:.2f} to {:.2f}) | {:.2f} | {:.2f}".format(*(1e3 * one for one in milliseconds))
        rest = f"{paces:.1f} | {others * 1e3:.2f} | {looked:.1f}"
        print(f"| {name} | {modules}, {parameters} | {bare * 1e3:.1f} | {shown} | {rest} |")
    fit = torch.linalg.lstsq(torch.tensor(sizes).double(), torch.tensor(clocks).double()).solution
    fixed, module, parameter = fit.tolist()
    print(f"\nown clock: {fixed * 1e3:.2f} ms, {module * 1e6:.1f} µs a module, {parameter * 1e6:.1f} µs a parameter")


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("own", "models"), default=["own", "models"])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="models of a few milliseconds: does everything run?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "own" in options.part:
        interfaces.perf_counter = time.thread_time  # type: ignore[attr-defined]  # a neighbour's turn is not ours
        own_time(options.repeats)
    for model in options.model if "models" in options.part else ():
        measure(model, repeats=options.repeats, burst=options.burst, small=options.small)


if __name__ == "__main__":
    main()
