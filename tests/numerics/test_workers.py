from __future__ import annotations

import os
import threading

import pytest
import torch

from ampdoctor.numerics import counting
from ampdoctor.numerics.counting import CHUNK, count, imap_on_workers
from ampdoctor.numerics.histogram import Histogram


def test_the_users_thread_count_stays_as_it_was():
    before = torch.get_num_threads()
    inside = list(imap_on_workers(lambda _: (torch.get_num_threads(), threading.current_thread().name), range(6), 3))
    assert {threads for threads, _ in inside} == {1}
    assert all(name.startswith("ampdoctor-histogram") for _, name in inside)
    assert torch.get_num_threads() == before
    assert list(imap_on_workers(lambda _: torch.get_num_threads(), range(7), 7)) == [1] * 7
    born_later: list[int] = []
    thread = threading.Thread(target=lambda: born_later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert born_later == [before]


def test_results_keep_their_order_and_errors_come_through():
    assert list(imap_on_workers(lambda i: i * i, range(20), 3)) == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        list(imap_on_workers(lambda i: 1 // i, range(2), 3))


def test_a_forked_child_makes_its_own_pool():
    list(imap_on_workers(lambda i: i, range(3), 3))
    child = os.fork()
    if child == 0:
        ok = list(imap_on_workers(lambda i: i + 1, range(3), 3)) == [1, 2, 3]
        os._exit(0 if ok else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_several_threads_may_count_at_once():
    tensor = torch.randn(CHUNK * 3 + 5)
    expected = count(tensor)
    found: list[Histogram] = []
    threads = [threading.Thread(target=lambda: found.append(count(tensor))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize("started", [0, 1, 2])
def test_where_threads_cannot_be_started_the_work_is_done_on_this_one(monkeypatch, started):
    """A container's limit of processes: the third thread fails, and those that run already do not wait for it."""
    start, left = threading.Thread.start, [started]

    def limited(thread):
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    before = torch.get_num_threads()
    monkeypatch.setattr(counting, "_workers", counting._Workers())
    monkeypatch.setattr(threading.Thread, "start", limited)
    assert list(imap_on_workers(lambda i: i + 1, range(5), 3)) == [1, 2, 3, 4, 5]
    assert torch.get_num_threads() == before
