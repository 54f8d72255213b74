"""Private names of torch that precision stands on, and what stands in for what an older torch lacks.

| name | since | without it |
| --- | --- | --- |
| `_C._dispatch_get_registrations_for_dispatch_key` | 1.12 | no list of what is cast on CUDA: nothing can be emulated |
| `_C._ExcludeDispatchKeyGuard`, `_C.DispatchKeySet` | 1.12, 1.13 | as above |
| `library.get_kernel` (public) | 2.9 | `kernels-by-overload`: an op's other overloads do its work |
| `_C._set_mkldnn_enabled` | 2.0 | needed only without `get_kernel` |
| `utils._device._device_constructors` | 2.0 | `device=` of factories cannot be redirected: nothing can be emulated |
| `jit._builtins` | 1.4 | a script that names a redirected factory fails to compile |
| `amp.autocast_mode._cast` | 1.6 | `custom_fwd(cast_inputs=...)` does not cast under emulation |
| `_dynamo.config.skip_nnmodule_hook_guards` | 2.1 | the hooks are always guarded |
| `_compile._disable_dynamo` | 2.1 | `torch.compiler.disable` does it, and imports the compiler |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo as outside_graphs
from torch.utils import _device

from ampdoctor.precision.emulation import policy_ops

__all__ = ["outside_graphs"]

Excluded = torch._C._ExcludeDispatchKeyGuard
"""Context in which dispatch keys are passed over."""
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

CUSTOM_FWD_CAST = "_cast"
"""Of `torch.amp.autocast_mode`: what `custom_fwd` casts inputs with."""

_UNSIZED = frozenset({"rrelu_with_noise"})
"""Writes into a given result without bringing it to size first, beyond its end."""

BoxedKernel = Callable[..., Any]
"""Takes the dispatch key set and the op's arguments."""


def overload(name: str) -> torch._ops.OpOverload:
    """The overload called `name` ("exp", "sum.dim_IntList").

    Raises:
        AttributeError: This build of torch has no such op.
    """
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
    """The ops that this build of torch casts on CUDA: of those that are known here no other may be cast.

    Read before anything is laid over them. CPU builds have CUDA's registrations as well.
    """
    return policy_ops.ALL & (registered("AutocastCUDA") | policy_ops.RECURRENT)


def kernel_of(name: str, key: str) -> BoxedKernel | None:
    """The kernel that an op has for a dispatch key, to be called when another is laid over it.

    From torch 2.9 on `torch.library.get_kernel` hands it out. Before that another overload has to do its work, one that
    does not come back to the op: what a composite op is composed of, or the overload that writes into a given result.

    Args:
        name: The op ("mm", "addmm_", "fft_rfft").
        key: "CPU" or "AutogradCPU".

    Returns:
        None where there is no such overload (`mkldnn_rnn_layer` before 2.9).
    """
    if lends_kernels():
        boxed: BoxedKernel = torch.library.get_kernel(f"aten::{name}", key).call_boxed
        return boxed
    composite = _composite(name)
    return composite if composite is not None else _writing(name)


def lends_kernels() -> bool:
    """Whether torch hands out the kernels that others are laid over (2.9)."""
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
        size = first.shape if name in _UNSIZED else (0,)
        made = [first] if name.endswith("_") else [first.new_empty(size, dtype=dtype) for _ in outputs]
        with torch._C.DisableTorchFunction():  # a mode would take it for an op of the program's
            return op(*args, **kwargs, **dict(zip(outputs, made, strict=True)))

    return kernel


@contextmanager
def without_mkldnn() -> Iterator[None]:
    """Layers are computed by ATen's own ops; `torch.backends.mkldnn.flags` would set, and warn of, more than that."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def device_constructors() -> Any:
    """The functions of torch that make tensors and take a device."""
    return _device._device_constructors()  # fills torch's cache


DeviceContext = _device.DeviceContext


def known_to_scripts(replacement: Any, original: Any) -> None:
    """Let TorchScript, where there is one, call `original` for a `replacement` of it, which it cannot compile."""
    try:
        from torch.jit import _builtins
    except ImportError:
        return
    builtin = _builtins._find_builtin(original)
    if builtin is not None:
        _builtins._register_builtin(replacement, builtin)


def let_compile_see_hooks() -> None:
    """Let `torch.compile` tell modules with hooks from those without, for the rest of the process.

    By default its guards skip hooks, and where a graph is broken, what was compiled for one block runs for the next,
    be that one an island or not.
    """
    from torch._dynamo import config  # every torch optimizer has imported it already

    if hasattr(config, "skip_nnmodule_hook_guards"):
        config.skip_nnmodule_hook_guards = False


def shims() -> dict[str, str]:
    """What this torch does otherwise than the one that is known here, by a short name, each with a sentence."""
    found: dict[str, str] = {}
    if not lends_kernels():
        found["slow-half-products"] = "fp16 products on a CPU run in its own kernels, tens of times slower than fp32."
        found["kernels-by-overload"] = (
            "Missing half kernels and TF32 stand on other overloads of the ops; recurrent layers multiply in TF32 by "
            "their matrix products."
        )
    lacks = policy_ops.ALL - policy_ops.LATER - cast_on_cuda()
    if lacks:
        found["fewer-cuda-casts"] = f"CUDA's autocast of this torch does not cast {', '.join(sorted(lacks))}."
    more = registered("AutocastCUDA") - policy_ops.ALL - policy_ops.CUDNN_ONLY - policy_ops.NAMED
    if more:
        found["unknown-cuda-casts"] = (
            f"CUDA's autocast of this torch casts {', '.join(sorted(more))}, and how is not known here: in a replay "
            "they are not cast."
        )
    return found
