"""What the package knows of itself: its version and its folder."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the package lies: frames of files below it are ours, not the user's."""


@cache
def version() -> str:
    """The installed version; "0+unknown" in a source tree that was never installed."""
    try:
        return installed_version("ampdoctor")
    except PackageNotFoundError:
        return "0+unknown"
