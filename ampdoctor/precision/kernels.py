"""Private names of torch that precision depends on, and replacements for what an older torch lacks.

| name | since | without it |
| --- | --- | --- |
| `_C._dispatch_get_registrations_for_dispatch_key` | 1.12 | no list of what is cast on CUDA: nothing can be emulated |
| `_C._ExcludeDispatchKeyGuard`, `_C.DispatchKeySet` | 1.12, 1.13 | as above |
| `library.get_kernel` (public) | 2.9 | `kernels-by-overload`: an op's other overloads do its work |
| `utils._device._device_constructors` | 2.0 | `device=` of factories cannot be redirected: nothing can be emulated |
| `jit._builtins` | 1.4 | a script that names a redirected factory fails to compile |
| `amp.autocast_mode._cast` | 1.6 | `custom_fwd(cast_inputs=...)` does not cast under emulation |
| `_dynamo.config.skip_nnmodule_hook_guards` | 2.1 | the hooks are always guarded |
| `_compile._disable_dynamo` | 2.1 | `torch.compiler.disable` does it, and imports the compiler |
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch._compile import _disable_dynamo as outside_graphs
from torch.utils import _device

# -- CUDA's autocast policy as data: which op is cast how --
#
# Source: the lists `AT_FORALL_*` of `ATen/autocast_mode.h` in torch 2.6 to 2.15, and for the recurrent networks
# `aten/src/ATen/native/cudnn/RNN.cpp`, which casts outside that header. A test compares them with the header and the
# registrations of the installed build, to detect a torch that moves an op. Ops that a build does not cast on CUDA are
# left out (`cast_on_cuda`).


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION: Final = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")  # every fp32 and half input is cast to autocast's dtype

RECURRENT: Final = _names("""
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
""")
"""Every fp32 and half input is cast to fp16, also where autocast's dtype is bf16: `ATen/cudnn/AutocastRNN.cpp` names
`kHalf` (an H100 with torch 2.11 answers so: fixtures/golden)."""

FP32: Final = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
""")  # every half input is cast to fp32

FP32_SET_OPT_DTYPE: Final = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")  # `dtype=torch.float32` is set where the caller gave none and the first input is eligible

FP32_APPEND_DTYPE: Final = _names("norm.Scalar norm.ScalarOpt_dim")  # redispatched to the overload that takes a dtype

PROMOTE: Final = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")  # every eligible input is cast to fp32 if one of them is fp32, else to autocast's dtype

BANNED: Final = _names("binary_cross_entropy")  # raises: with a half sigmoid before it the loss is not safe
CUDNN_ONLY: Final = _names("cudnn_convolution cudnn_convolution_transpose _cudnn_rnn")
"""Registered for CUDA's key, the last in CUDA builds only, and never called on a CPU tensor."""

NAMED: Final = _names("""
    cumprod.dimname cumsum.dimname log_softmax.Dimname softmax.Dimname prod.dim_Dimname sum.dim_DimnameList
    norm.names_ScalarOpt_dim
""")  # cast up to torch 2.12, and replayed as they are: no kernel in Python can take a named tensor

LATER: Final = _names("linalg_matrix_sqrth")  # new in torch 2.14

SAME_ON_CPU: Final = _names("""
    _convolution.deprecated addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mm prelu scaled_dot_product_attention
    binary_cross_entropy_with_logits cdist cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss linalg_matrix_sqrth
""")  # the CPU's own kernel does the same as CUDA's: it stays, with its speed and its weight cache

ALL: Final = LOWER_PRECISION | RECURRENT | FP32 | FP32_SET_OPT_DTYPE | FP32_APPEND_DTYPE | PROMOTE | BANNED
"""Every op of CUDA's policy."""

__all__ = ["outside_graphs"]
Excluded = torch._C._ExcludeDispatchKeyGuard  # context in which dispatch keys are skipped
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
CUSTOM_FWD_CAST = "_cast"  # in `torch.amp.autocast_mode`: the function that casts the inputs of `custom_fwd`
BoxedKernel = Callable[..., Any]  # takes the dispatch key set and the op's arguments


def overload(name: str) -> torch._ops.OpOverload:
    """The overload called `name` ("exp", "sum.dim_IntList"); raises AttributeError where this torch lacks it."""
    base, _, suffix = name.partition(".")
    found = getattr(getattr(torch.ops.aten, base), suffix or "default")
    if not isinstance(found, torch._ops.OpOverload):
        raise AttributeError(f"aten::{name} is not an operator overload")  # noqa: TRY004 - what getattr raises
    return found


def registered(key: str) -> frozenset[str]:
    """Names without the namespace of the aten ops that have a kernel for a dispatch key."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


@functools.cache
def cast_on_cuda() -> frozenset[str]:
    """The ops known here that this torch (also a CPU build) casts on CUDA; to be called before any overlay."""
    return ALL & (registered("AutocastCUDA") | RECURRENT)


def kernel_of(name: str, key: str) -> BoxedKernel | None:
    """The kernel of an op ("mm", "addmm_", "fft_rfft") for the key "CPU" or "AutogradCPU", to call from an overlay.

    Before torch 2.9 another overload that does not call the op itself; None where there is none (`mkldnn_rnn_layer`).
    """
    if lends_kernels():
        boxed: BoxedKernel = torch.library.get_kernel(f"aten::{name}", key).call_boxed
        return boxed
    composite = _composite(name)
    return composite if composite is not None else _writing(name)


def lends_kernels() -> bool:
    """Whether torch returns the kernels that an overlay replaces (2.9)."""
    return hasattr(torch.library, "get_kernel")


def _has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _composite(name: str) -> BoxedKernel | None:
    for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd"):
        if _has(name, key):
            run = functools.partial(overload(name)._op_dk, getattr(torch._C.DispatchKey, key))
            return lambda _keys, *args, **kwargs: run(*args, **kwargs)
    return None


def _writing(name: str) -> BoxedKernel | None:
    base = name.removesuffix("_")
    there = getattr(torch.ops.aten, base).overloads()
    wanted = (suffix for suffix in ("out", "grad_input", "output") if suffix in there)
    found = next((f"{base}.{suffix}" for suffix in wanted if _has(f"{base}.{suffix}", "CPU")), None)
    if found is None:
        return None
    op = overload(found)
    outputs = [argument.name for argument in op._schema.arguments if argument.is_out]
    to_real, to_complex = name == "_fft_c2r", name == "_fft_r2c"

    def kernel(_keys: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        dtype = first.dtype.to_complex() if to_complex else first.dtype.to_real() if to_real else first.dtype
        made = [first] if name.endswith("_") else [first.new_empty((0,), dtype=dtype) for _ in outputs]
        with torch._C.DisableTorchFunction():  # otherwise a mode would count it as an op of the program
            return op(*args, **kwargs, **dict(zip(outputs, made, strict=True)))

    return kernel


def device_constructors() -> Any:
    """The functions of torch that make tensors and take a device."""
    return _device._device_constructors()  # fills torch's cache


DeviceContext = _device.DeviceContext


def known_to_scripts(replacement: Any, original: Any) -> None:
    """Let TorchScript call `original` for its `replacement`, which it cannot compile."""
    from torch.jit import _builtins

    builtin = _builtins._find_builtin(original)
    if builtin is not None:
        _builtins._register_builtin(replacement, builtin)


def let_compile_see_hooks() -> None:
    """Make `torch.compile` distinguish modules with hooks, which its guards skip by default, for the whole process."""
    from torch._dynamo import config  # every torch optimizer has imported it already

    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


def shims() -> dict[str, str]:
    """Differences of this torch from the versions known here: short names, each with a sentence."""
    found: dict[str, str] = {}
    if not lends_kernels():
        found["slow-half-products"] = "fp16 products on a CPU run in its own kernels, tens of times slower than fp32."
        found["kernels-by-overload"] = (
            "Missing half kernels and TF32 stand on other overloads of the ops; recurrent layers stay fp32 where a CPU "
            "replays TF32."
        )
    lacks = ALL - LATER - cast_on_cuda()
    if lacks:
        found["fewer-cuda-casts"] = f"CUDA's autocast of this torch does not cast {', '.join(sorted(lacks))}."
    more = registered("AutocastCUDA") - ALL - CUDNN_ONLY - NAMED
    if more:
        found["unknown-cuda-casts"] = (
            f"CUDA's autocast of this torch casts {', '.join(sorted(more))}, and how is not known here: in a replay "
            "they are not cast."
        )
    return found


# -- temporary kernels in place of torch's own --
#
# One mechanism serves the autocast policy, the half kernels that the CPU lacks and TF32: `torch.library.Library` with
# the namespace `aten`. The dispatcher keeps the kernels of an (op, key) pair as a stack, so destroying the library
# restores exactly the previous kernel. Registrations belong to the process, not to a thread; owners therefore count
# their users and install once.

LOCK = threading.RLock()  # held while registrations change: every overlay of the process, one at a time


class Kernel(NamedTuple):
    """A kernel to register."""

    op: str  # without the namespace, with its overload ("sum.dim_IntList")
    key: str  # "AutocastCPU", "CPU", "AutogradCPU"
    fn: Callable[..., Any]  # `torch.library.fallthrough_kernel` skips the key
    with_keyset: bool = False  # `fn` takes the dispatch key set as its first argument


class Overlay:
    """Registered kernels (None: one that this torch does not lend); `remove()` restores the previous ones."""

    __slots__ = ("_library",)

    def __init__(self, kernels: Iterable[Kernel | None]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # The dispatcher warns that a kernel is overridden; here that is intended.
                warnings.simplefilter("ignore")
                for kernel in filter(None, kernels):
                    self._library.impl(kernel.op, kernel.fn, kernel.key, with_keyset=kernel.with_keyset)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the kernels; a second call does nothing."""
        self._library._destroy()


class SharedOverlay:
    """One overlay for the process, however many regions are open; the first one makes its kernels."""

    def __init__(self, kernels: Callable[[], Iterable[Kernel | None]]) -> None:
        self.used = False  # for the kernels to say so, since the outermost region was entered
        self._kernels = kernels
        self._users = 0
        self._overlay: Overlay | None = None

    @contextmanager
    def region(self) -> Iterator[None]:
        """Keep the kernels registered."""
        with LOCK:
            if self._overlay is None:
                self._overlay = Overlay(list(self._kernels()))  # all made before one is replaced
                self.used = False
            self._users += 1
        try:
            yield
        finally:
            with LOCK:
                self._users -= 1
                if self._users == 0 and self._overlay is not None:
                    self._overlay.remove()
                    self._overlay = None


WIDE: Final = {torch.float16: torch.float32, torch.complex32: torch.complex64}


def widened(value: Any) -> Any:
    """The value; a half tensor in fp32."""
    return value.to(WIDE[value.dtype]) if isinstance(value, torch.Tensor) and value.dtype in WIDE else value


def narrowed(value: Any) -> Any:
    """The value; an fp32 tensor in half, also in a tuple."""
    if isinstance(value, tuple):
        return tuple(narrowed(item) for item in value)
    if isinstance(value, torch.Tensor) and value.dtype is torch.complex64:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that ComplexHalf is experimental, on CUDA too
            return value.to(torch.complex32)
    return value.half() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value
