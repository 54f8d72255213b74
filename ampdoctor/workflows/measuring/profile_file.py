"""A profile as one file: safetensors for the arrays, JSON in its header for the rest, and a checksum over both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from ampdoctor.checkpoints.formats.bounded_json import parse_json
from ampdoctor.checkpoints.formats.safetensors_file import looks_like_safetensors, read_safetensors
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError, LimitExceededError, UsageError
from ampdoctor.evidence.of_runs.ranges import PROFILE_MARK
from ampdoctor.ranges.profile import RangeProfile
from ampdoctor.ranges.profile_file import pack, unpack
from ampdoctor.workflows.opening.outputs import write_whole

MAX_BYTES = 1 << 30
"""A profile of 1,000 modules and 50 steps has about 50 MB."""
_CHECKSUM = "sha256"
_HINT = "`ampdoctor profile FACTORY --save FILE` writes one"


def write_profile(file: str, profile: RangeProfile) -> None:
    """Write a profile completely or not at all.

    Raises:
        OutputError: It cannot be written.
    """
    arrays, facts = pack(profile)
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(file, save(plain, metadata={PROFILE_MARK: text, _CHECKSUM: _checksum(plain, text)}))


def read_profile(path: str) -> RangeProfile:
    """Read what `write_profile` wrote; nothing in it is executed.

    Raises:
        UsageError: The file does not exist, is not a regular file or not a profile, is cut short, or was changed.
    """
    try:
        with RegularFile(Path(path), path) as file:
            if file.size > MAX_BYTES:
                raise UsageError(f"{path} is larger than any profile ({MAX_BYTES} bytes)")
            head = file.head(16)
            if not looks_like_safetensors(head):
                what = "a report, not a profile" if head.lstrip()[:1] == b"{" else "no profile"
                raise UsageError(f"{path} is {what}: {_HINT}")
            content = read_safetensors(file)
            facts, checksum = content.metadata.get(PROFILE_MARK), content.metadata.get(_CHECKSUM)
            if facts is None:
                raise UsageError(f"{path} is a safetensors file without a profile in it: {_HINT}")
            arrays = {name: stored.load().numpy() for name, stored in content.tensors.items()}
            file.require_unchanged()
    except CheckpointError as error:
        raise UsageError(f"the profile cannot be read: {error}") from None
    if checksum != _checksum(arrays, facts):
        raise UsageError(f"{path} was changed after it was written: its checksum does not match")
    try:
        return unpack(arrays, parse_json(facts.encode("utf-8", "surrogatepass"), path, strict=True))
    except (UsageError, LimitExceededError) as error:
        raise UsageError(f"the profile {path} cannot be read: {error}") from None
    except ValueError:
        raise UsageError(f"the profile {path} cannot be read: its facts are no JSON") from None


def _checksum(arrays: Mapping[str, NDArray[Any]], facts: str) -> str:
    """Returns the SHA-256 of everything. It finds accidents and edits; `unpack` checks the form."""
    digest = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
