"""What Typer says when it refuses a command line; it keeps its exception types to itself, so attributes must tell."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

_PYDANTICS = "Value error, "
"""What the validation behind typer puts before the sentence about a choice."""


def is_usage_error(error: BaseException) -> bool:
    """Whether Typer refused the command line."""
    return callable(getattr(error, "format_message", None)) and isinstance(getattr(error, "exit_code", None), int)


def said_by(error: Any) -> str:
    """Return its sentence, with the option that it is about, and of the possible ones those that are alike."""
    possible = getattr(error, "possibilities", None)
    if possible:  # the two hyphens that all begin with count for them there
        alike = get_close_matches(error.option_name.strip("-"), [name.strip("-") for name in possible])
        error.possibilities = [name for name in possible if name.strip("-") in alike]
    return str(error.format_message()).replace(_PYDANTICS, "", 1)


def said_of_the_value(error: Any) -> str:
    """Return its sentence about the value alone: for a value that came by no option."""
    return str(error.message).replace(_PYDANTICS, "", 1)
