"""What the package knows of itself: its version, its folder, and how it is run beside this process."""

from __future__ import annotations

import sys
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


def beside(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `main` of a module of this package in a Python of its own; [] where there is none.

    It runs this ampdoctor and no other, whose folder it puts behind all others: a library's may lie beside it.
    """
    start = (
        "import sys; place = sys.argv.pop(1); sys.path.insert(0, place); import ampdoctor; del sys.path[0]; "
        f"sys.path.append(place); from {module} import main; main()"
    )
    return [sys.executable, "-P", "-c", start, str(FOLDER.parent), *arguments] if sys.executable else []


def working_folder() -> Path:
    """Where this process works; the root where somebody has deleted that folder."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(Path(__file__).anchor)
