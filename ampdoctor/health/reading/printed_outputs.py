"""Logs in the printed output of a job: Megatron-LM, DeepSpeed, and any program with a step and a loss in its lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine
from ampdoctor.health.reading.log_files import SkippedLines, as_number, is_output, lines_in
from ampdoctor.health.reading.log_kind import LineRows, LogLocation, ReadIssues, Row, kind_of_one_file
from ampdoctor.health.reading.printed_console import OVERFLOW, ConsoleRows, Layout, OverflowRows, layout_of, overflow_in

# -- how a job ended: an uncaught exception at the end of its output --

_RANK = re.compile(rb"^\s*(?:\[(?:default|rank)?[ _]?\d{1,6}\]:|\[\d+,\d{1,6}\]<std(?:out|err)>:?|\d{1,6}:) ?")
"""Prefixes of torchrun, Open MPI and Slurm: the tracebacks of several processes are mixed line by line."""
_HEAD_BYTES = b"Traceback (most recent call last)"
_CHAINED = re.compile(rb"(?:During handling of the above exception|The above exception was the direct cause)")
_IGNORED = re.compile(
    rb"Exception ignored (?:in|on)|Exception in thread|--- Logging error ---|^Process \S*Process-|Error in atexit"
)
"""Python prints a traceback after these, and the script goes on."""
_INDENTED = (b" ", b"\t", "│".encode(), "╭".encode(), "╰".encode())
_EXCEPTION = re.compile(rb"^([A-Za-z_][\w.]*)(?::\s*(.*))?$")
_AT_FLOOR = re.compile(
    rb"(?:(\w*(?:Error|Exception)): )?((?:Current loss scale already at minimum|Minimum loss scale reached)[^\r\n]*)"
)
"""Errors of DeepSpeed and fairseq at the minimum of their scale; the traceback may be missing in the file."""
_WITH_CODE = re.compile(
    rb"exit(?:s|ed)?\s*(?:with\s+)?(?:(?:return|exit)\s+)?(?:code|status)\s*[:=]?\s*-?[1-9]", re.IGNORECASE
)
_PASSES = re.compile(
    rb"^(?:wandb: |srun: |slurmstepd: |\[[WE]\d{3,4} |[WE]\d{4} |(?:ERROR|WARNING):torch\.distributed|[=*_-]{4,}\s*$|"
    rb"CUDA kernel errors might|For debugging consider|Compile with `?TORCH_USE|"
    rb"\[\d{4}-\d\d-\d\d [^]]+\] (?:\[\w+\] \[launch\.py|torch\.distributed))|\d%\|[^|]*\|"
)
"""Lines of launchers, trackers and bars after the exception, and further lines of torch's own messages."""
_LONGEST = 200  # characters of an exception with its message
_GOES_ON = 2  # rows after an exception that show that it was caught; one may have waited for a bar's last drawing
_INTERRUPTED = 130


@dataclass(slots=True)
class Ending:
    """Searches the lines of a job for an exception that ended it.

    An exception ended the job if only output of launchers and trackers follows its traceback, or if a launcher reports
    a non-zero exit code after it. The first of several processes counts, and the last of a chain.
    """

    _raised: bytes = b""
    _inside: dict[bytes, bool] = field(default_factory=dict)
    _ignored: bool = False
    _chained: bool = False
    _others: int = 0
    _since: int = 0

    def add(self, line: bytes) -> None:
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
        if _HEAD_BYTES in text:
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

    def add_row(self) -> None:
        """Takes a row: further steps show that an exception was caught, or that the job was restarted."""
        self._since = self._since + 1 if self._raised else 0
        if self._since >= _GOES_ON:
            self._raised, self._others = b"", 0

    @property
    def line(self) -> EndLine | None:
        """The end of the job; None where no exception has ended it."""
        if not self._raised or self._others:
            return None
        reason = self._raised.decode("utf-8", "replace")[:_LONGEST]
        return EndLine(exit_code=_INTERRUPTED if reason == "KeyboardInterrupt" else 1, reason=reason)


class PrintedRows(LineRows):
    """Makes rows from a job's output with `rows`, and finds how the job ended."""

    def __init__(self, rows: LineRows) -> None:
        self._rows, self._ending = rows, Ending()

    def rows(self, lines: Iterator[bytes], left: SkippedLines) -> Iterator[Row]:
        """As in `LineRows`."""
        for row in self._rows.rows(self._watched(lines), left):
            self._ending.add_row()
            yield row

    def rest(self, noticed: ReadIssues) -> Iterator[Row]:
        """As in `LineRows`."""
        return self._rows.rest(noticed)

    def end(self) -> EndLine | None:
        """As in `LineRows`."""
        return self._ending.line

    def _watched(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._ending.add(line)
            yield line


_HEAD = 8 * 1024 * 1024  # bytes searched for the first line of a step: a job prints its arguments first, and compiles
_ENOUGH = 1024 * 1024  # bytes from the first line of a step on that decide the layout
_LOOK = 256 * 1024
_FEW = 8  # lines of a job that has just begun

_ITERATION = re.compile(rb"\biteration\s+(\d{1,16})/\s*\d+\s*\|(.*)")
_MEGATRON = {
    "consumed samples": "samples",
    "consumed tokens": "tokens",
    "learning rate": "learning_rate",
    "lm loss": "loss",
    "loss": "loss",
    "loss scale": "loss_scale",
    "grad norm": "gradient_norm",
    "elapsed time per iteration (ms)": "milliseconds",
    "elapsed time per iteration (s)": "seconds",
    "number of skipped iterations": "skips",
    "number of nan iterations": "nans",
}

_STEP = re.compile(rb"\[Rank 0\] step=(\d{1,16}), skipped=(\d+)(?:, lr=\[\[?([^,\]]+))?")


class _MegatronRows(LineRows):
    """Makes rows from Megatron-LM's lines, each the mean over the iterations since the line before.

    Megatron-LM leaves non-finite losses out of the mean. Which iteration was skipped or had a non-finite loss is known
    only where a line is one iteration; a line of iteration 1 is one.
    """

    def __init__(self) -> None:
        self._before = 0

    def _rows_of(self, line: bytes) -> Iterator[Row]:
        found = _ITERATION.search(line)
        if found is None:
            return
        step, values = int(found[1]), {}
        for part in found[2].decode("utf-8", "replace").split("|"):
            key, _, value = part.rpartition(":")
            field, number = _MEGATRON.get(key.strip()), as_number(value.strip())
            if field is not None and number is not None:
                values[field] = number
        if "milliseconds" in values:
            values["seconds"] = values.pop("milliseconds") / 1000
        skips, nans = values.pop("skips", None), values.pop("nans", 0.0)
        single = step in {1, self._before + 1}
        if skips == 0 or (single and skips is not None):
            values["skipped"] = float(skips > 0)
        if single and nans:
            values["loss"] = float("nan")
        self._before = step
        yield Row(step, values)


class _DeepSpeedRows(LineRows):
    """Makes rows from DeepSpeed's lines.

    An overflow is printed without its step: overflows since the last line of a step are placed right after that step.
    """

    def __init__(self) -> None:
        self._step = 0
        self._scale: float | None = None

    def _rows_of(self, line: bytes) -> Iterator[Row]:
        overflow = overflow_in(line)
        if overflow is not None:
            self._step += 1
            yield Row(self._step, {"loss_scale": overflow.attempted, "skipped": 1.0})
            self._scale = overflow.scale
        elif (found := _STEP.search(line)) is not None:
            rate = as_number((found[3] or b"").decode("utf-8", "replace"))
            values = {} if rate is None else {"learning_rate": rate}
            if self._step != int(found[1]):  # else this step was the last of the overflows
                values |= {} if self._scale is None else {"loss_scale": self._scale}
                values["skipped"] = 0.0
            self._step = int(found[1])
            yield Row(self._step, values)


class _Text:
    """Finds in the beginning of a text whose output it is."""

    def __init__(self, head: bytes) -> None:
        self.lines = sum(map(bool, _lines(head)))
        self.megatron = _ITERATION.search(head) is not None
        self.steps_of_deepspeed = _STEP.search(head) is not None
        self.overflows = OVERFLOW.search(head) is not None
        self.layout: Layout | None = None if self.megatron else layout_of(_lines(head))

    @property
    def format(self) -> str:
        """The format in a word; "" for a text that is no log."""
        if self.megatron:
            return "megatron"
        if self.layout is not None:
            return "console"
        return "deepspeed" if self.steps_of_deepspeed or self.overflows else ""


def _lines(head: bytes) -> list[bytes]:
    return head.replace(b"\r", b"\n").split(b"\n")[:-1]


def _text(file: RegularFile, most: int = _HEAD) -> tuple[_Text | None, int]:
    """Searches the beginning of a file; returns what it found, or None, and the number of bytes read."""
    head, looked_at = b"", 0
    while len(head) < min(most, file.size):
        more = _LOOK if not head else max(len(head), _LOOK)
        head += file.read(len(head), min(more, most - len(head), file.size - len(head)))
        if b"\0" in head[:_LOOK]:
            return None, len(head)
        if not _Text(head[looked_at:]).format:
            looked_at = head.rfind(b"\n") + 1
            continue
        if len(head) < min(_ENOUGH, file.size):
            head += file.read(len(head), min(_ENOUGH, file.size) - len(head))
        return _Text(head), len(head)
    return None, len(head)


def _of(place: LogLocation, name: str) -> str:
    """Returns the format of a file; each file is searched once."""
    if ("output", name) not in place.known:
        found = ""
        if not place.named and place.budget.left <= 0:
            place.budget.passed_by.add(place.folder / name)
        else:
            try:
                with RegularFile(place.folder / name, name) as file:
                    text, read = _text(file, _HEAD if place.named else min(_HEAD, place.budget.left))
                place.budget.left -= read
                found = _accepted(place, text)
            except CheckpointError as error:
                place.refused[name] = str(error)
        place.known["output", name] = found
    return str(place.known["output", name])


def _accepted(place: LogLocation, text: _Text | None) -> str:
    """Returns the format of a text. A single line with a step and a loss counts only in a short named file."""
    if text is None:
        return ""
    single = text.format == "console" and text.layout is not None and text.layout.rows < 2
    return "" if single and not (place.named and text.lines <= _FEW) else text.format


def _logs_of(format: str) -> Callable[[LogLocation], list[str]]:  # noqa: A002
    def logs_of(place: LogLocation) -> list[str]:
        likely = [name for name in place.names if place.named or is_output(name)]
        return [name for name in place.latest(likely) if _of(place, name) == format and name not in place.refused]

    return logs_of


def _console(file: RegularFile) -> PrintedRows:
    text, _ = _text(file)
    layout = None if text is None else text.layout
    if layout is not None and layout.place == "epoch" and any(map(overflow_in, lines_in(file))):
        layout = replace(layout, counted=True)
    if layout is None:
        raise CheckpointError(f"{file.name} no longer has a line with a step and a loss.")
    return PrintedRows(ConsoleRows(layout))


def _deepspeed(file: RegularFile) -> PrintedRows:
    text, _ = _text(file)
    return PrintedRows(OverflowRows() if text is not None and not text.steps_of_deepspeed else _DeepSpeedRows())


MEGATRON = kind_of_one_file("megatron", _logs_of("megatron"), lambda _: PrintedRows(_MegatronRows()))
CONSOLE = kind_of_one_file("console", _logs_of("console"), _console)
DEEPSPEED = kind_of_one_file("deepspeed", _logs_of("deepspeed"), _deepspeed)
