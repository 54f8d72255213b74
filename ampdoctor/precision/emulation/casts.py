"""CUDA's cast policies as kernels for the CPU's autocast key.

Each kernel excludes the autocast key while its op runs, as the C++ wrappers of `ATen/autocast_mode.h` do: what an op
calls inside is not cast again. Eligible is a floating CPU tensor that is not fp64 (`is_eligible` there).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.precision.emulation import policy_ops
from ampdoctor.precision.emulation.overlay import Kernel
from ampdoctor.precision.emulation.torch_internals import AUTOCAST, Excluded, cast_on_cuda, overload, registered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_KEY = "AutocastCPU"

BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: CUDA autocast refuses them. "
    "Leave the sigmoid out and use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, "
    "which are safe."
)


class WeightCache:
    """Casts of leaf parameters, kept until the outermost autocast region ends, as `cached_cast` keeps them.

    The cache is more than speed: a weight used twice in one region has one half copy, whose gradient is summed in half
    before it is cast back. The CPU's own kernels have theirs in C++; this one serves the ops that the CPU lacks.
    """

    __slots__ = ("_local",)

    def __init__(self) -> None:
        self._local = threading.local()  # autocast regions belong to a thread

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`tensor` in `dtype`, from the cache where it is an fp32 leaf that requires a gradient."""
        if not (
            tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()  # noqa: SLF001 - no public name
            and torch.is_autocast_cache_enabled()
            and torch.is_grad_enabled()
        ):
            return tensor.to(dtype)
        entries: dict[int, tuple[Tensor, Tensor]] = self._local.__dict__.setdefault("entries", {})
        found = entries.get(id(tensor))
        if found is None or found[1].dtype is not dtype:
            # The parameter is held beside its cast: its id cannot be reused while the entry lives.
            found = entries[id(tensor)] = (tensor, tensor.to(dtype))
        return found[1]

    def clear(self) -> None:
        """Forget this thread's casts."""
        self._local.__dict__.pop("entries", None)


def _eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "cpu"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and _eligible(value) else value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype) for item in value]
    return value


def _lower_precision(name: str, cache: WeightCache, always: torch.dtype | None = None) -> Callable[..., Any]:
    """Returns a kernel that casts to autocast's dtype, or to one that the op always has."""
    op = overload(name)

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return cache.cast(value, dtype) if value.dtype is not dtype and _eligible(value) else value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [cast(item, dtype) for item in value]
        return value

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = always or torch.get_autocast_dtype("cpu")
        with Excluded(AUTOCAST):
            return op(*[cast(arg, dtype) for arg in args], **{key: cast(arg, dtype) for key, arg in kwargs.items()})

    return kernel


def _fp32(name: str) -> Callable[..., Any]:
    op = overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with Excluded(AUTOCAST):
            return op(
                *[_cast(arg, torch.float32) for arg in args],
                **{key: _cast(arg, torch.float32) for key, arg in kwargs.items()},
            )

    return kernel


def _fp32_set_opt_dtype(name: str) -> Callable[..., Any]:
    op = overload(name)
    arguments = [argument.name for argument in op._schema.arguments]  # noqa: SLF001 - no public schema
    position = arguments.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with Excluded(AUTOCAST):
            if _eligible(args[0]):
                if len(args) > position:
                    if args[position] is None:
                        args = (*args[:position], torch.float32, *args[position + 1 :])
                elif kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return kernel


def _out_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if _eligible(tensor) else tensor.dtype


def _norm_scalar(self: Tensor, p: float = 2) -> Any:
    with Excluded(AUTOCAST):
        return torch.ops.aten.norm.ScalarOpt_dtype(self, p, dtype=_out_dtype(self))


def _norm_scalar_opt_dim(self: Tensor, p: float | None, dim: list[int], keepdim: bool = False) -> Any:  # noqa: FBT001, FBT002 - the op's signature
    with Excluded(AUTOCAST):
        return torch.ops.aten.norm.ScalarOpt_dim_dtype(self, p, dim, keepdim, dtype=_out_dtype(self))


_APPEND_DTYPE: dict[str, Callable[..., Any]] = {
    "norm.Scalar": _norm_scalar,
    "norm.ScalarOpt_dim": _norm_scalar_opt_dim,
}


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value


def _widest(args: tuple[Any, ...]) -> torch.dtype:
    """`promote_type` of the header: fp32 beats autocast's dtype, fp64 is ignored, anything else is an error."""
    lower = widest = torch.get_autocast_dtype("cpu")
    for tensor in _tensors(args):
        if not _eligible(tensor):
            continue
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype is not lower:
            raise RuntimeError(
                f"Unexpected floating ScalarType in autocast's promotion: {tensor.dtype} while autocast's is {lower}"
            )
    return widest


def _promote(name: str) -> Callable[..., Any]:
    op = overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _widest((*args, *kwargs.values()))
        with Excluded(AUTOCAST):
            return op(
                *[_cast(arg, dtype) if isinstance(arg, torch.Tensor) else arg for arg in args],
                **{key: _cast(arg, dtype) if isinstance(arg, torch.Tensor) else arg for key, arg in kwargs.items()},
            )

    return kernel


def _banned(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(BANNED_MESSAGE)


def policy_kernels(cache: WeightCache) -> list[Kernel]:
    """The kernels that make the CPU's autocast key behave as CUDA's.

    Args:
        cache: Where casts of leaf parameters are kept.
    """
    kernels = []
    cast, own = cast_on_cuda(), registered(_KEY)
    for name in sorted(cast - (policy_ops.SAME_ON_CPU & own)):
        if name in policy_ops.LOWER_PRECISION:
            fn = _lower_precision(name, cache)
        elif name in policy_ops.RECURRENT:
            fn = _lower_precision(name, cache, torch.float16)
        elif name in policy_ops.FP32:
            fn = _fp32(name)
        elif name in policy_ops.FP32_SET_OPT_DTYPE:
            fn = _fp32_set_opt_dtype(name)
        elif name in policy_ops.FP32_APPEND_DTYPE:
            fn = _APPEND_DTYPE[name]
        elif name in policy_ops.PROMOTE:
            fn = _promote(name)
        else:
            fn = _banned
        kernels.append(Kernel(name, _KEY, fn))
    kernels += [Kernel(name, _KEY, torch.library.fallthrough_kernel) for name in sorted(own - cast)]
    return kernels
