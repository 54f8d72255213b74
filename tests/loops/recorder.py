"""Runs a training script bare, as `python script.py` does, and records what it trains on.

The machine is the one that a replay makes (CUDA's casts, its names on the CPU, the first seeds), and nothing else of a
replay is there: what a replay of the same script records is held against it.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from ampdoctor.hooks.process_state import RandomState
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda
from ampdoctor.precision.fp16_matmul import half_products
from ampdoctor.replay.snapshot import ProcessState
from ampdoctor.workflows.open_replay import seed_all

LOOPS = Path(__file__).parents[2] / "fixtures" / "loops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """One backward of a training."""

    loss: float  # what it starts from, before the loss scale
    entered: tuple[int, ...]  # a checksum of each tensor that entered a model since the backward before, in order

    def __eq__(self, other: object) -> bool:
        """Equal bit by bit: a NaN is a NaN."""
        return isinstance(other, Backward) and (self.loss.hex(), self.entered) == (other.loss.hex(), other.entered)

    __hash__ = None


class Enough(BaseException):
    """As many backwards as were asked for are recorded."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """What has been recorded so far."""

    backwards: list[Backward] = field(default_factory=list)
    most: int | None = None  # with so many of them the run is ended
    _entered: list[int] = field(default_factory=list)
    _scaled: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    _inside: list[torch.nn.Module] = field(default_factory=list)

    def enter(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        """Note what enters the outermost module; a loss without parameters is none."""
        if not self._inside and next(module.parameters(), None) is not None:
            self._entered += [checksum(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._inside.append(module)

    def leave(self, module: torch.nn.Module, _inputs: object, _output: object) -> None:
        """Forget the module that is left, and those inside it that an exception ended."""
        while self._inside and self._inside.pop() is not module:
            pass

    def scaled(self, loss: torch.Tensor, result: torch.Tensor) -> None:
        """Note what a scaler made of a loss."""
        self._scaled = [(result, float(loss.detach()))]

    def backward(self, root: torch.Tensor) -> None:
        """Note a backward from `root`; raises Enough at the last one that was asked for."""
        before = [loss for scaled, loss in self._scaled if scaled is root]
        loss = before[0] if before else float(root.detach())
        self.backwards.append(Backward(loss=loss, entered=tuple(self._entered)))
        self._entered, self._scaled = [], []
        if len(self.backwards) == self.most:
            raise Enough


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of a tensor's dtype, shape and bytes."""
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(dense.view(torch.uint8).numpy(), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


@contextlib.contextmanager
def recording(most: int | None = None) -> Iterator[Recording]:
    """Record every backward inside; a run that is ended with the last one that was asked for ends the region."""
    record = Recording(most=most)
    scale, backward = torch.amp.GradScaler.scale, torch.Tensor.backward

    def noted_scale(scaler, outputs):
        result = scale(scaler, outputs)
        record.scaled(outputs, result)
        return result

    def noted_backward(tensor, *args, **kwargs):
        record.backward(tensor)
        return backward(tensor, *args, **kwargs)

    entering = hooks.register_module_forward_pre_hook(record.enter)
    leaving = hooks.register_module_forward_hook(record.leave, always_call=True)
    torch.amp.GradScaler.scale, torch.Tensor.backward = noted_scale, noted_backward
    try:
        with contextlib.suppress(Enough):
            yield record
    finally:
        torch.amp.GradScaler.scale, torch.Tensor.backward = scale, backward
        entering.remove()
        leaving.remove()


@contextlib.contextmanager
def machine(policy: str) -> Iterator[None]:
    """The machine that a replay makes, on a CPU; random numbers and torch's switches are as before afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(RandomState.capture().restore)
        stack.callback(ProcessState().restore)
        stack.enter_context(autocast_policy(policy))
        if policy == "cuda":
            stack.enter_context(half_products())
        seed_all()
        stack.enter_context(emulate_cuda(reports_cuda=policy == "cuda"))
        yield


def run_bare(script: Path, arguments: Sequence[str], policy: str, folder: Path, most: int) -> list[Backward]:
    """Run a script as `python script.py ARGUMENTS` in a folder, and return its first `most` backwards."""
    argv, path = sys.argv, list(sys.path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(machine(policy))
        record = stack.enter_context(recording(most))
        sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *path]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv, sys.path = argv, path
    return record.backwards
