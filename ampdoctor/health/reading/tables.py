"""Tables and JSON lines with the column names that trainers use: Lightning's `metrics.csv`, and any other."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import (
    BYTE_ORDER_MARK,
    Left,
    as_number,
    csv_rows,
    field_of,
    is_log,
    json_rows,
    known_fields,
    step_of,
    unread_in,
)
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.epochs import Epochs
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place, kind_of_one_file, reading
from ampdoctor.health.reading.rows import OF_A_NETWORK, Row, SkipCount
from ampdoctor.health.reading.unread import Unread
from ampdoctor.health.reading.wandb_export import metrics_of

_LIGHTNING = "metrics.csv"
_SOMETHING = frozenset({"loss", "grad_norm", "scale"})
_NETWORKS = {"g": "g", "gen": "g", "generator": "g", "d": "d", "disc": "d", "discriminator": "d", "critic": "d"}
"""What the networks of an adversarial training are called, and which of the two each is."""
_BESIDE = frozenset({"loss", "losses", "train", "training", "total", "a", "b"})
"""Words beside that name in the column of the network's whole loss; `loss_d_real` is a part of one."""
_TRIED = 1000
"""Rows by which a file is told from one of another kind: a log says a loss, a norm or a scale within these."""
_HEAD = 1024 * 1024
"""Bytes in which these rows stand."""
_TABLES = frozenset({".csv", ".tsv"})
_MODES = ("mode", "split", "phase", "stage")
"""Columns that say of a row whether it is of the training or of an evaluation."""
_EVALUATIONS = frozenset({"val", "valid", "validation", "eval", "evaluation", "test", "dev"})
_COUNTED = "no column says which step a row is of: the rows are counted"

_Values = Mapping[str, Any]


def _is_table(name: str) -> bool:
    return Path(name).suffix in _TABLES


def _delimiter(name: str, header: bytes) -> str:
    if Path(name).suffix == ".tsv" or (b"\t" in header and b"," not in header):
        return "\t"
    return ";" if b";" in header and b"," not in header else ","


def _is_header(line: bytes) -> bool:
    """Is a line that of the names of a table, whatever its file is called?"""
    names = line.decode("utf-8", "replace").split(_delimiter("", line))
    fields = {field_of(name.strip(' "')) for name in names}
    return len(names) > 1 and "step" in fields and not fields.isdisjoint(_SOMETHING)


class TableRows:
    """Makes rows of a table's lines, or of lines that are JSON objects.

    Args:
        file: The file; its beginning says what its columns are.

    Attributes:
        has_steps: Whether the beginning names steps, or epochs that rise.
        wrong_steps: Whether it has a column of steps that are none.
        says_something: Whether it says a loss, a norm or a scale.

    Raises:
        CheckpointError: It cannot be read, has more columns than a log, or is W&B's export of several runs.
    """

    def __init__(self, file: RegularFile) -> None:
        self._name = file.name
        head = _head_lines(file)
        self._table = _is_table(file.name) or (bool(head) and _is_header(head[0]))
        self._header: list[bytes] | None = None
        self._delimiter = ","
        self._metrics: Mapping[str, str] = {}
        self._epochs = Epochs()
        self._count = 0
        self._skips = SkipCount()
        self._unread = Unread()
        tried = list(islice(self._parsed(iter(head), Left()), _TRIED))
        self._header = None
        fields = [_fields(row) for row in tried]
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

    def rows(self, lines: Iterator[bytes], left: Left) -> Iterator[Row]:
        """As in `LineRows`."""
        for values in self._parsed(lines, left):
            if not _is_of_an_evaluation(values):
                self._unread.hear(values)
            fields = _fields(values)
            step = self._step(values, fields)
            if step is not None:
                yield Row(step, self._skips.of_a_step({name: one for name, one in fields.items() if name != "step"}))

    def end(self) -> EndLine | None:
        """As in `LineRows`: a table does not say."""
        return None

    def rest(self, noticed: Noticed) -> Iterator[Row]:
        """As in `LineRows`."""
        noticed.unread = self._unread
        if self._step == self._by_count:
            noticed.skipped.append(Skipped(what="the numbers of the steps", reason=_COUNTED))
        left = noticed.left[self._name]
        if self._table or not left.unfinished:
            return
        torn, last = Left(), left.unfinished
        yield from self.rows(iter([last]), torn)  # an object is whole where it can be read
        if not torn.damaged:  # else it was no object
            left.unfinished = b""

    def _parsed(self, lines: Iterator[bytes], left: Left) -> Iterator[_Values]:
        if not self._table:
            yield from json_rows(lines, left)
            return
        if self._header is None:
            self._header = [next(lines, b"")]
            self._delimiter = _delimiter(self._name, self._header[0])
            columns = next(csv.reader([self._header[0].decode("utf-8", "replace")], delimiter=self._delimiter), [])
            self._metrics = metrics_of(columns, self._name)
        rows = csv_rows(chain(self._header, lines), self._name, delimiter=self._delimiter, left=left)
        if not self._metrics:
            yield from rows
            return
        for row in rows:
            named = ((self._metrics.get(column, column), value) for column, value in row.items())
            yield {metric: value for metric, value in named if metric}

    def _by_step(self, values: _Values, fields: dict[str, float]) -> int | None:
        step = step_of(fields)
        return None if step is None else self._epochs.step(_epoch(values), step)

    def _by_epoch(self, values: _Values, fields: dict[str, float]) -> int | None:  # noqa: ARG002 - as the others
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
    """Returns a row's fields; none of a row of an evaluation. Where the loss has parts alone, it is their sum.

    Losses of two networks that train against each other are no parts of one.
    """
    if _is_of_an_evaluation(values):
        return {}
    fields = known_fields(values)
    networks = (
        {} if "loss" in fields else {key: side for key in values if isinstance(key, str) and (side := _network(key))}
    )
    if len(set(networks.values())) > 1:
        losses = {f"{OF_A_NETWORK}{key}": as_number(values[key]) for key in networks}
        return fields | {name: loss for name, loss in losses.items() if loss is not None}
    if "loss" not in fields:
        parts = [as_number(value) for key, value in values.items() if _is_part(key)]
        known = [part for part in parts if part is not None]
        if known:
            fields["loss"] = sum(known)
    return fields


def _says_something(fields: Mapping[str, float]) -> bool:
    return not fields.keys().isdisjoint(_SOMETHING) or any(name.startswith(OF_A_NETWORK) for name in fields)


@lru_cache(maxsize=1024)
def _network(column: str) -> str:
    """Returns which of two networks a column is the loss of, as `G_loss`, `loss_D`, `train/gen_loss`; "" for none."""
    words = re.findall(r"[a-z]+|[A-Z](?![a-z])|[A-Z][a-z]+", column)
    lower = [word.lower() for word in words]
    sides = {_NETWORKS[word] for word in lower if word in _NETWORKS}
    whole = "loss" in lower or "losses" in lower
    return sides.pop() if whole and len(sides) == 1 and {*lower} <= _BESIDE | _NETWORKS.keys() else ""


def _is_of_an_evaluation(values: _Values) -> bool:
    return any(str(values.get(mode, "")).strip().lower() in _EVALUATIONS for mode in _MODES)


def _is_part(key: object) -> bool:
    """Is a column's name that of a part of the training's loss, as `train/box_loss`?"""
    name = key.strip().lower() if isinstance(key, str) else ""
    return name.startswith("train/") and name.endswith("_loss")


def _is_a_log(place: Place, name: str) -> bool:
    """Does a file name steps, and a loss, a norm or a scale?"""
    if ("table", name) not in place.known:
        found = False
        try:
            with RegularFile(place.folder / name, name) as file:
                if place.named or place.budget.left > 0:
                    place.budget.left -= min(file.size, _HEAD)
                    made = TableRows(file)
                    found = made.has_steps and made.says_something
                    if made.says_something and made.wrong_steps:
                        place.refused[name] = f"the steps of {name} are no whole numbers from 0 on."
                else:
                    place.budget.passed_by += 1
        except CheckpointError as error:
            place.refused[name] = str(error)
        place.known["table", name] = found
    return bool(place.known["table", name])


def _claims_lightning(place: Place) -> Sequence[Sequence[str]]:
    return [[_LIGHTNING]] if _LIGHTNING in place.names and _is_a_log(place, _LIGHTNING) else ()


def _logs_of(place: Place) -> list[str]:
    likely = [
        name for name in place.names if place.named or is_log(name) or _is_table(name) or _json_lines(place, name)
    ]
    return [name for name in place.latest(likely) if _is_a_log(place, name)]


def _json_lines(place: Place, name: str) -> bool:
    """Does a file that is called JSON begin with an object in a line of its own, as mmengine's `scalars.json`?"""
    if not name.endswith(".json"):
        return False
    first, ended, _ = place.head(name, 64 * 1024).partition(b"\n")
    return bool(ended) and first.lstrip().startswith(b"{") and first.rstrip().endswith(b"}")


LIGHTNING = LogKind(format="lightning", claims=_claims_lightning, read=reading(TableRows), begin=TableRows)
ANY_TABLE = kind_of_one_file("table", _logs_of, TableRows)
