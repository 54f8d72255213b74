"""The precision that a run computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampdoctor.errors import UsageError
from ampdoctor.hooks import torch_internals
from ampdoctor.numerics.formats import FORMATS
from ampdoctor.precision import kernels
from ampdoctor.precision.kernels import Kernel, SharedOverlay, kernel_of

# -- TF32 on a CPU, where torch's switches do nothing --
#
# A tensor core rounds fp32 operands to 10 mantissa bits and accumulates in fp32. `tf32()` rounds the operands of matrix
# products and convolutions like that, below autograd, so that the products of a backward pass are included.

_DROPPED_BITS: Final = 13  # fp32 has 23 mantissa bits, TF32 10
_MASK: Final = -(1 << _DROPPED_BITS)

OPERANDS: Final = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "_addmm_activation": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "addbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "mkldnn_rnn_layer": (0, 1, 2),
    "mkldnn_rnn_layer_backward": (0, 1, 2),
}  # ops that use tensor cores, and which arguments are factors (a bias or an accumulator stays fp32)


def round_to_tf32(tensor: Tensor) -> Tensor:
    """Round an fp32 tensor to TF32's 10 mantissa bits, ties to even, without gradient; TypeError for another dtype.

    The exponent range is fp32's: subnormals keep their spacing of 2^-136, a value beyond TF32's largest finite one
    becomes infinite, NaN and Inf stay.
    """
    if tensor.dtype is not torch.float32:
        raise TypeError(f"round_to_tf32 takes float32, not {tensor.dtype}")
    source = tensor.detach()
    bits = source.contiguous().view(torch.int32)
    tie = (bits >> _DROPPED_BITS) & 1
    rounded = ((bits + ((1 << (_DROPPED_BITS - 1)) - 1) + tie) & _MASK).view(torch.float32)
    # Adding to a NaN's mantissa could carry into the exponent, or the sign.
    return torch.where(source.isnan(), source, rounded)


def _kernel(name: str, positions: tuple[int, ...]) -> Kernel | None:
    original = kernel_of(name, "CPU")
    if original is None:
        return None

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        rounded = [
            round_to_tf32(arg)
            if i in positions and isinstance(arg, torch.Tensor) and arg.dtype is torch.float32 and not arg.is_sparse
            else arg
            for i, arg in enumerate(args)
        ]
        return original(keyset, *rounded, **kwargs)

    return Kernel(name, "CPU", kernel, with_keyset=True)


_SHARED = SharedOverlay(lambda: (_kernel(name, positions) for name, positions in OPERANDS.items()))


@contextmanager
def tf32() -> Iterator[None]:
    """Run fp32 matrix products and convolutions on the CPU as TF32, forward and backward, in every thread.

    The backward pass must run inside too. Attention is computed by its matrix products, since the fused kernel hides
    the second one's operand. Matrix-vector products stay fp32, as in cuBLAS, which uses no tensor cores for them. On a
    torch without `get_kernel`, recurrent layers stay fp32.
    """
    with _SHARED.region(), sdpa_kernel(SDPBackend.MATH):
        yield


# -- the precision of a run --

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
