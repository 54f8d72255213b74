"""Requests for a CUDA device, answered on the CPU: the part of `emulate_cuda` about devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampdoctor.precision.fake_gpu.replace import Replacements
from ampdoctor.precision.kernels import DeviceContext, device_constructors, known_to_scripts

_LIKE: Final = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda(device: object) -> bool:
    """Whether a device argument means a CUDA device: "cuda", "cuda:1", a torch.device, or a bare index."""
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


ANSWERED: Final = torch.device("cuda", 0)  # reported by CPU tensors; passed on (`device=x.device`), it requests no CUDA


class DeviceRedirection:
    """The replaced functions that take a device; `note` is called each time that a CUDA device is requested."""

    __slots__ = ("_active", "_note")

    def __init__(self, active: Callable[[], bool], note: Callable[[], None]) -> None:
        self._active = active
        self._note = note

    def redirect(self, device: Any) -> Any:
        """The CPU for a CUDA device, with the one note; anything else unchanged."""
        if self._active() and is_cuda(device):
            if device is not ANSWERED:
                self._note()
            return torch.device("cpu")
        return device

    def declare(self, replacements: Replacements) -> None:
        replace = replacements.want
        for name in (*_factory_names(), *_LIKE):
            replace(torch, name, self._factory)
        for name in _NEW:
            replace(torch.Tensor, name, self._factory)
        replace(torch.Tensor, "to", self._to)
        # Module.to parses its arguments in C++ before it reaches the tensors, and rejects a bare index there.
        replace(torch.nn.Module, "to", self._to)
        replace(torch.Tensor, "cuda", self._cuda)
        for name in ("pin_memory", "record_stream"):
            replace(torch.Tensor, name, self._stay)
        for storage in (torch.UntypedStorage, torch.TypedStorage):  # `map_location=lambda storage, _: storage.cuda()`
            replace(storage, "cuda", self._stay)
        for module, name in ((torch.fft, "fftfreq"), (torch.fft, "rfftfreq"), (torch.nested, "nested_tensor")):
            replace(module, name, self._factory)
        replace(torch.Tensor, "type", self._type)
        replace(torch, "set_default_tensor_type", self._type)
        replace(_BaseDataLoaderIter, "__init__", self._iterate)
        replace(torch, "Generator", self._generator)
        replace(torch, "load", self._load)
        replace(DeviceContext, "__init__", self._context)

    def _factory(self, original: Any) -> Any:
        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            if kwargs and self._active():
                if "device" in kwargs:
                    kwargs["device"] = self.redirect(kwargs["device"])
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
            return original(*args, **kwargs)

        known_to_scripts(create, original)
        return create

    def _to(self, original: Any) -> Any:
        @functools.wraps(original)
        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                args = (self.redirect(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = self.redirect(kwargs["device"])
            return original(tensor, *args, **kwargs)

        return to

    def _cuda(self, original: Any) -> Any:
        @functools.wraps(original)
        def cuda(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active():
                return original(tensor, *args, **kwargs)
            self._note()
            layout = kwargs.get("memory_format")
            return tensor if layout is None else tensor.contiguous(memory_format=layout)

        return cuda

    def _stay(self, original: Any) -> Any:
        @functools.wraps(original)
        def stay(memory: Any, *args: Any, **kwargs: Any) -> Any:
            return memory if self._active() else original(memory, *args, **kwargs)

        return stay

    def _type(self, original: Any) -> Any:
        @functools.wraps(original)
        def type_of(*args: Any, **kwargs: Any) -> Any:
            return original(*map(self._named, args), **kwargs)

        return type_of

    def _named(self, kind: Any) -> Any:
        return kind.replace("torch.cuda.", "torch.") if self._active() and isinstance(kind, str) else kind

    def _iterate(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807 - replaces a method of that name
            pinned = loader.pin_memory
            if pinned and self._active():
                loader.pin_memory = False  # torch warns that it finds no GPU
            try:
                original(iterator, loader)
            finally:
                loader.pin_memory = pinned

        return __init__

    def _generator(self, original: Any) -> Any:
        redirect = self.redirect

        class GeneratorType(type):
            """Replaces torch.Generator, which cannot be subclassed, in calls and isinstance checks."""

            def __call__(cls, device: Any = "cpu") -> Any:
                return original(device=redirect(device))

            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, original)

        return GeneratorType("Generator", (), {"__doc__": original.__doc__})

    def _load(self, original: Any) -> Any:
        @functools.wraps(original)
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._active():
                moved = map_location.values() if isinstance(map_location, Mapping) else (map_location,)
                if all(place is None or is_cuda(place) for place in moved):
                    map_location = "cpu"
            return original(f, map_location, *args, **kwargs)

        return load

    def _context(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(context: Any, device: Any) -> None:  # noqa: N807 - replaces a method of that name
            original(context, self.redirect(device))

        return __init__


@functools.cache
def _factory_names() -> tuple[str, ...]:
    """Names in torch of the functions that take a device; called before the first of them is replaced."""
    factories = device_constructors()  # the originals, which `with torch.device(...)` compares with
    return tuple(
        name
        for name, value in sorted(vars(torch).items())
        if callable(value) and type(value).__hash__ is not None and value in factories
    )


# -- kernels that CUDA has and the CPU lacks: of attention, of which the CPU has one fused, and histc of integers --

_HERE: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class AttentionKernels:
    """The replaced switches: where a selected kernel is missing, the available ones are used."""

    __slots__ = ("_active",)

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active

    def declare(self, replacements: Replacements) -> None:
        replacements.want(torch.nn.attention, "sdpa_kernel", self._chosen)
        replacements.want(torch.backends.cuda, "enable_math_sdp", self._kept)
        replacements.want(torch, "histc", self._counted)

    def _chosen(self, original: Any) -> Any:
        @functools.wraps(original)
        def sdpa_kernel(backends: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active() and backends not in (SDPBackend.MATH, [SDPBackend.MATH]):
                backends = _HERE
            return original(backends, *args, **kwargs)

        return sdpa_kernel

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def histc(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._active() or values.is_floating_point():
                return original(values, *args, **kwargs)
            return original(values.double(), *args, **kwargs).to(values.dtype)  # CUDA's takes integers, the CPU's none

        return histc

    def _kept(self, original: Any) -> Any:
        @functools.wraps(original)
        def enable_math_sdp(enabled: bool) -> None:
            original(enabled or self._active())

        return enable_math_sdp
