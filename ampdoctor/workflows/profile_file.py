"""Reading a saved profile: the JSON report of `profile`, given instead of a factory."""

from __future__ import annotations

import json
from pathlib import Path

from ampdoctor.errors import UsageError
from ampdoctor.evidence.ranges import RangeProfile

MAX_BYTES = 1 << 30
"""A profile of 1,000 modules has a few megabytes; what is larger than this is no profile."""


def is_profile(target: str) -> bool:
    """Does the target of `recommend` name a profile and not a factory? A factory has a colon after its file."""
    return target.endswith(".json")


def read_profile(path: str) -> RangeProfile:
    """Read what `ampdoctor profile --report json=PATH` wrote.

    Raises:
        UsageError: There is no such file, or it is no such report.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than any profile ({MAX_BYTES} bytes)")
        report = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such profile") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not the JSON that `ampdoctor profile --report json=FILE` writes") from None
    section = report.get("profile") if isinstance(report, dict) else None
    if not isinstance(section, dict):
        raise UsageError(f"{path} has no profile section: `ampdoctor profile FACTORY --report json=FILE` writes one")
    return RangeProfile.from_dict(section)
