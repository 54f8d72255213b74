"""How a job has ended, by the last of what it prints: an exception that nothing has caught."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ampdoctor.checkpoints.log_files import Left
from ampdoctor.evidence.log_records import EndLine
from ampdoctor.health.reading.log_kind import Noticed
from ampdoctor.health.reading.rows import Row

_RANK = re.compile(rb"^\s*(?:\[(?:default|rank)?[ _]?\d{1,6}\]:|\[\d+,\d{1,6}\]<std(?:out|err)>:?|\d{1,6}:) ?")
"""torchrun's, Open MPI's and Slurm's prefixes: the tracebacks of several processes come line by line in turns."""
_HEAD = b"Traceback (most recent call last)"
_CHAINED = re.compile(rb"(?:During handling of the above exception|The above exception was the direct cause)")
_IGNORED = re.compile(
    rb"Exception ignored (?:in|on)|Exception in thread|--- Logging error ---|^Process \S*Process-|Error in atexit"
)
"""Python prints a traceback below these, and the script goes on."""
_INDENTED = (b" ", b"\t", "│".encode(), "╭".encode(), "╰".encode())
_EXCEPTION = re.compile(rb"^([A-Za-z_][\w.]*)(?::\s*(.*))?$")
_AT_FLOOR = re.compile(
    rb"(?:(\w*(?:Error|Exception)): )?((?:Current loss scale already at minimum|Minimum loss scale reached)[^\r\n]*)"
)
"""What DeepSpeed and fairseq raise at the floor of their scale, whether or not the traceback stands in the file."""
_WITH_CODE = re.compile(
    rb"exit(?:s|ed)?\s*(?:with\s+)?(?:(?:return|exit)\s+)?(?:code|status)\s*[:=]?\s*-?[1-9]", re.IGNORECASE
)
_PASSES = re.compile(
    rb"^(?:wandb: |srun: |slurmstepd: |\[[WE]\d{3,4} |[WE]\d{4} |(?:ERROR|WARNING):torch\.distributed|[=*_-]{4,}\s*$|"
    rb"CUDA kernel errors might|For debugging consider|Compile with `?TORCH_USE|"
    rb"\[\d{4}-\d\d-\d\d [^]]+\] (?:\[\w+\] \[launch\.py|torch\.distributed))|\d%\|[^|]*\|"
)
"""What launchers, trackers and bars print behind it, and the further lines of torch's own messages."""
_LONGEST = 200
"""Characters of an exception and what it says."""
_GOES_ON = 2
"""Rows behind an exception that show that it was caught: one may have waited for a bar that is drawn when it closes."""
_INTERRUPTED = 130


class _Rows(Protocol):
    def rows(self, lines: Iterator[bytes], left: Left) -> Iterator[Row]: ...

    def rest(self, noticed: Noticed) -> Iterator[Row]: ...


@dataclass(slots=True)
class Ending:
    """Hears the lines of a job for an exception that has ended it.

    One has where nothing follows its traceback but what launchers and trackers print, or where a launcher says then
    that the job has ended with a code other than 0. Of several processes' the first counts, of a chain the last.
    """

    _raised: bytes = b""
    _inside: dict[bytes, bool] = field(default_factory=dict)
    _ignored: bool = False
    _chained: bool = False
    _others: int = 0

    def hear(self, line: bytes) -> None:
        """Takes a line."""
        prefix = _RANK.match(line)
        rank, text = (b"", line) if prefix is None else (prefix[0].strip(), line[prefix.end() :])
        if rank in self._inside:
            if not text.strip() or text.startswith(_INDENTED):
                return
            ignored = self._inside.pop(rank)
            found = _EXCEPTION.match(text.strip())
            if found is not None:
                if not ignored:
                    self._raises(found[1].rpartition(b".")[2], found[2] or b"")
                return
        if _HEAD in text:
            self._inside[rank], self._ignored = self._ignored, False
        elif b"oss scale" in text and (floor := _AT_FLOOR.search(text)) is not None:
            self._raises(floor[1] or b"", floor[2])
        elif text.startswith((b"During", b"The above")) and _CHAINED.match(text) is not None:
            self._chained = True
        elif _IGNORED.search(text) is not None:
            self._ignored = True
        elif self._raised:
            self._follows(text)

    def _follows(self, text: bytes) -> None:
        if _WITH_CODE.search(text) is not None:
            self._others = 0
        elif text.strip() and not text.startswith(_INDENTED) and _PASSES.search(text) is None:
            self._others += 1

    def _raises(self, kind: bytes, message: bytes) -> None:
        if self._raised and not self._chained and not self._others:
            return
        self._raised = b": ".join(part for part in (kind, message.strip()) if part)
        self._chained, self._others = False, 0

    def goes_on(self) -> None:
        """Steps follow: whatever was raised was caught, or the job was started again."""
        self._raised, self._others = b"", 0

    @property
    def may_have_ended(self) -> bool:
        """Whether an exception was raised, behind which it is not known yet that the job goes on."""
        return bool(self._raised)

    @property
    def line(self) -> EndLine | None:
        """The end of the job; None where no exception has ended it."""
        if not self._raised or self._others:
            return None
        reason = self._raised.decode("utf-8", "replace")[:_LONGEST]
        return EndLine(exit_code=_INTERRUPTED if reason == "KeyboardInterrupt" else 1, reason=reason)


class PrintedRows:
    """Makes rows of what a job prints, and knows how it has ended.

    Args:
        rows: Makes the rows.
    """

    def __init__(self, rows: _Rows) -> None:
        self._rows, self._ending, self._since = rows, Ending(), 0

    def rows(self, lines: Iterator[bytes], left: Left) -> Iterator[Row]:
        """As in `LineRows`."""
        for row in self._rows.rows(self._heard(lines), left):
            self._since = self._since + 1 if self._ending.may_have_ended else 0
            if self._since >= _GOES_ON:
                self._ending.goes_on()
            yield row

    def rest(self, noticed: Noticed) -> Iterator[Row]:
        """As in `LineRows`."""
        return self._rows.rest(noticed)

    def end(self) -> EndLine | None:
        """As in `LineRows`."""
        return self._ending.line

    def _heard(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._ending.hear(line)
            yield line
