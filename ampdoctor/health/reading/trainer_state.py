"""`trainer_state.json` of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import read_json
from ampdoctor.checkpoints.log_files import BYTE_ORDER_MARK, known_fields
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.log_records import EndLine, RunLine, Stamped
from ampdoctor.evidence.report import Skipped
from ampdoctor.health.reading.log_kind import LogKind, Noticed, Place
from ampdoctor.health.reading.rows import Row, lines_of, row_of

_NAME = "trainer_state.json"
_SUMMARY = "train_runtime"
"""A key of the line that the Trainer writes at the end."""
_HIDES = (
    "the Trainer writes 0.0, or the mean of those before it, in place of a loss that is not finite, unless "
    "logging_nan_inf_filter=False; 0.0 beside a gradient norm that is not finite is read as NaN"
)


def _claims(place: Place) -> Sequence[Sequence[str]]:
    if place.named:
        begins = place.head(place.names[0], 4).removeprefix(BYTE_ORDER_MARK).startswith(b"{")
        return [place.names] if begins and _holds_a_log(place) else ()
    return [[_NAME]] if _NAME in place.names else ()


def _holds_a_log(place: Place) -> bool:
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


def _read(folder: Path, names: Sequence[str], noticed: Noticed) -> Iterator[Stamped]:
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
        noticed.unread.hear(values)
        row = row_of(known_fields(values))
        if row is not None:
            rows.append(row)
    if any("loss" in row.values for row in rows):
        noticed.skipped.append(Skipped(what=f"{name}: losses that are not finite", reason=_HIDES))
    ended = any(_SUMMARY in values for values in known)
    yield from lines_of(rows, RunLine(name=folder.name), noticed.order, ended=lambda: EndLine() if ended else None)


TRANSFORMERS = LogKind(format="transformers", claims=_claims, read=_read)
