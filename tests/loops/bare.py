"""Runs a training script in a process of its own and writes down how it ended: bare, or under `ampdoctor run`.

    python tests/loops/bare.py --policy cuda --out result.json fixtures/loops/gan.py --niter 1
    python tests/loops/bare.py --under-run --policy cuda --out result.json fixtures/loops/gan.py --niter 1

The same measuring surrounds both, so that two results are held against each other. It sees the script through torch's
global hooks, which leave no frame of ours in a traceback; `GradScaler.step` alone is wrapped, for a step that a scaler
skips is seen by no hook.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import runpy
import shlex
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # as a test would import it, and nothing of this folder by its short name

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.modules import module as hooks  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402

from tests.arithmetic import ALIKE  # noqa: E402
from tests.loops.recorder import checksum, machine  # noqa: E402


@dataclass(slots=True, kw_only=True)
class Watched:
    """What hooks have seen of a training; `skipped`: attempts of each optimizer in which a scaler found an overflow."""

    stepped: list[torch.optim.Optimizer] = field(default_factory=list)  # in order of their first steps
    attempted: list[int] = field(default_factory=list)  # of each, those that a scaler skipped included
    skipped: list[list[int]] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    models: list[torch.nn.Module] = field(default_factory=list)  # called from outside all others, with parameters
    _inside: list[torch.nn.Module] = field(default_factory=list)
    _scaling: bool = False

    def enter(self, module: torch.nn.Module, _inputs: object) -> None:
        """Note a model; a loss without parameters is none."""
        if not self._inside and is_looked_at():
            return
        outermost = not self._inside and next(module.parameters(), None) is not None
        if outermost and not any(module is model for model in self.models):
            self.models.append(module)
        self._inside.append(module)

    def leave(self, module: torch.nn.Module, _inputs: object, _output: object) -> None:
        """Forget the module that is left, and those inside it that an exception ended."""
        while self._inside and self._inside.pop() is not module:
            pass

    def place(self, optimizer: torch.optim.Optimizer) -> int:
        """An optimizer's index, which it has from its first step on."""
        for index, known in enumerate(self.stepped):
            if known is optimizer:
                return index
        self.stepped.append(optimizer)
        self.attempted.append(0)
        self.skipped.append([])
        return len(self.stepped) - 1

    def steps(self, optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
        """Note that an optimizer steps; through a scaler, that attempt is counted already."""
        if is_looked_at():
            return
        self.attempted[self.place(optimizer)] += not self._scaling

    def result(self) -> dict[str, object]:
        """How the training stands, in numbers that are equal only where all bits are."""
        random_states = {
            "torch": zlib.crc32(torch.get_rng_state().numpy()),
            "numpy": zlib.crc32(pickle.dumps(np.random.get_state())),  # noqa: NPY002 - what user code draws from
            "python": zlib.crc32(pickle.dumps(random.getstate())),
        }
        tensors = [tensor for model in self.models for tensor in (*model.parameters(), *model.buffers())]
        held = [tensor for optimizer in self.stepped for tensor in tensors_of(optimizer)]
        return {
            "weights": checksums(tensors + [tensor for group, tensor in held if group == "params"]),
            "finite": all(bool(tensor.isfinite().all()) for tensor in tensors),
            "optimizers": checksums([tensor for group, tensor in held if group != "params"]),
            "scalers": [scaler.state_dict() for scaler in self.scalers],
            "random": random_states,
            "attempted": self.attempted,
            "skipped": self.skipped,
        }


def is_looked_at() -> bool:
    """Whether what runs is a look at a step, in which `ampdoctor run` runs it again, and not the loop."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("ampdoctor/workflows/diagnose_step.py"):
            return True
        frame = frame.f_back
    return False


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """An optimizer's weights as "params", and each tensor or number of its state by its name."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        yield "params", parameter
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is not None:
                yield name, torch.as_tensor(value)
    for group in optimizer.param_groups:
        for name, value in sorted(group.items()):
            if isinstance(value, (int, float, torch.Tensor)):
                yield f"group.{name}", torch.as_tensor(value, dtype=torch.float64)


def checksums(tensors: Sequence[torch.Tensor]) -> int:
    """The CRC-32 of several tensors' checksums, in order."""
    return zlib.crc32(b"".join(checksum(tensor).to_bytes(4, "little") for tensor in tensors))


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Watch whatever is trained inside."""
    watched = Watched()
    step = torch.amp.GradScaler.step

    def noted(scaler, optimizer, *args, **kwargs):
        if is_looked_at() or not scaler.is_enabled():
            return step(scaler, optimizer, *args, **kwargs)
        index = watched.place(optimizer)
        if not any(scaler is known for known in watched.scalers):
            watched.scalers.append(scaler)
        watched.attempted[index] += 1
        watched._scaling = True
        try:
            return step(scaler, optimizer, *args, **kwargs)
        finally:
            watched._scaling = False
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if any(float(infinite) for infinite in found.values()):
                watched.skipped[index].append(watched.attempted[index] - 1)

    handles = (
        hooks.register_module_forward_pre_hook(watched.enter),
        hooks.register_module_forward_hook(watched.leave, always_call=True),
        optimizers.register_optimizer_step_pre_hook(watched.steps),
    )
    torch.amp.GradScaler.step = noted
    try:
        yield watched
    finally:
        torch.amp.GradScaler.step = step
        for handle in handles:
            handle.remove()


def as_main(script: str, arguments: Sequence[str]) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` does, and return the process's exit code."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return ended(end)
    except Exception:  # noqa: BLE001 - whatever it is, Python prints it and ends with 1
        traceback.print_exc()
        return 1
    return 0


def under_run(options: Sequence[str]) -> Callable[[str, Sequence[str]], int]:
    """Return what runs a script as `ampdoctor run OPTIONS SCRIPT ARGUMENTS` does."""

    def run(script: str, arguments: Sequence[str]) -> int:
        from ampdoctor.cli.main import main

        try:
            return main(["run", *options, script, *arguments])
        except SystemExit as end:
            return ended(end)

    return run


def ended(end: SystemExit) -> int:
    """The exit code that Python makes of a `sys.exit`."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def measured(run: Callable[[str, Sequence[str]], int], script: str, arguments: Sequence[str], policy: str) -> dict:
    """Run a script on the machine that a replay makes, and return how it ended."""
    with machine(policy), watching() as watched:
        code = run(script, arguments)
        return {"exit_code": code, **watched.result()}


def run_in_process(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    *,
    policy: str = "cuda",
    run_options: Sequence[str] | None = None,
    python: str = sys.executable,
) -> tuple[dict, subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, and return how it ended and what it printed.

    `folder` is where it runs and writes; `run_options` are those of `ampdoctor run`, under which it is run.
    """
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    under = [] if run_options is None else ["--under-run", f"--run-options={shlex.join(run_options)}"]
    done = subprocess.run(
        [python, __file__, *under, "--policy", policy, "--out", str(out), str(script), *arguments],
        cwd=folder,
        env={**os.environ, **ALIKE},
        capture_output=True,
        text=True,
        check=False,
    )
    if not out.exists():
        raise AssertionError(f"{script.name} left no result, code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(out.read_text(encoding="utf-8")), done


def main() -> int:
    """Run what the command line says, and return the script's exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--under-run", action="store_true", help="run it under `ampdoctor run`")
    parser.add_argument("--run-options", default="", help="that command's own options, in one word")
    parser.add_argument("--policy", choices=("cuda", "native"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="where the result is written")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    out = asked.out.absolute()  # the script may go elsewhere
    run = under_run(shlex.split(asked.run_options)) if asked.under_run else as_main
    result = measured(run, str(Path(asked.script).absolute()), asked.arguments, asked.policy)
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result["exit_code"]


if __name__ == "__main__":
    raise SystemExit(main())
