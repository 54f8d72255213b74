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
from pathlib import Path

import torch
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from ampdoctor.hooks.process_state import RandomState
from ampdoctor.precision.cuda_autocast import autocast_policy
from ampdoctor.precision.fake_gpu.emulate import emulate_cuda
from ampdoctor.precision.fp16_matmul import half_products
from ampdoctor.replay.snapshot import process_settings
from ampdoctor.workflows.open_replay import seed_all

LOOPS = Path(__file__).parents[2] / "fixtures" / "loops"


class Enough(BaseException):
    """As many backwards as were asked for are recorded."""


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of a tensor's dtype, shape and bytes."""
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(dense.view(torch.uint8).numpy(), zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode()))


@contextlib.contextmanager
def recording(most: int | None = None) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Record every backward inside: its loss before the scale, and a checksum of each tensor that entered a model.

    A run that is ended with the last backward that was asked for (`most`) ends the region.
    """
    seen, entered, inside, scaled = [], [], [], []
    scale, backward = torch.amp.GradScaler.scale, torch.Tensor.backward

    def enter(module, inputs):
        if not inside and next(module.parameters(), None) is not None:  # a loss without parameters is no model
            entered.extend(checksum(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        inside.append(module)

    def leave(module, _inputs, _output):
        while inside and inside.pop() is not module:
            pass

    def noted_scale(scaler, outputs):
        result = scale(scaler, outputs)
        scaled[:] = [(result, float(outputs.detach()))]
        return result

    def noted_backward(tensor, *args, **kwargs):
        before = [loss for result, loss in scaled if result is tensor]
        loss = before[0] if before else float(tensor.detach())
        seen.append((loss.hex(), tuple(entered)))
        entered.clear()
        scaled.clear()
        if len(seen) == most:
            raise Enough
        return backward(tensor, *args, **kwargs)

    entering = hooks.register_module_forward_pre_hook(enter)
    leaving = hooks.register_module_forward_hook(leave, always_call=True)
    torch.amp.GradScaler.scale, torch.Tensor.backward = noted_scale, noted_backward
    try:
        with contextlib.suppress(Enough):
            yield seen
    finally:
        torch.amp.GradScaler.scale, torch.Tensor.backward = scale, backward
        entering.remove()
        leaving.remove()


@contextlib.contextmanager
def machine(policy: str) -> Iterator[None]:
    """The machine that a replay makes, on a CPU; random numbers and torch's switches are as before afterwards."""
    with contextlib.ExitStack() as stack:
        stack.callback(RandomState.capture().restore)
        stack.callback(process_settings())
        stack.enter_context(autocast_policy(policy))
        if policy == "cuda":
            stack.enter_context(half_products())
        seed_all()
        stack.enter_context(emulate_cuda(reports_cuda=policy == "cuda"))
        yield


def run_bare(script: Path, arguments: Sequence[str], policy: str, folder: Path, most: int) -> list:
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
    return record
