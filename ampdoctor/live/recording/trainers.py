"""`Trainers`: which threads train, whose steps are recorded, and whether another one is in the midst of a step."""

from __future__ import annotations

import threading
import weakref

SEVERAL = "several threads train at once"
"""Why nothing is run again: what one thread does to a model, to random numbers or to torch, another one sees."""


class Trainers:
    """Knows the threads that train: those that make backwards and updates.

    A step begins where a model in training mode is called, or with a backward, and ends with an update. Threads that
    only evaluate, read data or write logs begin none. They are known by their objects: numbers are given again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clock = 0
        self._began: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._recorded: weakref.ref[threading.Thread] | None = None
        self.several = False

    def called(self) -> None:
        """This thread calls a model, and may train with what that returns."""
        with self._lock:
            self._begin(threading.current_thread())

    def trains(self) -> None:
        """This thread makes a backward, or is about to make an update."""
        here = threading.current_thread()
        with self._lock:
            began = self._begin(here)
            self._trained[here] = self._clock
            self.several |= any(when > began for thread, when in self._trained.items() if thread is not here)

    def updated(self) -> None:
        """This thread has ended a step. What others have called before it, without ever training, is no step's."""
        with self._lock:
            began = self._began.pop(threading.current_thread(), 0)
            for thread, when in list(self._began.items()):
                if when < began and thread not in self._trained:
                    del self._began[thread]

    def crowded(self) -> bool:
        """Whether another thread is in the midst of a step, or may soon be."""
        here = threading.current_thread()
        with self._lock:
            return self.several or any(thread.is_alive() for thread in self._began if thread is not here)

    def is_recorded(self) -> bool:
        """Whether this thread's steps are the recorded ones.

        They are those of the first thread that calls a model, until that has ended or another one trains instead.
        """
        here = threading.current_thread()
        with self._lock:
            there = None if self._recorded is None else self._recorded()
            if there is None or not there.is_alive() or (here in self._trained and there not in self._began):
                self._recorded, there = weakref.ref(here), here
            return there is here

    def _begin(self, here: threading.Thread) -> int:
        self._clock += 1
        return self._began.setdefault(here, self._clock)
