"""What a diagnosis costs on models of the sizes that people have, beside the training loop itself.

Run: python benchmarks/real_sizes.py [--model gpt2 ...] [--steps 4] [--cell CELL ...] [--grow steps ...]

Each cell is a process of its own, one after the other: the hand-written loop in fp32 and under fp16 autocast (the
CPU's own kernels: slow, and asked for by name), `bisect-nan` on the healthy run and on runs that fail in the second and
in the last step, `profile` and `recommend`. A cell's processor seconds leave out what builds the model and imports its
libraries; its peak memory is that of the whole process, torch (about 0.25 GB) included. What is printed beside them
are the ratios to the fp32 loop over as many steps, in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HERE = Path(__file__).resolve()
LOOPS = ("loop fp32", "loop fp16")
GOALS: dict[str, Callable[[int], float]] = {
    "bisect-nan": lambda _: 3.0,
    "bisect-nan, --spill": lambda _: 3.0,
    "bisect-nan, early": lambda steps: 3.0 * 2 / steps + 20.0 / steps,
    "bisect-nan, late": lambda steps: 3.0 + 20.0 / steps,
    "profile": lambda _: 1.3,
    "recommend": lambda _: 5.0,
}
"""Processor time over that of the fp32 loop of so many steps. Four traced steps of five plain ones each are 20 more.
The goal of `profile` is that of a further step: what it does once, a step for the formats and four shadow steps, comes
on top.
"""
GROWTH = {
    "steps": [("gpt2, 3 layers", steps) for steps in (2, 4, 8, 16)],
    "parameters": [(model, 4) for model in ("gpt2, 3 layers", "gpt2, 6 layers", "gpt2")],
    "length": [("gpt2, 3 layers" + tokens, 4) for tokens in ("", ", 256 tokens", ", 512 tokens")],
}
"""Models and numbers of steps that differ in one thing."""
MEMORY = 2.5
"""Peak memory over the loop's."""


def loop(model: str, steps: int, *, half: bool) -> None:
    """The training as one writes it by hand."""
    import torch

    from benchmarks.real_runs import make_run

    run = make_run(model=model, steps=steps)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    start = time.process_time()
    for batch in run.batches:
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            loss = run.loss(run.model, batch)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    say(start, "")


def diagnosis(command: str, model: str, steps: int, *, bad: int | None, spill: bool) -> None:
    """A command on the same training."""
    import ampdoctor
    from ampdoctor.cli.process import keep_freed_memory
    from benchmarks.real_runs import make_run

    arguments = {"model": model, "steps": steps, **({} if bad is None else {"bad": bad})}
    forbid_training_and_writes = 0.0

    def factory(**given: Any) -> Any:
        nonlocal forbid_training_and_writes
        begun = time.process_time()
        try:
            return make_run(**given)
        finally:
            forbid_training_and_writes += time.process_time() - begun

    if not spill:
        keep_freed_memory()  # as the command line does
    start = time.process_time()
    workflow = getattr(ampdoctor, command.replace("-", "_"))
    report = workflow(ampdoctor.ReplayRequest(factory=factory, arguments=arguments, steps=steps, spill=spill))
    where = report.findings[0].where if report.findings else None
    said = report.verdict if where is None else f"{report.verdict}, step {where.step}, {where.op}"
    say(start + forbid_training_and_writes, said)


def say(start: float, said: str) -> None:
    """What a cell has cost, as a line of JSON."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": time.process_time() - start, "peak": peak, "said": said}))


def cell(name: str, model: str, steps: int) -> None:
    """Run one cell in this process."""
    if name in LOOPS:
        loop(model, steps, half=name == "loop fp16")
        return
    command, *how = name.split(", ")
    bad = 1 if "early" in how else steps - 1 if "late" in how else None
    diagnosis(command, model, steps, bad=bad, spill="--spill" in how)


def measured(name: str, model: str, steps: int, threads: int) -> dict[str, Any]:
    """Run a cell in a process of its own; what it says, with the elapsed time."""
    command = [sys.executable, str(HERE), "--cell", name, "--model", model, "--steps", str(steps), "--here"]
    start = time.monotonic()
    done = subprocess.run(
        command,
        # waiting threads sleep, as the command line lets them
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"seconds": math.nan, "peak": math.nan, "said": f"failed: {done.stderr.strip()[-200:]}", "elapsed": 0.0}
    return {**json.loads(done.stdout.splitlines()[-1]), "elapsed": time.monotonic() - start}


def table(model: str, steps: int, cells: list[str], threads: int) -> None:
    """Measure and print one model."""
    print(f"\n{model}, {steps} steps, {threads} thread{'s' if threads > 1 else ''}", flush=True)
    base = measured(LOOPS[0], model, steps, threads)
    for name in (LOOPS[0], *cells):
        found = base if name == LOOPS[0] else measured(name, model, steps, threads)
        ratio, memory = found["seconds"] / base["seconds"], found["peak"] / base["peak"]
        goal = GOALS.get(name)
        against = "" if goal is None else f" (goal {goal(steps):.1f}, {MEMORY})"
        print(
            f"  {name:18} {found['seconds']:7.1f} s  {found['elapsed']:6.1f} elapsed  {found['peak'] / 1e9:5.2f} GB  "
            f"time x {ratio:5.2f}  memory x {memory:4.2f}{against}  {found['said']}",
            flush=True,
        )


def growth(what: str, threads: int) -> None:
    """Measure how a diagnosis and its loop grow with one thing."""
    sizes = GROWTH[what]
    print(f"\nwith {what}: {', '.join(f'{model}, {steps} steps' for model, steps in sizes)}", flush=True)
    base: list[dict[str, Any]] = []
    for name in (LOOPS[0], "bisect-nan", "profile"):
        found = [measured(name, model, steps, threads) for model, steps in sizes]
        base = base or found
        costs = (f"{one['seconds']:.1f} s {one['peak'] / 1e9:.2f} GB" for one in found)
        ratios = (
            f"x {one['seconds'] / loop['seconds']:.2f}, {one['peak'] / loop['peak']:.2f}"
            for one, loop in zip(found, base, strict=True)
        )
        print(f"  {name:12} {' | '.join(costs)}   {'' if found is base else ' | '.join(ratios)}", flush=True)


def main() -> int:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="of real_runs.KINDS; may be repeated [default: all]")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cell", action="append", help="; may be repeated [default: all but `loop fp16`]")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grow", action="append", choices=GROWTH, help="how costs grow with it; may be repeated")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        cell(options.cell[0], options.model[0], options.steps)
        return 0
    if options.grow:
        for what in options.grow:
            growth(what, options.threads)
        return 0
    names = options.model or ["gpt2", "t5-base", "vit-b16", "resnet50", "hubert-base", "llama-160m"]
    for model in names:
        table(model, options.steps, options.cell or list(GOALS), options.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
