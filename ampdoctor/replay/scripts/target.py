"""What a replay's target may be: a factory, or a script that trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ampdoctor.errors import FactoryError
from ampdoctor.replay.factory import Environment, load_factory
from ampdoctor.replay.scripts.script import Script
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import forget_working_folder
from ampdoctor.replay.user_modules import sure_factories_in


class Target(Protocol):
    """Makes fresh runs; a Protocol, because a factory is imported and called, and a script run to its training loop."""

    @property
    def name(self) -> str:
        """What the user wrote."""

    @property
    def path(self) -> tuple[str, ...]:
        """Folders that are first on `sys.path` while their code runs."""

    def user_code(self, what: str) -> AbstractContextManager[None]:
        """Surrounds the user's code, the run's callbacks included; `what` is the subject of an error's sentence."""

    def make(self, arguments: Mapping[str, Any] | None = None, *, batches: Any = None, loss: Any = None) -> TrainingRun:
        """Returns a fresh run."""


def load_target(
    target: str | Callable[..., Any],
    app_dir: str | None = None,
    *,
    environment: Environment | None = None,
    script_arguments: Sequence[str] = (),
    notes: list[str] | None = None,
) -> Target:
    """Returns what makes the runs; a factory is imported, a script not run yet.

    Args:
        target: A factory, as for `load_factory`, or the path of a script.
        app_dir: As for `load_factory`.
        environment: Makes the context manager around the user's code.
        script_arguments: What follows the file in `sys.argv` while its code runs.
        notes: Gets what there is to say of a script's replay, in sentences.

    Raises:
        FactoryError: There is no such factory, or a script has one, which is then to be named.
        UserCodeError: The import raised.
    """
    file = script_named(target) if isinstance(target, str) else None
    if file is None or not isinstance(target, str) or sure_factories_in(file):
        return load_factory(target, app_dir, environment=environment, script_arguments=script_arguments)
    forget_working_folder()
    folders = [file.parent, *([] if app_dir is None else [Path(app_dir).resolve()])]
    if app_dir is not None and not folders[-1].is_dir():
        raise FactoryError(f"--app-dir {app_dir!r} is not a folder")
    return Script(
        target,
        file,
        arguments=tuple(script_arguments),
        path=tuple(dict.fromkeys(map(str, folders))),
        environment=environment or contextlib.nullcontext,
        notes=[] if notes is None else notes,
    )


def script_named(target: str) -> Path | None:
    """Returns the script that a target names; None for a factory, a module, or what is not there."""
    path = Path(target.strip()).expanduser()
    return path.resolve() if path.suffix == ".py" and path.is_file() else None
