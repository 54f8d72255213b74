"""What torch answers about CUDA where there is none, as one consistent device.

`QUESTIONS` has the functions on which code decides; the answer depends on the caller. `SERVED` has what runs after a
yes, and is the same for all callers: without a GPU these functions raise, or return nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed

from ampdoctor.errors import ReplayError
from ampdoctor.precision.fake_gpu.devices import ANSWERED
from ampdoctor.precision.fake_gpu.replace import Patches, Replacements, caller_sees_cuda, sees_cuda

# -- the emulated GPU; its memory is the process's own --

with contextlib.suppress(ImportError):  # Windows has none
    import resource


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns; the names are CUDA's."""

    name: str = "NVIDIA A100-SXM4-80GB"
    major: int = 8
    minor: int = 0
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 108

    warp_size: int = 32


CARD: Final = DeviceProperties()
CAPABILITY: Final = (CARD.major, CARD.minor)
CUDA_VERSION: Final = "12.8"  # the CUDA version that torch reports
CUDNN_VERSION: Final = 91002
DESCRIBED: Final = f"an A100-like device, compute capability {CARD.major}.{CARD.minor}"
_STATISTICS: Final = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_POOLS: Final = ("all", "large_pool", "small_pool")
_COUNTERS: Final = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def memory_used() -> int:
    """The peak memory of the process in bytes: tensors lie there on a CPU."""
    if "resource" not in globals():
        return 1
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kept if sys.platform == "darwin" else kept * 1024


def memory_statistics() -> OrderedDict[str, Any]:
    """What `torch.cuda.memory_stats` returns, by its names."""
    keys = itertools.product(_STATISTICS, _POOLS, ("current", "peak", "allocated", "freed"))
    used = memory_used()
    return OrderedDict({".".join(key): 0 if key[2] == "freed" else used for key in keys} | dict.fromkeys(_COUNTERS, 0))


# -- streams and events: on a CPU all queued work is done, and time is the host's --


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


class _Done:
    """What a stream and an event share: everything queued is done already."""

    synchronize = _nothing

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)

    def query(self) -> bool:
        return True


class Stream(_Done):
    """Replaces `torch.cuda.Stream`."""

    wait_event = wait_stream = _nothing

    def __init__(self, device: Any = None, priority: int = 0, **_ids: Any) -> None:
        super().__init__()
        self.priority = priority
        self.stream_id = self.device_index = self.device_type = self.cuda_stream = 0
        self._before: list[Stream] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        set_stream(self._before.pop())


class Event(_Done):
    """Replaces `torch.cuda.Event`; the time between two events is the host's."""

    wait = _nothing

    def __init__(self, enable_timing: bool = False, *_more: Any, **_further: Any) -> None:
        super().__init__()
        self.enable_timing = enable_timing
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """The milliseconds until another event; raises ValueError as on a GPU where one has no recorded time."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1000


class Graph:
    """Replaces `torch.cuda.CUDAGraph` and `torch.cuda.graph`, and raises ReplayError."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise ReplayError("the code captures a CUDA graph, which only a GPU runs: let it run without one here")


_DEFAULT = Stream()
_CURRENT = threading.local()


def default_stream(_device: Any = None) -> Stream:
    """The device's default stream."""
    return _DEFAULT


def current_stream(_device: Any = None) -> Stream:
    """The thread's current stream."""
    stream: Stream = getattr(_CURRENT, "stream", _DEFAULT)
    return stream


def set_stream(stream: Stream | None) -> None:
    """Make a stream the thread's current one; None changes nothing."""
    if stream is not None:
        _CURRENT.stream = stream


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def _now(ask: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: ask()


def _set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    # A state saved on a GPU does not fit the CPU's generator, and has another size.
    if state.numel() == torch.default_generator.get_state().numel():
        torch.default_generator.set_state(state)


def _set_states(states: Any, *_args: Any, **_kwargs: Any) -> None:
    for state in list(states)[:1]:
        _set_state(state)


_CUDART: Final = SimpleNamespace(**dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop"), _always(0)))
"""The part of the CUDA runtime that training code calls."""
_YES: Final = _always(True)
_ONE: Final = _always(1)
_ZERO: Final = _always(0)
_MEMORY: Final = _now(memory_used)
_STATE: Final = _now(torch.default_generator.get_state)
_SEED: Final = torch.default_generator.manual_seed

QUESTIONS: Final[Mapping[Any, Mapping[str, Callable[..., Any]]]] = {
    torch.cuda: {
        "is_available": _YES,
        "device_count": _ONE,
        "is_bf16_supported": _YES,
        "is_tf32_supported": _YES,
        "is_initialized": _YES,
        "get_arch_list": _now(lambda: [f"sm_{CARD.major}{CARD.minor}"]),
    },
    torch.accelerator: {
        "is_available": _YES,
        "device_count": _ONE,
        "current_accelerator": _now(lambda: torch.device("cuda")),
    },
    torch.backends.cuda: {"is_built": _YES},
    torch.backends.cudnn: {"is_available": _YES, "version": _always(CUDNN_VERSION)},
    torch.distributed: {"is_nccl_available": _YES},
}  # by module: functions on which code decides, with the answer for callers that are told of a GPU

_MEMORY_QUERIES: Final[Mapping[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"), _MEMORY
    ),
    **dict.fromkeys(("max_memory_cached", "device_memory_used"), _MEMORY),
    **dict.fromkeys(
        ("mem_get_info", "get_memory_info"),
        _now(lambda: (max(CARD.total_memory - memory_used(), 0), CARD.total_memory)),
    ),
    "memory_stats": _now(memory_statistics),
    "memory_summary": _now(lambda: f"no GPU here: the process's own memory, at most {memory_used()} bytes"),
    "memory_snapshot": _now(list),
    "list_gpu_processes": _always(""),
    "get_per_process_memory_fraction": _always(1.0),
    **dict.fromkeys(
        (
            "empty_cache",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "set_per_process_memory_fraction",
            "_record_memory_history",
            "_dump_snapshot",
        ),
        _nothing,
    ),
}
_RANDOM: Final[Mapping[str, Callable[..., Any]]] = {
    # The CPU's generator draws what the device would draw, so its state is the device's.
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
    "stream": lambda stream: nullcontext() if stream is None else stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
}
SERVED: Final[Mapping[Any, Mapping[str, Callable[..., Any]]]] = {
    torch.cuda: {
        **dict.fromkeys(("init", "synchronize", "set_device", "ipc_collect", "set_sync_debug_mode"), _nothing),
        **dict.fromkeys(("current_device", "get_sync_debug_mode"), _ZERO),
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), _ZERO),
        **dict.fromkeys(("graph_pool_handle", "make_graphed_callables"), Graph),
        **dict.fromkeys(("is_current_stream_capturing", "can_device_access_peer"), _always(False)),
        **_STREAMS,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), _always(-1)),
        "cudart": _always(_CUDART),
        "get_device_name": _always(CARD.name),
        "get_device_capability": _always(CAPABILITY),
        "get_device_properties": _always(CARD),
        **_MEMORY_QUERIES,
        **_RANDOM,
    },
    torch.cuda.memory: _MEMORY_QUERIES,
    torch.cuda.random: _RANDOM,
    torch.accelerator: {
        **dict.fromkeys(("synchronize", "set_device_index", "set_device_idx"), _nothing),
        **dict.fromkeys(("current_device_index", "current_device_idx"), _ZERO),
        "current_stream": current_stream,
        "set_stream": set_stream,
        **_MEMORY_QUERIES,
    },
    torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _ZERO),
    torch.cuda.profiler: dict.fromkeys(("start", "stop"), _nothing),
}  # by module: functions that need a GPU or its memory, clock or generator, with their replacements on a CPU

_TYPES: Final = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
CLASSES: Final[Mapping[Any, Mapping[str, Any]]] = {
    torch.cuda: {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        **dict.fromkeys(("CUDAGraph", "graph"), Graph),
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TYPES},
    },
    torch: {"Stream": Stream, "Event": Event},
    torch.accelerator: {"device_index": nullcontext},
}  # by module: classes and their replacements, which annotations may name too


def _class(_original: Any, cls: Any) -> Any:
    return cls


class Answers:
    """The replaced functions of `QUESTIONS` and `SERVED`, and a tensor's device; `note` is called at each such yes."""

    __slots__ = ("_active", "_note", "_says_yes", "_version")

    def __init__(self, active: Callable[[], bool], reports_cuda: Callable[[], bool], note: Callable[[], None]) -> None:
        self._active = active
        self._says_yes = reports_cuda
        self._note = note
        self._version = type("Version", (type(torch.version),), {"cuda": property(self._cuda_version)})

    def declare(self, replacements: Replacements) -> None:
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
        """Make `torch.version.cuda` depend on the caller, by a property of the module's class."""
        patches.callback(setattr, torch.version, "__class__", type(torch.version))
        torch.version.__class__ = self._version

    def _cuda_version(self, module: Any) -> str | None:
        sees = self._says_yes() and sees_cuda(sys._getframe(1))
        return CUDA_VERSION if sees else vars(module)["cuda"]

    def _serve(self, original: Any, answer: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return answer(*args, **kwargs) if self._active() else original(*args, **kwargs)

        return call

    def _answer(self, original: Any, answer: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._says_yes() and caller_sees_cuda(sys._getframe(1)):
                self._note()
                return answer(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    def _is_cuda(self, original: Any) -> Any:
        def is_cuda(tensor: torch.Tensor) -> bool:
            truth: bool = original.__get__(tensor)
            return truth or (self._seems(tensor) and sees_cuda(sys._getframe(1)))

        return property(is_cuda, doc=original.__doc__)

    def _is_cpu(self, original: Any) -> Any:
        def is_cpu(tensor: torch.Tensor) -> bool:
            truth: bool = original.__get__(tensor)
            return truth and not (self._says_yes() and sees_cuda(sys._getframe(1)))

        return property(is_cpu, doc=original.__doc__)

    def _device(self, original: Any) -> Any:
        def device(tensor: torch.Tensor) -> torch.device:
            truth: torch.device = original.__get__(tensor)
            # The cheap conditions first: torch itself reads this many times in a step.
            if truth.type == "cpu" and self._says_yes() and sees_cuda(sys._getframe(1)):
                return ANSWERED
            return truth

        return property(device, doc=original.__doc__)

    def _get_device(self, original: Any) -> Any:
        @functools.wraps(original)
        def get_device(tensor: torch.Tensor) -> int:
            truth: int = original(tensor)
            return 0 if truth < 0 and self._seems(tensor) and sees_cuda(sys._getframe(1)) else truth

        return get_device

    def _seems(self, tensor: torch.Tensor) -> bool:
        return self._says_yes() and torch._C.TensorBase.device.__get__(tensor).type == "cpu"
