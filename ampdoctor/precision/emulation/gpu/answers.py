"""What torch answers about CUDA where there is none, as one consistent device.

Two tables. What decides a branch is asked (`QUESTIONS`), and the answer depends on who asks; what comes after a yes is
served to everyone (`SERVED`): without a GPU these functions raise, or are empty.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed

from ampdoctor.precision.emulation.gpu import card, streams
from ampdoctor.precision.emulation.gpu.asking import asker_hears_yes, hears_yes
from ampdoctor.precision.emulation.gpu.devices import ANSWERED

if TYPE_CHECKING:
    from ampdoctor.precision.emulation.gpu.replacing import Replacements
    from ampdoctor.precision.emulation.patches import Patches


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _now(ask: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: ask()


def _set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    # A state that was saved on a GPU says nothing of the CPU's generator, and is of another size.
    if state.numel() == torch.default_generator.get_state().numel():
        torch.default_generator.set_state(state)


def _set_states(states: Any, *_args: Any, **_kwargs: Any) -> None:
    for state in list(states)[:1]:
        _set_state(state)


_CUDART: Final = SimpleNamespace(**dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), _always(0)))
"""The CUDA runtime, as far as training code calls it."""
_YES: Final = _always(True)
_ONE: Final = _always(1)
_ZERO: Final = _always(0)
_MEMORY: Final = _now(card.memory_used)
_STATE: Final = _now(torch.default_generator.get_state)
_SEED: Final = torch.default_generator.manual_seed

QUESTIONS: Final[Mapping[Any, Mapping[str, Callable[..., Any]]]] = {
    torch.cuda: {
        "is_available": _YES,
        "device_count": _ONE,
        "is_bf16_supported": _YES,
        "is_tf32_supported": _YES,
        "is_initialized": _YES,
        "get_arch_list": _now(lambda: [f"sm_{card.CARD.major}{card.CARD.minor}"]),
    },
    torch.accelerator: {
        "is_available": _YES,
        "device_count": _ONE,
        "current_accelerator": _now(lambda: torch.device("cuda")),
    },
    torch.backends.cuda: {"is_built": _YES},
    torch.backends.cudnn: {"is_available": _YES, "version": _always(card.CUDNN_VERSION)},
    torch.distributed: {"is_nccl_available": _YES},
}
"""By module: what decides which way the code goes, and what those hear who hear of a GPU."""

_MEMORY_QUERIES: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"), _MEMORY
    ),
    **dict.fromkeys(("max_memory_cached", "device_memory_used"), _MEMORY),
    "mem_get_info": _now(card.memory_info),
    "get_memory_info": _now(card.memory_info),
    "memory_stats": _now(card.memory_statistics),
    "memory_summary": _now(card.memory_summary),
    "memory_snapshot": _now(list),
    "list_gpu_processes": _always(""),
    "get_per_process_memory_fraction": _always(1.0),
    **dict.fromkeys(
        (
            "empty_cache",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "reset_max_memory_allocated",
            "reset_max_memory_cached",
            "set_per_process_memory_fraction",
            "_record_memory_history",
            "_dump_snapshot",
        ),
        _nothing,
    ),
}
_RANDOM: Final[Mapping[str, Callable[..., Any]]] = {
    # What would be drawn on the device is drawn by the CPU's generator: its state is the device's.
    "manual_seed": _SEED,
    "manual_seed_all": _SEED,
    "seed": _now(torch.default_generator.seed),
    "seed_all": _now(torch.default_generator.seed),
    "initial_seed": _now(torch.default_generator.initial_seed),
    "get_rng_state": _STATE,
    "get_rng_state_all": _now(lambda: [torch.default_generator.get_state()]),
    "set_rng_state": _set_state,
    "set_rng_state_all": _set_states,
}
_STREAMS: Final[Mapping[str, Callable[..., Any]]] = {
    "stream": streams.StreamContext,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
}
SERVED: Final[Mapping[Any, Mapping[str, Callable[..., Any]]]] = {
    torch.cuda: {
        **dict.fromkeys(("init", "synchronize", "set_device", "ipc_collect", "set_sync_debug_mode"), _nothing),
        **dict.fromkeys(("current_device", "get_sync_debug_mode"), _ZERO),
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), _ZERO),
        **dict.fromkeys(("graph_pool_handle", "make_graphed_callables"), streams.Graph),
        **dict.fromkeys(("is_current_stream_capturing", "can_device_access_peer"), _always(False)),
        **_STREAMS,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), _always(-1)),
        "cudart": _always(_CUDART),
        "get_device_name": _always(card.CARD.name),
        "get_device_capability": _always(card.CAPABILITY),
        "get_device_properties": _always(card.CARD),
        **_MEMORY_QUERIES,
        **_RANDOM,
    },
    torch.cuda.memory: _MEMORY_QUERIES,
    torch.cuda.random: _RANDOM,
    torch.accelerator: {
        **dict.fromkeys(("synchronize", "set_device_index", "set_device_idx"), _nothing),
        **dict.fromkeys(("current_device_index", "current_device_idx"), _ZERO),
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        **_MEMORY_QUERIES,
    },
    torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _ZERO),
    torch.cuda.profiler: dict.fromkeys(("start", "stop"), _nothing),
}
"""By module: what needs a GPU or one's memory, clock or generator, and what does its work on a CPU."""

_TYPES: Final = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
CLASSES: Final[Mapping[Any, Mapping[str, Any]]] = {
    torch.cuda: {
        "Stream": streams.Stream,
        "ExternalStream": streams.Stream,
        "StreamContext": streams.StreamContext,
        "Event": streams.Event,
        **dict.fromkeys(("CUDAGraph", "graph"), streams.Graph),
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TYPES},
    },
    torch: {"Stream": streams.Stream, "Event": streams.Event},
    torch.accelerator: {"device_index": nullcontext},
}
"""By module: classes, and the classes that stand in their place: annotations name them too."""


def _class(_original: Any, cls: Any) -> Any:
    return cls


class Answers:
    """The replaced functions of `QUESTIONS` and `SERVED`, and what a tensor says of its device.

    Args:
        active: Is anything emulated?
        says_yes: Are those who hear of a GPU to hear of one?
        note: Called each time that somebody was told of a GPU.
    """

    __slots__ = ("_active", "_note", "_says_yes", "_version")

    def __init__(self, active: Callable[[], bool], says_yes: Callable[[], bool], note: Callable[[], None]) -> None:
        self._active = active
        self._says_yes = says_yes
        self._note = note
        self._version = type("Version", (type(torch.version),), {"cuda": property(self._cuda_version)})

    def declare(self, replacements: Replacements) -> None:
        """Have them all replaced."""
        for make, table in ((self._serve, SERVED), (self._answer, QUESTIONS)):
            for module, answers in table.items():
                for name, answer in answers.items():
                    replacements.want(module, name, make, answer)
        for module, classes in CLASSES.items():
            for name, cls in classes.items():
                replacements.want(module, name, _class, cls)
        for name in ("is_cuda", "is_cpu", "device", "get_device"):
            replacements.want(torch.Tensor, name, getattr(self, f"_{name}"))

    def install_version(self, patches: Patches) -> None:
        """Let `torch.version.cuda` depend on who asks as well: a property of the module's class goes before its own."""
        patches.after(setattr, torch.version, "__class__", type(torch.version))
        torch.version.__class__ = self._version

    def _cuda_version(self, module: Any) -> str | None:
        heard = self._says_yes() and hears_yes(sys._getframe(1))
        return card.CUDA_VERSION if heard else vars(module)["cuda"]

    def _serve(self, original: Any, answer: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return answer(*args, **kwargs) if self._active() else original(*args, **kwargs)

        return call

    def _answer(self, original: Any, answer: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._says_yes() and asker_hears_yes(sys._getframe(1)):
                self._note()
                return answer(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    def _is_cuda(self, original: Any) -> Any:
        def is_cuda(tensor: torch.Tensor) -> bool:
            truth: bool = original.__get__(tensor)
            return truth or (self._seems(tensor) and hears_yes(sys._getframe(1)))

        return property(is_cuda, doc=original.__doc__)

    def _is_cpu(self, original: Any) -> Any:
        def is_cpu(tensor: torch.Tensor) -> bool:
            truth: bool = original.__get__(tensor)
            return truth and not (self._says_yes() and hears_yes(sys._getframe(1)))

        return property(is_cpu, doc=original.__doc__)

    def _device(self, original: Any) -> Any:
        def device(tensor: torch.Tensor) -> torch.device:
            truth: torch.device = original.__get__(tensor)
            # The cheap questions first: torch asks this too, many times in a step.
            if truth.type == "cpu" and self._says_yes() and hears_yes(sys._getframe(1)):
                return ANSWERED
            return truth

        return property(device, doc=original.__doc__)

    def _get_device(self, original: Any) -> Any:
        @functools.wraps(original)
        def get_device(tensor: torch.Tensor) -> int:
            truth: int = original(tensor)
            return 0 if truth < 0 and self._seems(tensor) and hears_yes(sys._getframe(1)) else truth

        return get_device

    def _seems(self, tensor: torch.Tensor) -> bool:
        return self._says_yes() and torch._C.TensorBase.device.__get__(tensor).type == "cpu"
