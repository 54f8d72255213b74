"""User code written for CUDA, on the CPU.

`emulate_cuda()` is entered before the user's module is imported: an autocast object or a GradScaler that is built
without CUDA disables itself permanently. Inside, `cuda` and `cpu` autocast are the same, with CUDA's default dtype
fp16, and requests for a CUDA device stay on the CPU. What autocast casts is decided by
`ampdoctor.precision.cuda_autocast`.

Devices are redirected by replaced functions, not by a TorchFunctionMode. A mode holds for one thread, costs time at
every op, and would be visible to modes that trace the replay. The functions that take a device are few; their
replacements work in every thread and cost nothing elsewhere. They miss references that a library took before (`from
torch import zeros` in a module imported earlier).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.amp import autocast_mode, grad_scaler

from ampdoctor.precision.fake_gpu import answers
from ampdoctor.precision.fake_gpu.answers import Answers
from ampdoctor.precision.fake_gpu.devices import AttentionKernels, DeviceRedirection
from ampdoctor.precision.fake_gpu.missing_libraries import StandIns
from ampdoctor.precision.fake_gpu.processes import OneProcess, lasting_emulation
from ampdoctor.precision.fake_gpu.replace import Patches, Replacements, forget_callers
from ampdoctor.precision.kernels import CUSTOM_FWD_CAST, LOCK

_PREVIOUS = "_ampdoctor_previous"
_NAMED = "_ampdoctor_named"
_CPU = "its tensors stay on the CPU."
DEVICE_NOTE: Final = f"The code asks for CUDA devices; there are none here, and {_CPU}"
YES_NOTE: Final = f"The code asks for CUDA; none is here: it is answered as by {answers.DESCRIBED}, and {_CPU}"


class CudaEmulation:
    """One region of `emulate_cuda`, with its notes."""

    __slots__ = ("_notes", "reports_cuda")

    def __init__(self, *, reports_cuda: bool) -> None:
        self.reports_cuda = reports_cuda
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def _note(self, text: str) -> None:
        self._notes.setdefault(text)


class _Installed:
    """The patches of the process and the regions that need them."""

    def __init__(self) -> None:
        self.regions: list[CudaEmulation] = []
        self.patches = Patches()
        self.replacements = Replacements()
        self.answers = Answers(self.active, self.reports_cuda, self.note)
        self.stand_ins = StandIns(self.say)
        devices, kernels = DeviceRedirection(self.active, self.note), AttentionKernels(self.active)
        for part in (devices, self.answers, kernels, OneProcess(self.active), self.stand_ins):
            part.declare(self.replacements)
        self.cuda_state: tuple[bool, torch.dtype] | None = None

    def active(self) -> bool:
        return bool(self.regions)

    def reports_cuda(self) -> bool:
        return bool(self.regions) and self.regions[-1].reports_cuda

    def note(self) -> None:
        self.say(YES_NOTE if self.reports_cuda() else DEVICE_NOTE)

    def say(self, text: str) -> None:
        for region in tuple(self.regions):
            region._note(text)

    def enter(self, region: CudaEmulation) -> None:
        with LOCK:
            if not self.regions:
                self.cuda_state = _cuda_state()
                try:
                    self.replacements.install(self.patches)
                    self.answers.install_version(self.patches)
                    self.stand_ins.install(self.patches)
                    self._install_amp()
                except BaseException:
                    self.patches.close()
                    raise
            self.regions.append(region)
            forget_callers()

    def leave(self, region: CudaEmulation) -> None:
        with LOCK:
            self.regions.remove(region)
            if not self.regions:
                self.patches.close()
                forget_callers()
                if self.cuda_state is not None:
                    _set_cuda_state(*self.cuda_state)

    def _install_amp(self) -> None:
        cls = autocast_mode.autocast
        # The class is changed in place, for subclasses (torch.cuda.amp.autocast), instances built at import and names
        # bound early.
        self.patches.set(cls, "__init__", _autocast_init(cls.__init__))
        self.patches.set(cls, "__enter__", _autocast_enter(cls.__enter__))
        self.patches.set(cls, "__exit__", _autocast_exit(cls.__exit__))
        if hasattr(autocast_mode, CUSTOM_FWD_CAST):
            self.patches.set(autocast_mode, CUSTOM_FWD_CAST, _custom_fwd_cast(getattr(autocast_mode, CUSTOM_FWD_CAST)))
        self.patches.set(grad_scaler.GradScaler, "__init__", _scaler_init(grad_scaler.GradScaler.__init__))


_INSTALLED = _Installed()


def _cuda_state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _set_cuda_state(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)


def _autocast_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(  # noqa: N807 - replaces a method of that name
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type != "cuda":
            original(self, device_type, dtype, enabled, cache_enabled)
            return
        fast = torch.get_autocast_dtype("cuda") if dtype is None else dtype
        # Built disabled and then switched: the CPU's constructor warns about dtypes that CUDA's takes.
        original(self, "cpu", fast, False, cache_enabled)
        self._enabled = enabled
        self.__dict__[_NAMED] = "cuda"

    return __init__


def device_named(region: torch.autocast) -> str:
    """Returns the device type that an autocast region was made for, which is "cpu" in torch for an emulated "cuda"."""
    named: str = region.__dict__.get(_NAMED, region.device)
    return named


def _autocast_enter(original: Any) -> Any:
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:  # noqa: N807
        result = original(self)
        if self.device == "cpu":
            self.__dict__.setdefault(_PREVIOUS, []).append(_cuda_state())
            # CUDA's own flags are set too: is_autocast_enabled(), get_autocast_gpu_dtype() and custom_fwd are then
            # right without a replacement. No tensor here has CUDA's autocast key.
            _set_cuda_state(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        return result

    return __enter__


def _autocast_exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: Any, *exc: object) -> Any:  # noqa: N807
        result = original(self, *exc)
        previous = self.__dict__.get(_PREVIOUS)
        if previous:
            _set_cuda_state(*previous.pop())
        return result

    return __exit__


def _custom_fwd_cast(original: Any) -> Any:
    @functools.wraps(original)
    def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, "cpu" if device_type == "cuda" else device_type, dtype)

    return _cast


def _scaler_init(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    return __init__


@contextmanager
def emulate_cuda(*, reports_cuda: bool = True) -> Iterator[CudaEmulation]:
    """Let code written for CUDA run on the CPU; enter before importing it, and stay inside while it runs.

    - `torch.autocast("cuda")`, also of objects built at import, switches the CPU's autocast, with fp16 as the default.
    - `custom_fwd` and `custom_bwd` for "cuda" treat CPU tensors as CUDA's; a `GradScaler` for "cuda" is enabled.
    - What names a CUDA device stays on the CPU, with one note. A moved tensor is the same tensor, not a copy.
    - Questions about the device are answered as by one device (`answers.py`), to those that are told (`replace.py`).
    - torch's own function stands in for flash_attn's, where that is missing (`missing_libraries.py`).
    - A process group of one process is joined with any backend (`processes.py`).

    Without `reports_cuda`, the code gets the true answer whether CUDA is there, as in a training for a CPU. Regions
    nest, and belong to the process; the last one to exit undoes everything, also after an exception.
    """
    region = CudaEmulation(reports_cuda=reports_cuda)
    with lasting_emulation():
        _INSTALLED.enter(region)
        try:
            yield region
        finally:
            _INSTALLED.leave(region)
