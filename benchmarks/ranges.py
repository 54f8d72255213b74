"""What a profile costs: a measured step beside a bare fp32 one, and a recommendation from a saved profile.

Run: python benchmarks/ranges.py [--repeats 5] [--blocks 12] [--modules 1000] [--steps 50]

The step is `overhead.py`'s, a 12-block transformer with d = 512, in the fp32 reference of its fp16 run: bare, with what
`profile` attaches (`RangeProbe` and `NonFiniteProbe`), and with `NonFiniteProbe` alone. Contenders take turns within a
repeat, and ratios are medians of the ratios within a repeat.

The saved profile is one of a model of so many linear modules, each with an output, an output gradient, a weight and a
bias with their gradients: the figures of a real profile, with histograms of normally distributed values whose size goes
down with depth and changes from step to step. What is timed is `recommend_from_file` in a process in which everything
is imported already, then its parts one by one. Times are CPU seconds of the process, with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ampdoctor.evidence.report_scaler import SettingBound
from ampdoctor.evidence.run_facts import (
    ModuleFacts,  # the repository is on the path only now
    Place,
    SiteKind,
    SitePart,
)
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS
from ampdoctor.numerics.counting import count
from ampdoctor.numerics.histogram import Histogram
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.probes.formats_seen import FormatsProbe
from ampdoctor.probes.nonfinite import NonFiniteProbe
from ampdoctor.probes.ranges import RangeProbe
from ampdoctor.ranges.profile import EXPONENTS, Collector, RangeProfile, RunFacts, Shadow
from ampdoctor.replay.session import Session
from ampdoctor.scaling.choose import choose_scale
from ampdoctor.scaling.scalers import ScalerSettings
from ampdoctor.scaling.search import predict, search
from ampdoctor.scaling.trace import trace_of
from ampdoctor.workflows.profile import profile_section, range_checks, read_profile, write_profile
from ampdoctor.workflows.recommend import recommend_from_file
from ampdoctor.workflows.requests import ReplayRequest
from benchmarks.overhead import make_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from ampdoctor.hooks.interfaces import Probe

BARE, WATCHED, MEASURED = "bare fp32 step", "with the non-finite probe", "measured step"
STEP_TARGET = 2.5
"""Of the measured step against the bare one."""
ANSWER_TARGET = 2.0
"""Seconds of a recommendation from a profile of 1,000 modules, past start-up."""
WIDTH = 1024
"""Of the modules of the saved profile: parameters of each are WIDTH squared, and WIDTH."""
_SAMPLE = 4096
"""Values that stand for a tensor: their histogram is counted once and repeated, so that it fills as many bins."""
_SPREAD = (-6, 1)
"""Binades by which a tensor's size differs from step to step."""

Result = TypeVar("Result")


class StepContest:
    """Times the contenders on one session.

    Attributes:
        times: CPU seconds of each contender's steps.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        halves = FormatsProbe()
        start = session.snapshot()
        if not session.has_step(0):
            raise RuntimeError("the benchmark has no batch")
        with session.watched(halves):
            session.step(0)
        start.restore()
        self.nonfinite_probe = NonFiniteProbe()
        self.probes: dict[str, tuple[Probe, ...]] = {
            BARE: (),
            WATCHED: (self.nonfinite_probe,),
            MEASURED: (self.nonfinite_probe, RangeProbe(halves.plan)),
        }
        self.times: dict[str, list[float]] = {name: [] for name in self.probes}

    def take(self, name: str) -> float:
        """Take one step and return its CPU seconds; attaching hooks is once a run, not once a step, and not timed."""
        probes = self.probes[name]
        with self.session.watched(*probes) if probes else nullcontext():
            start = time.process_time()
            self.session.step(0)
            return time.process_time() - start

    def run(self, repeats: int) -> None:
        """Warm up each contender, then measure."""
        with self.session.reference():
            for repeat in range(repeats + 1):
                names = list(self.times)
                shift = repeat % len(names)
                for name in names[shift:] + names[:shift]:
                    taken = self.take(name)
                    if repeat:
                        self.times[name].append(taken)
        if self.nonfinite_probe.report.affected:
            raise RuntimeError(f"the measured run is not healthy: {self.nonfinite_probe.report.affected}")

    def ratios(self, name: str) -> list[float]:
        """Of a contender against the bare step, within each repeat; sorted."""
        return sorted(a / b for a, b in zip(self.times[name], self.times[BARE], strict=True))


def measure_steps(repeats: int, **size: int) -> StepContest:
    """Time the steps and print the table."""
    with autocast_policy("cuda"):
        session = Session(make_run(precision="fp16", **size), device=torch.device("cpu"))
        contest = StepContest(session)
        contest.run(repeats)
        session.close()
    print(f"\na measured step, {torch.get_num_threads()} threads, median of {repeats}")
    for name, taken in contest.times.items():
        found = contest.ratios(name)
        print(
            f"  {name:28}{statistics.median(taken) * 1e3:8.0f} ms CPU"
            f"{statistics.median(found):8.2f} x the bare step ({found[0]:.2f} to {found[-1]:.2f})"
        )
    ratio = statistics.median(contest.ratios(MEASURED))
    print(f"  target: at most {STEP_TARGET} x: {'met' if ratio <= STEP_TARGET else 'MISSED'} ({ratio:.2f})")
    return contest


def synthetic_profile(modules: int, steps: int) -> RangeProfile:
    """The profile of a model of linear modules, as `profile` would have collected it."""
    generator = torch.Generator().manual_seed(0)
    collector = Collector()
    weight, bias = WIDTH * WIDTH, WIDTH
    tokens = 512
    kinds: tuple[tuple[SiteKind, SitePart, str, int, int], ...] = (
        ("activation_grad", "output", "", -20, tokens * WIDTH),
        ("weight_grad", "parameter", ".weight", -14, weight),
        ("weight_grad", "parameter", ".bias", -13, bias),
        ("activation", "output", "", 0, tokens * WIDTH),
    )
    samples = {kind: _sample(generator, kind) for kind, *_ in kinds} | {"weight": _sample(generator, "weight")}

    def name(index: int) -> str:
        return f"blocks.{index}.linear"

    def counted(kind: SiteKind, size: float, numel: int) -> Histogram:
        return count(samples[kind][:numel] * size).repeated(max(1, numel // _SAMPLE))

    collector.add_weights(
        {
            Place(name(index) + part, "weight", "parameter"): counted("weight", 2.0**-6, numel)
            for index in range(modules)
            for part, numel in ((".weight", weight), (".bias", bias))
        }
    )
    for _ in range(steps):
        wander = torch.empty(modules, len(kinds)).uniform_(*_SPREAD, generator=generator).tolist()
        collector.add_step(
            {
                Place(name(index) + suffix, kind, part): counted(
                    kind, 2.0 ** (size - 6.0 * index / modules * (kind != "activation") + wander[index][column]), numel
                )
                for index in range(modules)
                for column, (kind, part, suffix, size, numel) in enumerate(kinds)
            }
        )
    scaler = torch.amp.GradScaler("cpu").state_dict()
    profile = collector.profile(
        RunFacts(precision="fp16", factory="synthetic", scaler=scaler, loss_scale=scaler["scale"]),
        half=lambda _: True,
        weight=lambda _: weight + bias,
        modules=tuple(
            ModuleFacts(
                name=name(index),
                type="Linear",
                parameters=weight + bias,
                ops={"linear": "fp16"},
                product_amax=8.0,
                gemm_multiple_of_16=True,
                gemm_smallest=WIDTH,
            )
            for index in range(modules)
        ),
    )
    return replace(profile, shadows=tuple(_shadow(profile, scale) for scale in (1.0, scaler["scale"])))


def _shadow(profile: RangeProfile, scale: float) -> Shadow:
    """One in which everything went as predicted, over the first step."""
    nonzero = profile.series.nonzero[0]
    predicted = profile.series.flushed[0, :, int(np.flatnonzero(np.exp2(EXPONENTS) == scale)[0])] * nonzero
    return Shadow(
        scale=scale,
        steps=(0,),
        nonzero=nonzero,
        flushed=np.rint(predicted).astype(np.int64),
        predicted=predicted.astype(np.float64),
        relative_error=1e-3,
        predicted_error=3e-4,
    )


def _sample(generator: torch.Generator, kind: str) -> torch.Tensor:
    """Normal values; those of activation gradients of many sizes, one a token, as padded and easy tokens make them."""
    values = torch.randn(_SAMPLE, generator=generator)
    if kind == "activation_grad":
        values *= torch.exp2(4.0 * torch.randn(_SAMPLE, generator=generator) - 4.0)
    return values


def parts(path: str, whole: float) -> dict[str, float]:
    """CPU seconds of the parts of a recommendation, in order; "else" is what is left of `whole`."""
    thresholds = DEFAULT_THRESHOLDS
    taken: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Result]) -> Result:
        start = time.process_time()
        result = work()
        taken[name] = time.process_time() - start
        return result

    ranges = timed("read", lambda: read_profile(path))
    choice = timed("choose_scale", lambda: choose_scale(ranges, thresholds))
    if choice is None:
        raise RuntimeError("the synthetic profile has no gradient")
    trace = timed("trace_of", lambda: trace_of(ranges, choice.fp32_modules))
    current = ScalerSettings(scale=ranges.run.loss_scale)
    start = SettingBound(value=choice.exponent, by=choice.bound_by)
    timed("search", lambda: search(trace, current=current, start=start, framework="torch", thresholds=thresholds))
    timed("predictions", lambda: [predict(ranges, settings) for settings in (current, choice.settings)])
    timed("checks", lambda: range_checks(ranges))
    timed("profile section", lambda: profile_section(ranges, choice.settings.scale, sites=False))
    taken["else"] = max(0.0, whole - sum(taken.values()))
    return taken


def measure_answer(modules: int, steps: int, repeats: int) -> list[float]:
    """Time recommendations from a saved profile, and print what they and their parts take."""
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "synthetic.ampprofile")
        write_profile(path, synthetic_profile(modules, steps))
        request = ReplayRequest(factory=path)
        times = []
        for _ in range(repeats):
            start = time.process_time()
            report = recommend_from_file(path, request)
            times.append(time.process_time() - start)
        if report.scaler is None or report.scaler.recommended is None:
            raise RuntimeError("nothing is recommended: the benchmark would not time what it says")
        size = Path(path).stat().st_size
        print(f"\na recommendation from a profile of {modules} modules, {steps} steps, {size / 1e6:.0f} MB")
        first, usual = times[0], statistics.median(times)
        print(f"  {first:.2f} s CPU the first time, median of {repeats}: {usual:.2f} s")
        for name, seconds in parts(path, usual).items():
            print(f"    {name:18}{seconds * 1e3:8.0f} ms")
        print(f"  target: at most {ANSWER_TARGET} s: {'met' if first <= ANSWER_TARGET else 'MISSED'}")
    return times


def main() -> None:
    """Read the options and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_steps(options.repeats, blocks=options.blocks)
    measure_answer(options.modules, options.steps, options.repeats)


if __name__ == "__main__":
    main()
