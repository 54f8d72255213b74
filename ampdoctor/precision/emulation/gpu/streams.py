"""Streams and events on a CPU: what is queued has been done, and time is the host's."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Self

import torch

from ampdoctor.errors import ReplayError

if TYPE_CHECKING:
    from types import TracebackType


class Stream:
    """Stands for `torch.cuda.Stream`: everything that was put into it is done already."""

    def __init__(self, device: Any = None, priority: int = 0, **_ids: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.stream_id = self.device_index = self.device_type = self.cuda_stream = 0
        self._before: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        """Done already."""

    def wait_stream(self, stream: Stream) -> None:
        """Done already."""

    def synchronize(self) -> None:
        """Done already."""

    def query(self) -> bool:
        """Is everything done?"""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Returns the event, or a new one, recorded now."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        self._before.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        set_stream(self._before.pop())


class Event:
    """Stands for `torch.cuda.Event`; the time between two is the host's."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **_more: Any,
    ) -> None:
        self.enable_timing = enable_timing
        self.device = torch.device("cuda", 0)
        self._at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Keeps the time."""
        self._at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Done already."""

    def synchronize(self) -> None:
        """Done already."""

    def query(self) -> bool:
        """Is everything done?"""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds until another event.

        Raises:
            ValueError: As on a GPU: one of them keeps no time, or has not been recorded.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at - self._at) * 1000


class StreamContext:
    """Stands for what `torch.cuda.stream` returns; without a stream it does nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, at)


class Graph:
    """Stands for `torch.cuda.CUDAGraph` and `torch.cuda.graph`, of which none is made."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise ReplayError("the code captures a CUDA graph, which only a GPU runs: let it run without one here")


_DEFAULT = Stream()
_CURRENT = threading.local()


def default_stream(_device: Any = None) -> Stream:
    """Returns the device's default stream."""
    return _DEFAULT


def current_stream(_device: Any = None) -> Stream:
    """Returns the thread's current stream."""
    stream: Stream = getattr(_CURRENT, "stream", _DEFAULT)
    return stream


def set_stream(stream: Stream | None) -> None:
    """Make a stream the thread's current one; None changes nothing."""
    if stream is not None:
        _CURRENT.stream = stream
