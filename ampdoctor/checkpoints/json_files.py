"""JSON files of a checkpoint, read within limits: an index of shards, a trainer's state."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from ampdoctor.checkpoints.files import RegularFile, plain_name, shown
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.json_records import DuplicateKeyError, unique_keys

MAX_VALUE_BYTES = 160 * 1024 * 1024
"""Memory for the values of a JSON text: enough for a safetensors header of 160,000 tensors."""

_COSTS = ((b"{", 232), (b"[", 88), (b",", 48), (b":", 40))
"""Bytes of memory for each mark of objects, lists and items. Marks in strings count, too; names hold few."""


def parse_json(raw: bytes, name: str, *, strict: bool) -> Any:
    """Returns the value of a JSON text in UTF-8; raises ValueError, or LimitExceededError if it is too large.

    Duplicate keys are refused (DuplicateKeyError); `strict` refuses NaN, infinities and halves of surrogate pairs too.
    """
    # text takes up to four bytes per character, even if few need them; it is held twice, whole and in pieces
    cost = (2 if raw.isascii() else 8) * len(raw) + sum(each * raw.count(mark) for mark, each in _COSTS)
    if cost > MAX_VALUE_BYTES:
        raise LimitExceededError(f"{name}: bytes of JSON values", MAX_VALUE_BYTES, cost)
    constant: Callable[[str], Any] | None = _no_constant if strict else None
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=constant)
        if strict and b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nesting") from None
    return value


def _no_constant(token: str) -> NoReturn:
    raise ValueError(token)


# -- small JSON files beside the tensors: plain data, never configuration to act on --

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some editors and spreadsheets write it at the beginning of a text."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""An index of 100,000 tensors has about 10 MB; a Trainer's log of a million entries about 50 MB."""


def read_json(file: RegularFile) -> dict[str, Any]:
    """Returns the object in a JSON file."""
    if file.size > MAX_JSON_BYTES:
        raise LimitExceededError(f"{file.name}: bytes of JSON", MAX_JSON_BYTES, file.size)
    try:
        content = parse_json(file.read(0, file.size).removeprefix(BYTE_ORDER_MARK), file.name, strict=False)
    except DuplicateKeyError as error:
        raise CheckpointError(f"{file.name} has the key {shown(error.key)} twice; refused.") from None
    except ValueError:
        raise CheckpointError(f"{file.name} is not valid JSON.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} is not a JSON object.")
    return content


def read_weight_map(file: RegularFile) -> dict[str, str] | None:
    """Maps tensor names to shard names, from a sharded model's index; None if the JSON is not an index."""
    content = read_json(file)
    table = content.get("weight_map")
    if not isinstance(table, dict):
        return None
    if not table:
        raise CheckpointError(f"{file.name} lists no tensors.")
    return {key: plain_name(shard, file.name) for key, shard in table.items()}


def read_global_step(file: RegularFile) -> int | None:
    """Returns the global step of a `trainer_state.json`."""
    step = read_json(file).get("global_step")
    return step if type(step) is int and 0 <= step < 2**63 else None
