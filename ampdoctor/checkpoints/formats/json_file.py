"""Small JSON files beside the tensors: the index of a sharded model and the Hugging Face Trainer's log.

They are plain data, never configuration to act on.
"""

from __future__ import annotations

from typing import Any

from ampdoctor.checkpoints.formats.bounded_json import parse_json
from ampdoctor.checkpoints.formats.log_files import BYTE_ORDER_MARK, as_number, thinned
from ampdoctor.checkpoints.storage.files import RegularFile, plain_name
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.checkpoint_stats import LogEntry

MAX_JSON_BYTES = 64 * 1024 * 1024
"""An index of 100,000 tensors has about 10 MB; a Trainer's log of a million entries about 50 MB."""


def read_json(file: RegularFile) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
        CheckpointError: It is not JSON, or not an object.
        LimitExceededError: It is larger than `MAX_JSON_BYTES`.
    """
    if file.size > MAX_JSON_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of JSON", MAX_JSON_BYTES, file.size)
    try:
        content = parse_json(file.read(0, file.size).removeprefix(BYTE_ORDER_MARK), file.name, strict=False)
    except ValueError:
        raise CheckpointError(f"{file.name} is not valid JSON.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} is not a JSON object.")
    return content


def read_weight_map(file: RegularFile) -> dict[str, str] | None:
    """Maps tensor names to shard names, from a sharded model's index; None if the JSON is not an index.

    Raises:
        CheckpointError: A shard's name is not a plain file name, or the file is malformed.
    """
    content = read_json(file)
    table = content.get("weight_map")
    if not isinstance(table, dict):
        return None
    if not table:
        raise CheckpointError(f"{file.name} lists no tensors.")
    return {key: plain_name(shard, file.name) for key, shard in table.items()}


def read_trainer_state(file: RegularFile) -> tuple[int | None, tuple[LogEntry, ...]]:
    """Returns global step and log of a `trainer_state.json`; a longer log is thinned evenly to `MAX_PARSED` lines.

    Raises:
        CheckpointError: The file is malformed.
    """
    content = read_json(file)
    step = content.get("global_step")
    history = content.get("log_history")
    entries = (
        [_log_entry(row) for row in thinned(history) if isinstance(row, dict)] if isinstance(history, list) else []
    )
    kept = tuple(e for e in entries if e is not None)
    return (step if type(step) is int and 0 <= step < 2**63 else None), kept


def _log_entry(row: dict[str, Any]) -> LogEntry | None:
    step, loss, norm = row.get("step"), as_number(row.get("loss")), as_number(row.get("grad_norm"))
    if type(step) is not int or abs(step) >= 2**63 or (loss is None and norm is None):
        return None
    return LogEntry(
        step=step,
        loss=loss,
        grad_norm=norm,
        learning_rate=as_number(row.get("learning_rate")),
        scale=as_number(row.get("loss_scale")),
    )
