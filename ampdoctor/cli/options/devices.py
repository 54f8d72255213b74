"""Devices and numbers as people type them: `512`, `64x8`; `7e9`, `7B`, `350M`."""

from __future__ import annotations

import re

from ampdoctor.errors import UsageError

_DEVICES = re.compile(r"(?P<first>\d{1,9})(x(?P<each>\d{1,9}))?")
_NUMBER = re.compile(r"(?P<number>\d{1,15}(\.\d{1,6})?(e\d{1,2})?)(?P<unit>[kmbt]?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


def devices_of(option: str, text: str) -> tuple[int, int | None]:
    """Return how many devices there are, and how many on a node where that is said.

    Raises:
        UsageError: It is neither a number nor NODESxDEVICES, or there are none.
    """
    found = _DEVICES.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} {text}: devices are a number, or nodes x devices of a node, as in 512 or 64x8")
    first, each = int(found["first"]), found["each"]
    devices = first if each is None else first * int(each)
    if devices < 1:
        raise UsageError(f"{option} {text}: a job needs at least 1 device")
    return devices, None if each is None else int(each)


def parameters_of(option: str, text: str) -> float:
    """Return how many parameters a number means.

    Raises:
        UsageError: It is none, or less than 1.
    """
    found = _NUMBER.fullmatch(text.strip())
    number = 0.0 if found is None else float(found["number"]) * 10 ** _POWERS[found["unit"].lower()]
    if number < 1:
        raise UsageError(f"{option} {text}: parameters are a number, as in 7e9, 7B or 350M")
    return number


def bytes_each_of(option: str, text: str) -> tuple[float, float, float]:
    """Return the bytes of a parameter's weight, gradient and optimizer states.

    Raises:
        UsageError: It is not three numbers.
    """
    parts = text.split(",")
    try:
        weight, gradient, moments = (float(part) for part in parts)
    except ValueError:
        raise UsageError(
            f"{option} {text}: bytes of a parameter's weight, gradient and optimizer states, as in 2,2,12"
        ) from None
    return weight, gradient, moments
