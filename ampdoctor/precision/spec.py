"""The precision that a run computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn

from ampdoctor.errors import UsageError
from ampdoctor.hooks import torch_internals
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.precision import kernels
from ampdoctor.precision.tf32 import tf32

Compute = Literal["fp32", "tf32", "bf16", "fp16"]  # what matrix products compute in

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a run; raises UsageError for an unknown or unsupported one, or a contradiction."""

    compute: Compute
    autocast: bool = True  # fp32 parameters, ops cast by autocast's policy; else model and batches are half themselves
    master_weights: bool = False  # half parameters are stepped through fp32 copies; only without autocast

    def __post_init__(self) -> None:
        compute: str = self.compute  # may be any string of a command line
        if compute == "fp8":
            raise UsageError("precision fp8 is not built yet: choose fp32, tf32, bf16 or fp16")
        if compute not in get_args(Compute):
            raise UsageError(f"no precision is called {compute!r}: choose fp32, tf32, bf16 or fp16")
        if self.master_weights and self.autocast:
            raise UsageError("master weights belong to a half model: set autocast to False with them")
        if self.master_weights and not self.reduced:
            raise UsageError(f"master weights belong to a half model, not to {self.compute}")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that products compute in: float16, bfloat16, or float32 (TF32's container too)."""
        return _DTYPES[self.compute]

    @property
    def reduced(self) -> bool:
        """Whether this is fp16 or bf16."""
        return self.dtype is not torch.float32

    def context(self, device_type: str) -> Callable[[], AbstractContextManager[None]]:
        """What a step calls as `autocast()`: a factory of context managers around forward and loss."""
        if self.reduced and self.autocast:
            return lambda: torch.autocast(device_type, dtype=self.dtype)
        return nullcontext

    def environment(self, device_type: str) -> AbstractContextManager[None]:
        """The context of the whole replay: TF32's products, by torch's switches on CUDA, by rounding on a CPU."""
        if device_type != "cuda":
            return tf32() if self.compute == "tf32" else nullcontext()
        return _cuda_switches(allowed=self.compute == "tf32") if not self.reduced else nullcontext()


@contextmanager
def _cuda_switches(*, allowed: bool) -> Iterator[None]:
    """Torch's TF32 switches, on for tf32 and off for fp32 (cuDNN's is on by default)."""
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# -- facts about torch and its devices --


def torch_shims() -> dict[str, str]:
    """Replacements for what this torch lacks, and measured differences: short names, each with a sentence."""
    shims = {**torch_internals.shims(), **kernels.shims()}
    if FORMATS["e4m3fn"].overflow_result == "nan":
        shims["e4m3fn-overflows-to-nan"] = "A cast to float8_e4m3fn makes NaN of what is beyond its range (measured)."
    return shims


def torch_facts() -> dict[str, Any]:
    """The build of torch, its threads, and the replacements for what it lacks."""
    return {
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_shims": [f"{name}: {sentence}" for name, sentence in torch_shims().items()],
    }


def device_facts() -> dict[str, Any]:
    """The GPUs; this initialises CUDA, after which a forked process cannot use it."""
    if not torch.cuda.is_available():
        return {"cuda_available": False}
    return {
        "cuda_available": True,
        "cudnn": torch.backends.cudnn.version(),
        "devices": [
            "{0}, compute capability {1[0]}.{1[1]}".format(
                torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            )
            for index in range(torch.cuda.device_count())
        ],
    }


# -- linear layers that a library computes in FP8 or fewer bits --

_LIBRARIES = frozenset({"torchao"})  # their nn.Linear subclasses quantise, but keep weight and bias as nn.Linear does


@contextmanager
def as_plain_linears(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, such layers compute `x @ weight.T + bias` in their weights' own format, without quantisation."""
    with ExitStack() as stack:
        for module in modules:
            library = type(module).__module__.partition(".")[0]
            if isinstance(module, nn.Linear) and library in _LIBRARIES and "forward" not in vars(module):
                module.forward = MethodType(nn.Linear.forward, module)  # type: ignore[method-assign]  # for a while
                stack.callback(vars(module).pop, "forward", None)
        yield
