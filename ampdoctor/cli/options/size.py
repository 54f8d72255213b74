"""Sizes as people type them: `512MB`, `4GB`, `1.5GiB`, `2g`."""

from __future__ import annotations

import re

from ampdoctor.errors import UsageError

_SIZE = re.compile(r"(?P<number>\d{1,12}(\.\d{1,6})?) ?(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(option: str, text: str) -> int:
    """Return the bytes that a size means: thousands of thousands, with an `i` powers of 1024, without a unit bytes.

    Raises:
        UsageError: It is none, or less than a byte.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found["binary"] and not found["unit"]):
        raise UsageError(f"{option} {text}: a size is a number with its unit, as in 512MB or 4GB")
    size = int(float(found["number"]) * (1024 if found["binary"] else 1000) ** _POWERS[found["unit"].lower()])
    if size < 1:
        raise UsageError(f"{option} {text}: that is not one byte")
    return size
