"""Tracebacks as they would be if nobody had been watching."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from ampdoctor.package import FOLDER

_OURS = f"{FOLDER}{os.sep}"
_HERE = f"{Path(__file__).parent}{os.sep}"
_IMPORTING = "<frozen importlib._bootstrap"


def cut_our_frames(error: BaseException) -> None:
    """Cuts the frames of ampdoctor out of the tracebacks of an error, of what it came of and of what it holds.

    Those before the script's first frame go, and those between two frames of others: a hook through which the script
    calls itself. What lies behind the script's last frame stays: there a script has called ampdoctor.
    """
    for one in _all_of(error):
        kept = _kept(list(_frames(_behind_the_start(one.__traceback__))))
        for frame, following in pairwise([*kept, None]):
            if frame is not None:  # as all are but the end
                frame.tb_next = following
        one.__traceback__ = kept[0] if kept else None


def _all_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()  # errors may refer to one another in a circle
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _behind_the_start(traceback: TracebackType | None) -> TracebackType | None:
    """Without the frames that started the script, which are all there are of a script that cannot be compiled."""
    while traceback is not None and _file(traceback).startswith(_HERE):
        traceback = traceback.tb_next
    return traceback


def _kept(frames: list[TracebackType]) -> list[TracebackType]:
    last = max((at for at, frame in enumerate(frames) if not _file(frame).startswith(_OURS)), default=-1)
    kept: list[TracebackType] = []
    for at, frame in enumerate(frames):
        if at > last or not _file(frame).startswith(_OURS):
            kept.append(frame)
            continue
        while kept and _file(kept[-1]).startswith(_IMPORTING):  # Python itself leaves these out, unless we lie between
            kept.pop()
    return kept


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
