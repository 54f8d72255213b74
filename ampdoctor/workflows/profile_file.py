"""Reading a saved profile: the JSON report of `profile`, given instead of a factory."""

from __future__ import annotations

import json
from pathlib import Path

from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError, UsageError
from ampdoctor.evidence.ranges import RangeProfile

MAX_BYTES = 1 << 30
"""A profile of 1,000 modules has a few megabytes; what is larger than this is no profile."""


def is_profile(target: str) -> bool:
    """Does the target of `recommend` name a profile and not a factory? A factory has a colon after its file."""
    return target.endswith(".json")


def read_profile(path: str) -> RangeProfile:
    """Read what `ampdoctor profile --report json=PATH` wrote.

    Raises:
        UsageError: There is no such regular file, or it is no such report.
    """
    try:
        with RegularFile(Path(path), path) as file:
            if file.size > MAX_BYTES:
                raise UsageError(f"{path} is larger than any profile ({MAX_BYTES} bytes)")
            text = file.read(0, file.size).decode("utf-8")
        report = json.loads(text)
    except CheckpointError as error:
        raise UsageError(f"the profile cannot be read: {error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not the JSON that `ampdoctor profile --report json=FILE` writes") from None
    section = report.get("profile") if isinstance(report, dict) else None
    if not isinstance(section, dict):
        raise UsageError(f"{path} has no profile section: `ampdoctor profile FACTORY --report json=FILE` writes one")
    return RangeProfile.from_dict(section)
