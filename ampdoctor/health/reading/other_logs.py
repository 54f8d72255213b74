"""Reads other tools' logs: tables, JSON lines, trainer_state.json, event files, W&B's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from heapq import merge
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import BYTE_ORDER_MARK, read_json
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, LogRecord, RunLine, Stamp
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.event_files import (
    BYTES,
    VARINT,
    framed_records,
    is_event_file,
    message_fields,
    scalars_in,
)
from ampdoctor.health.reading.log_files import (
    SkippedLines,
    as_number,
    csv_rows,
    field_of,
    is_log,
    is_named_as_log,
    is_output,
    json_rows,
    known_fields,
    step_of,
    unread_in,
)
from ampdoctor.health.reading.log_kind import (
    Epochs,
    LineRows,
    LogKind,
    LogLocation,
    ReadIssues,
    Row,
    Unread,
    kind_of_one_file,
    lines_of,
    milliseconds,
    reading,
    row_of,
)

# The columns of a CSV file that W&B exports from a chart: metrics of runs, with their ranges.


_RANGES = ("__MIN", "__MAX")
_BETWEEN = " - "  # separates the name of a run and that of a metric: "ruby-sun-12 - train/loss"


def _metrics_of(header: Sequence[str], name: str) -> Sequence[str]:
    """Returns the metrics of columns, "" for ranges, the names of another table; CheckpointError for several runs."""
    ranges = {column for column in header if column.endswith(_RANGES)}
    found = {
        column: column.rpartition(_BETWEEN) for column in header if column + _RANGES[0] in ranges and _BETWEEN in column
    }
    runs = list(dict.fromkeys(run for run, _, _ in found.values()))
    if len(runs) > 1:
        raise CheckpointError(
            f"{name} is W&B's export of {len(runs)} runs, and a log is of one: export each by itself."
        )
    return ["" if column in ranges else found[column][2] if column in found else column for column in header]


_LIGHTNING = "metrics.csv"
_SOMETHING = frozenset({"loss", "gradient_norm", "loss_scale"})
_ADVERSARIES = frozenset({"g", "gen", "generator", "d", "disc", "discriminator", "critic"})
"""Parts that are no part of one loss: networks that train against each other."""
_TRIED = 1000  # rows in which a log must have a loss, a norm or a scale
_HEAD = 1024 * 1024  # bytes in which these rows must stand
_TABLES = frozenset({".csv", ".tsv"})
_ANY_CONTENT = frozenset({"", ".json", ".ndjson", ".dat", ".data", ".tab"})  # suffixes of logs and of other files
_MODES = ("mode", "split", "phase", "stage")  # columns that tell a row of the training from one of an evaluation
_EVALUATIONS = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev"})
_COUNTED = "no column says which step a row is of: the rows are counted"

_Values = Mapping[str, Any]


def _is_table(name: str) -> bool:
    return Path(name).suffix in _TABLES


def _delimiter(name: str, header: str) -> str:
    if Path(name).suffix == ".tsv" or ("\t" in header and "," not in header):
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def _is_header(line: str) -> bool:
    fields = {field_of(name.strip(' "')) for name in line.split(_delimiter("", line))}
    return len(fields) > 1 and "step" in fields and not fields.isdisjoint(_SOMETHING)


class TableRows(LineRows):
    """Makes rows from the lines of a table, or from lines that are JSON objects; its beginning decides the columns.

    Raises CheckpointError where it cannot be read, has more columns than a log, or is W&B's export of several runs.
    """

    def __init__(self, file: RegularFile) -> None:
        self._name = file.name
        head = _head_lines(file)
        self._table = _is_table(file.name) or (bool(head) and _is_header(head[0].decode("utf-8", "replace")))
        self._epochs = Epochs()
        self._count = 0
        self._unread = Unread()
        tried = list(islice(self._parsed(iter(head), SkippedLines()), _TRIED))
        fields = [_fields(row) for row in tried]
        self.is_empty = not tried
        self.says_something = any(map(_says_something, fields))
        self._step: Callable[[_Values, dict[str, float]], int | None] = self._by_step
        self.has_steps = any(step_of(row) is not None for row in fields)
        self.wrong_steps = not self.has_steps and any(
            "step" in row or ("step", False) in unread_in(values) for row, values in zip(fields, tried, strict=True)
        )
        if not self.has_steps and not self.wrong_steps:
            epochs = [epoch for row in tried if (epoch := _epoch(row)) is not None]
            rise = all(after > before for before, after in pairwise(epochs))
            whole = rise and all(epoch == int(epoch) for epoch in epochs)
            self._step = self._by_epoch if whole else self._by_count
            self.has_steps = bool(epochs)

    def rows(self, lines: Iterator[bytes], left: SkippedLines) -> Iterator[Row]:
        """As in `LineRows`."""
        for values in self._parsed(lines, left):
            fields = _fields(values)
            step = self._step(values, fields)
            if not _is_of_an_evaluation(values):
                self._unread.add(values, fields, step)
            if step is not None:
                yield Row(step, {name: one for name, one in fields.items() if name != "step"})

    def rest(self, noticed: ReadIssues) -> Iterator[Row]:
        """As in `LineRows`."""
        noticed.unread = self._unread
        if self._step == self._by_count:
            noticed.skipped.append(Skipped(what="the numbers of the steps", reason=_COUNTED))
        left = noticed.left[self._name]
        if self._table or not left.unfinished:
            return
        torn, last = SkippedLines(), left.unfinished
        yield from self.rows(iter([last]), torn)  # an object that can be parsed is whole
        if not torn.damaged:  # else it was not an object
            left.unfinished = b""

    def _parsed(self, lines: Iterator[bytes], left: SkippedLines) -> Iterator[_Values]:
        if not self._table:
            return json_rows(lines, left)
        name = self._name
        return csv_rows(lines, name, left, partial(_delimiter, name), partial(_metrics_of, name=name))

    def _by_step(self, values: _Values, fields: dict[str, float]) -> int | None:
        step = step_of(fields)
        return None if step is None else self._epochs.step(_epoch(values), step)

    def _by_epoch(self, values: _Values, fields: dict[str, float]) -> int | None:  # noqa: ARG002 - same signature
        epoch = _epoch(values)
        return None if epoch is None or epoch < 0 or epoch != int(epoch) else int(epoch)

    def _by_count(self, values: _Values, fields: dict[str, float]) -> int | None:
        if _epoch(values) is None or not _says_something(fields):
            return None
        self._count += 1
        return self._count


def _head_lines(file: RegularFile) -> list[bytes]:
    head = file.head(_HEAD)
    lines = [line for line in head.removeprefix(BYTE_ORDER_MARK).replace(b"\r", b"\n").split(b"\n") if line]
    return lines if len(head) == file.size else lines[:-1]


def _epoch(values: _Values) -> float | None:
    for key, value in values.items():
        if isinstance(key, str) and key.strip().lower() == "epoch":
            found = as_number(value)
            return found if found is not None and 0.0 <= found < 2.0**53 else None
    return None


def _fields(values: _Values) -> dict[str, float]:
    """Returns a row's fields, none for an evaluation; where only parts of the loss are there, it is their sum."""
    if _is_of_an_evaluation(values):
        return {}
    fields = known_fields(values)
    if "loss" not in fields:
        parts = [as_number(value) for key, value in values.items() if _is_part(key)]
        known = [part for part in parts if part is not None]
        if known:
            fields["loss"] = sum(known)
    return fields


def _says_something(fields: Mapping[str, float]) -> bool:
    return not fields.keys().isdisjoint(_SOMETHING)


def _is_of_an_evaluation(values: _Values) -> bool:
    return any(str(values.get(mode, "")).strip().lower() in _EVALUATIONS for mode in _MODES)


def _is_part(key: object) -> bool:
    name = key.strip().lower() if isinstance(key, str) else ""
    return name.startswith("train/") and name.endswith("_loss") and name[6:-5] not in _ADVERSARIES


def _is_a_log(place: LogLocation, name: str) -> bool:
    """Whether a file has steps, and a loss, a norm or a scale."""
    if ("table", name) not in place.known:
        found = False
        path = place.folder / name
        counted = ("output", name) in place.known  # its bytes, by the search for a job's output
        try:
            with RegularFile(path, name) as file:
                if place.named or (path not in place.budget.passed_by if counted else place.budget.left > 0):
                    place.budget.left -= 0 if counted else min(file.size, _HEAD)
                    made = TableRows(file)
                    found = made.has_steps and made.says_something
                    if made.says_something and made.wrong_steps:
                        place.refused[name] = f"the steps of {name} are no whole numbers from 0 on."
                    elif made.is_empty and is_named_as_log(name):
                        place.refused[name] = f"{name} {'has no row' if file.size else 'is empty'}."
                else:
                    place.budget.passed_by.add(path)
        except CheckpointError as error:
            place.refused[name] = str(error)
        place.known["table", name] = found
    return bool(place.known["table", name])


def _claims_lightning(place: LogLocation) -> Sequence[Sequence[str]]:
    return [[_LIGHTNING]] if _LIGHTNING in place.names and _is_a_log(place, _LIGHTNING) else ()


def _logs_of(place: LogLocation) -> list[str]:
    likely = [
        name
        for name in place.names
        if place.named or is_log(name) or _is_table(name) or is_output(name) or _begins_as_table(place, name)
    ]
    return [name for name in place.latest(likely) if _is_a_log(place, name)]


def _begins_as_table(place: LogLocation, name: str) -> bool:
    """Whether the first line is a table's or, as in mmengine's `scalars.json`, an object; other files are not read."""
    if Path(name).suffix not in _ANY_CONTENT:
        return False
    first, ended, _ = place.head(name, 64 * 1024).removeprefix(BYTE_ORDER_MARK).partition(b"\n")
    is_object = first.lstrip().startswith(b"{") and first.rstrip().endswith(b"}")
    return bool(ended) and (is_object or _is_header(first.decode("utf-8", "replace")))


LIGHTNING = LogKind(format="lightning", claims=_claims_lightning, read=reading(TableRows))
ANY_TABLE = kind_of_one_file("table", _logs_of, TableRows)


# -- `trainer_state.json` of the Hugging Face Trainer --

_NAME = "trainer_state.json"
_SUMMARY = "train_runtime"  # a key of the line that the Trainer writes at the end
_HIDES = (
    "the Trainer writes 0.0, or the mean of those before it, in place of a loss that is not finite, unless "
    "logging_nan_inf_filter=False; 0.0 beside a gradient norm that is not finite is read as NaN"
)


def _claims_trainer_state(place: LogLocation) -> Sequence[Sequence[str]]:
    if place.named:
        begins = place.head(place.names[0], 4).removeprefix(BYTE_ORDER_MARK).startswith(b"{")
        return [place.names] if begins and _holds_a_log(place) else ()
    return [[name] for name in place.names if name == _NAME or _is_history(place, name)]


def _is_history(place: LogLocation, name: str) -> bool:
    """Whether a file in a folder is a state of the Trainer under another name, whose keys are sorted."""
    return name.endswith(".json") and b'"log_history"' in place.head(name, 4096)


def _holds_a_log(place: LogLocation) -> bool:
    if place.names[0] == _NAME:
        return True
    if not place.names[0].endswith(".json"):
        return False
    try:
        with RegularFile(place.folder / place.names[0], place.names[0]) as file:
            return isinstance(read_json(file).get("log_history"), list)
    except CheckpointError as error:
        place.refused[place.names[0]] = str(error)
        return False


def _read_trainer_state(folder: Path, names: Sequence[str], noticed: ReadIssues) -> Iterator[LogRecord]:
    (name,) = names
    with RegularFile(folder / name, name) as file:
        content = read_json(file)
    history = content.get("log_history")
    if not isinstance(history, list):
        raise CheckpointError(f"{name} has no log_history: the Trainer has logged nothing.")
    known = [row for row in history if isinstance(row, dict)]
    noticed.left[name].damaged += len(history) - len(known)
    rows: list[Row] = []
    for values in known:
        fields = known_fields(values)
        row = row_of(fields)
        noticed.unread.add(values, fields, None if row is None else row.step)
        if row is not None:
            rows.append(row)
    if any("loss" in row.values for row in rows):
        noticed.skipped.append(Skipped(what=f"{name}: losses that are not finite", reason=_HIDES))
    ended = any(_SUMMARY in values for values in known)
    yield from lines_of(rows, RunLine(name=folder.name), noticed.order, ended=lambda: EndLine() if ended else None)


TRANSFORMERS = LogKind(format="transformers", claims=_claims_trainer_state, read=_read_trainer_state)


# -- TensorBoard's event files, of any framework: the files of one folder belong to one run --


def _claims_events(place: LogLocation) -> Sequence[Sequence[str]]:
    names = [name for name in place.names if is_event_file(name)]
    return [names] if names else ()


def _read_events(folder: Path, names: Sequence[str], noticed: ReadIssues) -> Iterator[LogRecord]:
    with ExitStack() as stack:
        files = [stack.enter_context(RegularFile(folder / name, name)) for name in names]
        yield from lines_of(_rows_of(files, noticed.skipped), RunLine(name=folder.name), noticed.order)


def _rows_of(files: Sequence[RegularFile], damaged: list[Skipped]) -> Iterator[Row]:
    """Yields a row for the events of a step, by time: a run may have several writers, and a restart comes later."""
    events = merge(*(scalars_in(file, damaged) for file in files), key=lambda event: event.wall_time)
    for step, together in groupby(events, key=lambda event: event.step):
        values: dict[str, float] = {}
        for event in together:
            values |= event.values
            written = event.wall_time
        fields = known_fields({**values, "step": step})
        del fields["step"]
        if fields:
            yield Row(step, fields, milliseconds(written))


TENSORBOARD = LogKind(format="tensorboard", claims=_claims_events, read=_read_events)


# -- the file of a W&B run (`run-ID.wandb`), online or offline, read without the library and the server --
#
# The file is a log in LevelDB's format. A record is a protobuf message of wandb_internal.proto; only the fields that
# lead to a logged number are read.

_MAGIC = b":W&B"
_HEADER = 7  # bytes before the first record
_HISTORY, _RUN, _EXIT = 2, 17, 18  # fields of a Record


def _claims_wandb(place: LogLocation) -> Sequence[Sequence[str]]:
    found = []
    for name in place.latest(name for name in place.names if name.endswith(".wandb")):
        if place.head(name, 4) == _MAGIC:
            found.append([name])
        else:
            place.refused.setdefault(name, f"{name} does not begin as the file of a W&B run.")
    return found


def _read_wandb(folder: Path, names: Sequence[str], noticed: ReadIssues) -> Iterator[LogRecord]:
    (name,) = names
    with RegularFile(folder / name, name) as file:
        run = _Run(name.removesuffix(".wandb").removeprefix("run-"))
        damaged: list[Skipped] = []
        yield from lines_of(run.rows(framed_records(file, _HEADER, damaged)), RunLine(name=run.name), noticed.order)
        noticed.skipped += damaged
    if run.exit_code is not None:
        yield LogRecord(Stamp(run_id=run.name, time_ms=run.time_ms), EndLine(exit_code=run.exit_code))


class _Run:
    """The run's exit code and last time, read from its records beside the rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_code: int | None = None
        self.time_ms = 0

    def rows(self, records: Iterator[bytes]) -> Iterator[Row]:
        for record in records:
            try:
                for number, wire, value in message_fields(record):
                    if (number, wire) == (_HISTORY, BYTES):
                        row = self._row(value)
                        if row is not None:
                            yield row
                    elif (number, wire) == (_EXIT, BYTES):
                        codes = [code for field, kind, code in message_fields(value) if (field, kind) == (1, VARINT)]
                        self.exit_code = codes[0] & 0xFF if codes else 0
            except ValueError:  # its checksum is right, but its format is unknown
                continue

    def _row(self, history: bytes) -> Row | None:
        values: dict[str, Any] = {}
        counted = 0
        for number, wire, value in message_fields(history):
            if (number, wire) == (1, BYTES):
                values |= _item(value)
            elif (number, wire) == (2, BYTES):
                counted = next((num for field, kind, num in message_fields(value) if (field, kind) == (1, VARINT)), 0)
        own = known_fields({key: value for key, value in values.items() if not key.startswith("_")})
        self.time_ms = milliseconds(values.get("_timestamp")) or self.time_ms
        told = values.get("_step")
        step = as_number(told if isinstance(told, int) else counted)
        return None if step is None else row_of({"step": step, **own}, self.time_ms)


def _item(data: bytes) -> dict[str, Any]:
    """Returns a HistoryItem's value by its key (1), or by its nested key (2) joined; the value is JSON (16)."""
    keys, text = [], b""
    for number, wire, value in message_fields(data):
        if wire == BYTES and number in (1, 2):
            keys.append(value.decode("utf-8", "replace"))
        elif (number, wire) == (16, BYTES):
            text = value
    try:
        return {"/".join(key for key in keys if key): json.loads(text)}
    except (ValueError, RecursionError):
        return {}


WANDB = LogKind(format="wandb", claims=_claims_wandb, read=_read_wandb)
