"""A small pool of threads, each with one torch thread, for kernels that torch itself runs on one thread."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Workers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._size = 0

    def forget(self) -> None:
        """Drop the pool without touching its threads: after a fork they do not exist."""
        self._lock = threading.Lock()
        self._pool = None
        self._size = 0

    def get(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._size != size:
                if self._pool is not None:
                    self._pool.shutdown(wait=False)
                self._pool = _start(size)
                self._size = size
            return self._pool


def _start(size: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(size, thread_name_prefix="ampdoctor-histogram")
    everyone = threading.Barrier(size + 1)

    def settle() -> None:
        torch.get_num_threads()  # takes the process's default over, which would otherwise undo the next line later
        torch.set_num_threads(1)
        everyone.wait()

    before = torch.get_num_threads()
    for _ in range(size):
        pool.submit(settle)
    everyone.wait()
    # A thread's count is its own once set, but setting it also changes what threads born later start with: put it back.
    torch.set_num_threads(before)
    return pool


_workers = _Workers()
os.register_at_fork(after_in_child=_workers.forget)


def map_on_workers(work: Callable[[Item], Result], items: Iterable[Item], size: int) -> list[Result]:
    """Apply `work` to each item on `size` threads; results keep the items' order."""
    return list(_workers.get(size).map(work, items))
