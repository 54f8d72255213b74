"""A small pool of threads, each with one torch thread, for kernels that torch itself runs on one thread."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Workers:
    """Keeps one pool per size: a thread that is about to use a pool would fail if another thread shut it down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor | None] = {}

    def forget(self) -> None:
        """Drop the pools without touching their threads: they do not exist after a fork."""
        self._lock = threading.Lock()
        self._pools = {}

    def get(self, size: int) -> ThreadPoolExecutor | None:
        with self._lock:
            if size not in self._pools:
                self._pools[size] = _start(size)
            return self._pools[size]


def _start(size: int) -> ThreadPoolExecutor | None:
    """Returns a pool; None where the process may not start that many threads (a container's limit of processes)."""
    pool = ThreadPoolExecutor(size, thread_name_prefix="ampdoctor-histogram")
    everyone = threading.Barrier(size + 1)
    failed: list[RuntimeError] = []

    def settle() -> None:
        torch.get_num_threads()  # adopts the process's default, which would otherwise undo the next line later
        torch.set_num_threads(1)
        with contextlib.suppress(threading.BrokenBarrierError):
            everyone.wait()

    def start_and_restore() -> None:
        # A thread's count is its own once set, but setting it also changes the default of later threads. A new
        # thread reads that default, so a new thread restores it, and the caller's own count is not touched.
        default = torch.get_num_threads()
        try:
            for _ in range(size):
                pool.submit(settle)
            everyone.wait()
        except RuntimeError as error:
            failed.append(error)
            everyone.abort()  # those that have started wait for the others
            pool.shutdown(cancel_futures=True)
        finally:
            torch.set_num_threads(default)

    try:
        starter = threading.Thread(target=start_and_restore)
        starter.start()
    except RuntimeError:
        return None
    starter.join()
    return None if failed else pool


_workers = _Workers()
os.register_at_fork(after_in_child=_workers.forget)


def map_on_workers(work: Callable[[Item], Result], items: Iterable[Item], size: int) -> list[Result]:
    """Apply `work` to each item on `size` threads, or on this one where they cannot start; in the items' order."""
    pool = _workers.get(size)
    return [work(item) for item in items] if pool is None else list(pool.map(work, items))


def imap_on_workers(work: Callable[[Item], Result], items: Iterable[Item], size: int) -> Iterator[Result]:
    """Yield the same results one by one; only a few items are taken ahead of the result that is waited for.

    If the iteration ends early, by an error or Ctrl-C, running work is waited for: nothing runs on in the background.
    """
    pool = _workers.get(size)
    if pool is None:
        yield from map(work, items)
        return
    waiting: collections.deque[Future[Result]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        concurrent.futures.wait(waiting)
