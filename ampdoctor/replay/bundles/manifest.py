"""The manifest's schema number, the names of a bundle's files, and the bounded reading of the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import parse_json
from ampdoctor.errors import CheckpointError, LimitExceededError
from ampdoctor.evidence.json_records import DuplicateKeyError

SCHEMA = 3
"""It rises when an older reader would misread a newer bundle; bundles of another schema are refused."""
MANIFEST, CALLS, STATE, LOG = "manifest.json", "calls.safetensors", "state.safetensors", "log.jsonl"
_LARGEST = 32 * 1024 * 1024  # bytes; the manifest of 1000 micro-batches with their loss code has a few MB


def bundle_at(target: str) -> Path | None:
    """Returns the bundle's folder if the path is the folder or its manifest, else None."""
    path = Path(target).expanduser()
    folder = path.parent if path.name == MANIFEST else path
    try:
        return folder if (folder / MANIFEST).is_file() and (folder / CALLS).exists() else None
    except OSError:
        return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a bundle's manifest."""
    name = f"{folder.name}/{MANIFEST}"
    with RegularFile(folder / MANIFEST, name) as file:
        if file.size > _LARGEST:
            raise LimitExceededError(f"{name}: bytes", _LARGEST, file.size)
        try:
            content = parse_json(file.read(0, file.size), name, strict=True)
        except DuplicateKeyError as error:
            raise CheckpointError(f"{name} has the key {error.key[:80]!r} twice; refused.") from None
        except ValueError as error:
            raise CheckpointError(f"{name} is not valid JSON ({type(error).__name__}).") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise CheckpointError(f"{name} is no manifest of a bundle.")
    if content["schema"] != SCHEMA:
        raise CheckpointError(
            f"{name} has the schema {str(content['schema'])[:20]!r}, and this ampdoctor reads {SCHEMA}."
        )
    return content
