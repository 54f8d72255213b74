"""Text logs of a training, line by line within limits: the names of their columns, CSV and JSON lines."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import BYTE_ORDER_MARK
from ampdoctor.errors import LimitExceededError
from ampdoctor.evidence.log_text import kind_of
from ampdoctor.evidence.paths import rank_and_number

MAX_LINE = 1024 * 1024
"""Maximum number of characters of a line; no log has longer ones."""
MAX_LINES = 4_000_000
"""Maximum number of lines: as many as fit into the size above with a step and a loss each."""
MAX_COLUMNS = 10_000
_Item = TypeVar("_Item")
_BLOCK = 1024 * 1024
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio. Its multiples spread evenly over 32 bits and, unlike every n-th line, do not
coincide with a period of the log (two lines per step, say)."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    field: tuple(names.split())
    for field, names in {
        "step": "step global_step iteration iter num_updates update steps it",
        "loss": (
            "loss train_loss training_loss train_loss_step loss_step lm_loss train_loss_epoch total_loss "
            "reduced_train_loss step_loss"
        ),
        "gradient_norm": "grad_norm gradient_norm gnorm grad_norm_total grad_2.0_norm_total total_norm",
        "loss_scale": "loss_scale grad_scale scaler_scale amp_scale scale",
        "learning_rate": "learning_rate lr",
        "seconds": (
            "step_seconds step_duration_seconds step_time seconds_per_step iteration_time iter_time time_per_step"
        ),
        "data_seconds": "data_seconds data_time data_loading_time",
        "samples": "consumed_samples samples_seen num_samples_seen samples_total samples",
        "tokens": "num_input_tokens_seen tokens_seen consumed_tokens n_tokens tokens_total total_tokens tokens",
        "memory_bytes": "memory_bytes max_memory_bytes memory_active_peak_bytes",
    }.items()
}
"""Fields as in `StepLine`, and the names of their columns, the most specific first, as `_plain` normalises them."""
_OF_A_STEP, _OF_AN_EPOCH = "train_loss_step", "train_loss_epoch"
"""What Lightning calls a loss that is logged with `on_step` and `on_epoch`, in columns side by side."""
_RATE_OF_ONE = ("lr_", "lr/")
"""Prefix of the columns where Lightning's LearningRateMonitor, or Ultralytics, puts one rate each."""
_OURS = "ampdoctor/"
"""Prefix of a tag in ampdoctor's own exports."""

_FIELD_OF = {name: field for field, names in _NAMES.items() for name in names}
_Fields = dict[str, float]


@dataclass(slots=True)
class SkippedLines:
    """Counts the lines of a file that were left out."""

    damaged: int = 0  # cannot be read
    too_long: int = 0  # longer than a line of a log
    other_version: int = 0  # lines of ampdoctor's own log in a form of another version
    ambiguous: int = 0  # a key or column stands twice with different values, and readers disagree which counts
    unfinished: bytes = b""  # the last line if no newline ends it: it may be cut off inside a number

    def said(self) -> str:
        """Returns the lost lines as a clause, or "". An unfinished last line is not lost yet."""
        counts = (
            (self.damaged, "that is damaged", "that are damaged"),
            (self.too_long, "that is too long", "that are too long"),
            (self.other_version, "that another version of ampdoctor reads", "that another version of ampdoctor reads"),
            (self.ambiguous, "that has one name twice with different values", "that have one name twice"),
        )
        parts = [f"a line {one}" if count == 1 else f"{count:,} lines {many}" for count, one, many in counts if count]
        return f"it has {' and '.join(parts)}" if parts else ""


def is_log(name: str) -> bool:
    """Whether a file of this name is a log that is read here."""
    return name in {"metrics.csv", "log.txt", "logs.txt"} or name.endswith(".jsonl")


_OUTPUT_SUFFIXES = frozenset({".log", ".txt", ".out", ".stdout", ".err", ".stderr", ".o", ".e"})
_OUTPUTS = frozenset({"log", "stdout", "stderr", "output"})
_NUMBER = re.compile(r"[._-]?\d+$")  # of a rotated file (`train.log.1`), a job (`job.o123`) or a process (`stdout_3`)


def is_output(name: str) -> bool:
    """Whether a file of this name may be the output of a job."""
    unnumbered = Path(_NUMBER.sub("", name))
    return unnumbered.name in _OUTPUTS or unnumbered.suffix in _OUTPUT_SUFFIXES


def is_named_as_log(name: str) -> bool:
    """Whether only a log has this name: where such a file cannot be read, no other log shows that all is well."""
    return name in {"metrics.csv", "trainer_state.json"} or name.endswith(".wandb") or rank_and_number(name) is not None


def thinned(items: Iterable[_Item], limit: int) -> list[_Item]:
    """Returns all items; of more than `limit`, evenly chosen `limit / 2` to `limit`, with the first and the last."""
    kept: list[tuple[int, _Item]] = []
    share = 1 << 32
    at, last = -1, None
    for at, item in enumerate(items):
        last = item
        if at * _GOLDEN % (1 << 32) < share:
            kept.append((at, item))
            while len(kept) > limit:
                share = max(share // 2, 1)  # 0 is the place of the first item, which stays
                kept = [pair for pair in kept if pair[0] * _GOLDEN % (1 << 32) < share]
    ends = [last] if last is not None and kept[-1][0] != at else []
    return [item for _, item in kept] + ends


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    return (line.decode("utf-8", "replace") for line in lines)


def lines_in(file: RegularFile, longest: int = MAX_LINE, left: SkippedLines | None = None) -> Iterator[bytes]:
    """Yields the non-empty lines of a file that are no longer than `longest` bytes.

    `left` receives what is left out, and the last line if no newline ends it; without `left` that line is yielded.
    """
    rest, count = b"", 0
    left, last_too = left or SkippedLines(), left is None
    for start in range(0, file.size, _BLOCK):
        block = file.read(start, min(_BLOCK, file.size - start)).replace(b"\r", b"\n")
        *whole, rest = (rest + (block if start else block.removeprefix(BYTE_ORDER_MARK))).split(b"\n")
        lines = [line for line in whole if line and len(line) <= longest]
        left.too_long += sum(map(longest.__lt__, map(len, whole)))
        count += len(lines)
        if count > MAX_LINES:
            raise LimitExceededError(f"{file.name}: lines of a log", MAX_LINES, count)
        yield from lines
        rest = rest[: longest + 1]  # enough to see that the line is too long
    if len(rest) > longest:
        left.too_long += 1
    elif rest and last_too:
        yield rest
    else:
        left.unfinished = rest


def csv_rows(
    lines: Iterable[bytes],
    name: str,
    left: SkippedLines,
    delimiter_of: Callable[[str], str],
    columns_of: Callable[[Sequence[str]], Sequence[str]],
) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a table by the names in its first line; columns whose name is "" are left out.

    `left` counts lines that form no row: a quote that nothing closes, or a huge cell.
    """
    header: Sequence[str] | None = None
    delimiter, twice = ",", False
    for text in _quoted_together(_texts(lines)):
        if header is None:
            delimiter = delimiter_of(text)
        rows = [_cells(text, delimiter)]
        if "\n" in text and (header is None or rows[0] is None or len(rows[0]) != len(header)):
            rows = [_cells(line, delimiter) for line in text.split("\n")]  # two damaged lines, and what lies between
        left.damaged += rows.count(None)
        for row in filter(None, rows):
            if header is not None:
                pairs = ((column, value) for column, value in zip(header, row, strict=False) if column)
                yield _once(pairs, left) if twice else dict(pairs)
            elif len(row) > MAX_COLUMNS:
                raise LimitExceededError(f"{name}: columns of a table", MAX_COLUMNS, len(row))
            else:
                header = columns_of(row)
                named = list(filter(None, header))
                twice = len(set(named)) < len(named)


_MOST_LINES = 64  # of one row: a quote that these do not close is a damaged line's own


def _cells(text: str, delimiter: str) -> list[str] | None:
    try:
        return next(csv.reader([text], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return None


def _quoted_together(texts: Iterable[str]) -> Iterator[str]:
    """Joins the lines of a row whose quoted text goes on in the next line."""
    waiting: list[str] = []
    for text in texts:
        waiting.append(text)
        if sum(line.count('"') for line in waiting) % 2 == 0:
            yield "\n".join(waiting)
            waiting = []
        elif len(waiting) > _MOST_LINES:
            yield from waiting
            waiting = []
    yield from waiting


def json_rows(lines: Iterable[bytes], left: SkippedLines) -> Iterator[Mapping[str, Any]]:
    """Yields the objects among lines; other lines are skipped, and count as damaged if they begin like an object."""
    for line in _texts(lines):
        if not line.lstrip().startswith("{"):  # as in most texts, where trying would be slow
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict) and len(row) != line.count(":"):  # a key may stand twice
                row = json.loads(line, object_pairs_hook=lambda pairs: _once(pairs, left))
        except (ValueError, RecursionError):
            left.damaged += line.lstrip().startswith('{"')
            continue
        if isinstance(row, dict):
            yield row


def _once(pairs: Iterable[tuple[str, Any]], left: SkippedLines) -> dict[str, Any]:
    """Returns a row; of a name that stands twice, a value that is not finite, so that no other hides it."""
    row: dict[str, Any] = {}
    ambiguous = False
    for name, value in pairs:
        before = row.setdefault(name, value)
        if repr(before) != repr(value):
            ambiguous = True
            row[name] = before if _is_not_finite(before) else value
    left.ambiguous += ambiguous
    return row


def step_of(fields: Mapping[str, float]) -> int | None:
    """Returns the step among a row's fields; None unless it is a whole number."""
    step = fields.get("step")
    return int(step) if step is not None and 0 <= step < 2.0**53 and step == int(step) else None


def known_fields(row: Mapping[str, Any]) -> _Fields:
    """Returns the numbers of a row that have a meaning here, by field."""
    columns: dict[str, float] = {}
    for key, value in row.items():
        found = as_number(value)
        if found is not None and isinstance(key, str):
            before = columns.setdefault(_plain(key), found)
            if before is not found and not math.isfinite(found):  # of two columns none hides what is not finite
                columns[_plain(key)] = found
    if "train_runtime" in columns:  # the Trainer's summary of the whole run, under the number of its last step
        columns.pop("train_loss", None)
    if _OF_AN_EPOCH in columns and any(isinstance(key, str) and _plain(key) == _OF_A_STEP for key in row):
        del columns[_OF_AN_EPOCH]  # a mean over the epoch beside the losses of its steps
    known = {
        field: columns[name]
        for field, names in _NAMES.items()
        if (name := next((n for n in names if n in columns), None)) is not None
    }
    if "learning_rate" not in known:
        rate = next((value for name, value in columns.items() if name.startswith(_RATE_OF_ONE)), None)
        known |= {} if rate is None else {"learning_rate": rate}
    return known


def unread_in(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields the fields whose columns in this row hold no number, each with whether all are empty."""
    unread: dict[str, bool] = {}
    read: set[str] = set()
    for key, value in row.items():
        field = field_of(key) if isinstance(key, str) else None
        if field is None or (value in (None, "") and _plain(key) == _OF_AN_EPOCH):  # written when the epoch ends
            continue
        if as_number(value) is not None:
            read.add(field)
        else:
            empty = value is None or (isinstance(value, str) and not value.strip())
            unread[field] = unread.get(field, True) and empty
    yield from ((field, empty) for field, empty in unread.items() if field not in read)


def field_of(column: str) -> str | None:
    """Returns the field of a column of this name; None if it has no meaning here."""
    return _FIELD_OF.get(_plain(column))


@lru_cache(maxsize=1024)
def _plain(column: str) -> str:
    """Returns a column's name in lower case, words joined by "_", without its split ("train/loss", "Loss/train")."""
    name = re.sub(r"[\s-]+", "_", column.strip().lower()).removeprefix(_OURS)
    before, _, after = name.rpartition("/")
    if before in {"train", "training", "optim", "optimizer", "amp"}:
        return after
    return before if before and after in {"train", "training"} else name


def as_number(value: Any) -> float | None:
    """Returns a number, even one in a string ("nan"), as some trainers write them."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_not_finite(value: Any) -> bool:
    number = as_number(value)
    return number is not None and not math.isfinite(number)


# -- the log of `ampdoctor run` --

MAX_BYTES = 8 * 1024 * 1024
"""Maximum length of a line: a table of 100,000 names."""
HEAD = 64
"""Bytes from which the first line of a run's log is recognised."""


def begins_run_log(head: bytes) -> bool:
    """Whether a log that ampdoctor writes begins with these `HEAD` bytes."""
    return kind_of(head.removeprefix(BYTE_ORDER_MARK)) == "run"
