"""Autocast policies: the CPU's own, and CUDA's on the CPU.

CUDA's and the CPU's autocast cast different ops (on the CPU `exp`, `softmax`, `layer_norm`, `sum` stay fp16; on CUDA
they run in fp32), so a plain CPU replay of a CUDA run fails elsewhere. Under `autocast_policy("cuda")` the CPU's
autocast key behaves as CUDA's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from ampdoctor.errors import UsageError
from ampdoctor.precision import kernels as policy_ops
from ampdoctor.precision.kernels import (
    AUTOCAST,
    LOCK,
    WIDE,
    Excluded,
    Kernel,
    Overlay,
    cast_on_cuda,
    kernel_of,
    narrowed,
    overload,
    registered,
    widened,
)

# -- CUDA's cast policies as kernels for the CPU's autocast key --
#
# Each kernel excludes the autocast key while its op runs, as the C++ wrappers of `ATen/autocast_mode.h` do: ops called
# inside are not cast again. Eligible is a floating CPU tensor that is not fp64 (`is_eligible` there).

_KEY = "AutocastCPU"

BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: CUDA autocast refuses them. "
    "Leave the sigmoid out and use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, "
    "which are safe."
)


class WeightCache:
    """Casts of leaf parameters, until the outermost region ends, as `cached_cast` keeps them: gradients sum in half."""

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
            # The parameter is held beside its cast, so that its id is not reused while the entry exists.
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


def _cast(value: Any, dtype: torch.dtype, to: Callable[[Tensor, torch.dtype], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return to(value, dtype) if value.dtype is not dtype and _eligible(value) else value
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return [_cast(item, dtype, to) for item in value]
    return value


def _casting(
    name: str, dtype_of: Callable[..., torch.dtype], to: Callable[[Tensor, torch.dtype], Tensor] = torch.Tensor.to
) -> Callable[..., Any]:
    """A kernel that casts all its arguments to the dtype that `dtype_of` returns for them."""
    op = overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of(*args, *kwargs.values())
        with Excluded(AUTOCAST):
            named = {key: _cast(arg, dtype, to) for key, arg in kwargs.items()}
            return op(*[_cast(arg, dtype, to) for arg in args], **named)

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


_APPEND_DTYPE: dict[str, Callable[..., Any]] = {"norm.Scalar": _norm_scalar, "norm.ScalarOpt_dim": _norm_scalar_opt_dim}


def _widest(*args: Any) -> torch.dtype:
    """`promote_type` of the header: fp32 beats autocast's dtype, fp64 is ignored, anything else is an error."""
    lower = widest = torch.get_autocast_dtype("cpu")
    for tensor in filter(_eligible, args):
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype is not lower:
            raise RuntimeError(
                f"Unexpected floating ScalarType in autocast's promotion: {tensor.dtype} while autocast's is {lower}"
            )
    return widest


def _banned(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(BANNED_MESSAGE)


def policy_kernels(cache: WeightCache) -> list[Kernel]:
    """The kernels that make the CPU's autocast key behave as CUDA's; `cache` keeps casts of leaf parameters."""
    kernels = []
    cast, own = cast_on_cuda(), registered(_KEY)
    for name in sorted(cast - (policy_ops.SAME_ON_CPU & own)):
        if name in policy_ops.LOWER_PRECISION:
            fn = _casting(name, lambda *_: torch.get_autocast_dtype("cpu"), cache.cast)
        elif name in policy_ops.RECURRENT:
            fn = _casting(name, lambda *_: torch.float16, cache.cast)
        elif name in policy_ops.FP32:
            fn = _casting(name, lambda *_: torch.float32)
        elif name in policy_ops.FP32_SET_OPT_DTYPE:
            fn = _fp32_set_opt_dtype(name)
        elif name in policy_ops.FP32_APPEND_DTYPE:
            fn = _APPEND_DTYPE[name]
        elif name in policy_ops.PROMOTE:
            fn = _casting(name, _widest)
        else:
            fn = _banned
        kernels.append(Kernel(name, _KEY, fn))
    kernels += [Kernel(name, _KEY, torch.library.fallthrough_kernel) for name in sorted(own - cast)]
    return kernels


# -- half kernels that CUDA has and the CPU lacks: the op runs in fp32 and its result is rounded to fp16 --
#
# These are ops that torch's own op database declares with float16 on CUDA, and that raise for it on the CPU, but not
# rrelu and the margin losses, which few train with. Ops without a half kernel on CUDA (cdist, pdist, quantile, linear
# algebra) still raise, as they would there.

LEAVES: Final = (
    "avg_pool3d",
    "avg_pool3d_backward",
    "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward",
    "_fft_r2c",
    "_fft_c2c",
    "_fft_c2r",
)  # ops with a kernel for the CPU key: replaced below autograd, so that forward and backward are both covered

COMPOSITES: Final = tuple(
    f"fft_{name}"
    for name in (
        *("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn", "irfft", "irfft2", "irfftn"),
        *("hfft", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn"),
    )
)  # ops that reject half before they reach a kernel: their inputs and results are cast above autograd


def _kernel(name: str, key: str, note: Callable[[str], None]) -> Kernel | None:
    original = kernel_of(name, key)
    if original is None:
        return None

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and arg.dtype in WIDE for arg in args):
            return original(keyset, *args, **kwargs)
        note(name)
        return narrowed(original(keyset, *map(widened, args), **{key: widened(arg) for key, arg in kwargs.items()}))

    return Kernel(name, key, kernel, with_keyset=True)


def half_kernels(note: Callable[[str], None]) -> list[Kernel | None]:
    """The kernels; `note` is called with an op's name each time that it runs in fp32 instead of half."""
    places = [(name, "CPU") for name in LEAVES] + [(name, key) for name in COMPOSITES for key in ("AutogradCPU", "CPU")]
    return [_kernel(name, key, note) for name, key in places]


PolicyName = Literal["cuda", "native"]  # `cuda`: CUDA's op lists on the CPU; `native`: the CPU's own


class AutocastPolicy:
    """A policy while it is in effect."""

    __slots__ = ("_emulated", "name")

    def __init__(self, name: PolicyName) -> None:
        self.name = name
        self._emulated: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each way in which the replay differs from a GPU."""
        return tuple(
            f"{op} has no half kernel on the CPU: it ran in fp32 and its result was rounded to fp16."
            for op in self._emulated
        )

    def _note(self, op: str) -> None:
        self._emulated.setdefault(f"aten.{op}")


class _Installed:
    """The stack of active policies, and the kernels that the top one needs."""

    def __init__(self) -> None:
        self.active: list[AutocastPolicy] = []
        self.cache = WeightCache()
        self.installed: ExitStack | None = None

    def enter(self, policy: AutocastPolicy) -> None:
        with LOCK:
            self.active.append(policy)
            self._settle()

    def leave(self, policy: AutocastPolicy) -> None:
        with LOCK:
            self.active.remove(policy)
            self._settle()

    def _settle(self) -> None:
        wanted = bool(self.active) and self.active[-1].name == "cuda"
        if wanted and self.installed is None:
            overlay = Overlay([*policy_kernels(self.cache), *half_kernels(self._note)])
            self.installed = ExitStack()
            self.installed.callback(overlay.remove)
            self.installed.callback(self.cache.clear)
            # torch.autocast clears the C++ weight cache with this call when its outermost region ends; ours must be
            # cleared then, too, and there is no other hook.
            self.installed.callback(setattr, torch, "clear_autocast_cache", torch.clear_autocast_cache)
            torch.clear_autocast_cache = self._clearing(torch.clear_autocast_cache)
        elif not wanted and self.installed is not None:
            self.installed.close()
            self.installed = None

    def _note(self, op: str) -> None:
        for policy in tuple(self.active):
            policy._note(op)  # noqa: SLF001 - its own class's keeper

    def _clearing(self, original: Callable[[], None]) -> Callable[[], None]:
        def clear_autocast_cache() -> None:
            self.cache.clear()
            original()

        return clear_autocast_cache


_INSTALLED = _Installed()


def policy_in_force() -> PolicyName:
    """The policy that autocast on the CPU follows now."""
    return _INSTALLED.active[-1].name if _INSTALLED.active else "native"


@contextmanager
def autocast_policy(name: PolicyName = "cuda") -> Iterator[AutocastPolicy]:
    """Make autocast on the CPU follow a policy: "cuda", or "native" for the CPU's own (also inside a region of "cuda").

    Kernels belong to the process: while one thread is inside, autocast in every thread follows the policy that was
    entered last and not yet left. Under "cuda", ops without a half kernel on the CPU run in fp32 and are rounded, with
    and without autocast. Raises UsageError for an unknown policy.
    """
    if name not in get_args(PolicyName):
        raise UsageError(f"no autocast policy is called {name!r}: choose cuda or native")
    policy = AutocastPolicy(name)
    _INSTALLED.enter(policy)
    try:
        yield policy
    finally:
        _INSTALLED.leave(policy)
