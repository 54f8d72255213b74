"""What was named to be run: a file, a folder or an archive with a `__main__.py`, or a module."""

from __future__ import annotations

import os
import pkgutil
from dataclasses import dataclass
from typing import Literal

from ampdoctor.errors import UsageError

Kind = Literal["file", "container", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script and its arguments.

    Attributes:
        named: As it was typed: a path, or a module's name.
        arguments: What follows it.
        kind: `file`: Python's source, or compiled. `container`: a folder or a zip archive whose `__main__` is meant.
            `module`: what `-m` names.
    """

    named: str
    arguments: tuple[str, ...] = ()
    kind: Kind = "file"

    @property
    def path(self) -> str:
        """The absolute path as Python has it in `__file__`: what was typed behind the working directory."""
        return self.named if os.path.isabs(self.named) else f"{os.getcwd()}{os.sep}{self.named}"  # noqa: PTH109, PTH117


def script_at(path: str, arguments: tuple[str, ...] = ()) -> Script:
    """Returns the script at a path.

    Raises:
        UsageError: There is none, or Python cannot run what is there.
    """
    if not os.path.exists(path):  # noqa: PTH110 - as it was typed
        raise UsageError(f"there is no file {path}")
    contained = pkgutil.get_importer(path) is not None
    if contained and os.path.isdir(path) and not _has_main(path):  # noqa: PTH112
        raise UsageError(f"{path} is a folder without a __main__.py: name a script in it")
    if not contained and not os.path.isfile(path) and os.path.isdir(path):  # noqa: PTH112, PTH113
        raise UsageError(f"{path} is a folder: name a script in it")
    return Script(named=path, arguments=arguments, kind="container" if contained else "file")


def _has_main(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, f"__main__{end}")) for end in (".py", ".pyc"))  # noqa: PTH113, PTH118
