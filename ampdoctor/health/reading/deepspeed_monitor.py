"""The folder of DeepSpeed's CSV monitor: one table for each number, `Train_Samples_train_loss.csv` and its like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from heapq import merge
from pathlib import Path

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.log_files import as_number, lines_in
from ampdoctor.evidence.log_records import RunLine, Stamped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place
from ampdoctor.health.reading.rows import Row, lines_of

_FILES = {
    "Train_Samples_train_loss.csv": "loss",
    "Train_Samples_lr.csv": "learning_rate",
    "Train_Samples_loss_scale.csv": "loss_scale",
    "Train_Samples_grad_norm.csv": "gradient_norm",
}


def _claims(place: Place) -> Sequence[Sequence[str]]:
    names = [name for name in _FILES if name in place.names]
    return [names] if names else ()


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
    with ExitStack() as stack:
        tables = [
            _column(stack.enter_context(RegularFile(folder / name, name)), _FILES[name], noticed) for name in names
        ]
        rows = _by_samples(merge(*tables, key=lambda one: one[0]))
        yield from lines_of(rows, RunLine(name=folder.name), noticed.order)


def _column(file: RegularFile, field: str, noticed: Noticed) -> Iterator[tuple[int, int, str, float]]:
    """Yields (start of the run, samples, field, value): each start writes the header again."""
    start, last = 0, -1
    left = noticed.left[file.name]
    for line in lines_in(file, left=left):
        samples, value = (as_number(part) for part in (*line.decode("utf-8", "replace").split(","), "", "")[:2])
        if samples is None and line.startswith(b"step"):
            continue
        if samples is None or value is None or not 0 <= samples < 2.0**53:
            left.damaged += 1
            continue
        if samples <= last:
            start += 1
        last = int(samples)
        yield start, last, field, value


def _by_samples(found: Iterator[tuple[int, int, str, float]]) -> Iterator[Row]:
    """Yields a row for each number of samples; the tables know no steps, so that they are counted."""
    rows: dict[tuple[int, int], Row] = {}
    for start, samples, field, value in found:
        row = rows.setdefault((start, samples), Row(0, {"samples": float(samples)}))
        row.values[field] = value
    ordered = sorted(rows)
    batch = min((samples for _, samples in ordered if samples), default=1)
    for key in ordered:
        rows[key].step = key[1] // batch
        yield rows[key]


DEEPSPEED_MONITOR = LogKind(format="deepspeed", claims=_claims, read=_read)
