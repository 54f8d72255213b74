"""Facts about the package: its version, its folder, and how to run it in another process."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

FOLDER = Path(__file__).parent
"""Frames of files below this folder are ours, not the user's."""


@cache
def version() -> str:
    """The installed version; "0+unknown" in a source tree that was never installed."""
    try:
        return installed_version("ampdoctor")
    except PackageNotFoundError:
        return "0+unknown"


def beside(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `main` of one of our modules in another Python process; [] where there is none.

    It runs this ampdoctor and no other. Our folder comes last on its path, since it may also hold other libraries.
    """
    start = (
        "import sys; place = sys.argv.pop(1); sys.path.insert(0, place); import ampdoctor; del sys.path[0]; "
        f"sys.path.append(place); from {module} import main; main()"
    )
    return [sys.executable, "-P", "-c", start, str(FOLDER.parent), *arguments] if sys.executable else []


def working_folder() -> Path:
    """Return the working directory; the root where it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(Path(__file__).anchor)
