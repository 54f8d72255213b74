"""What a replay's target may be: a factory, a script that trains, or a bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from ampdoctor.errors import FactoryError, UsageError
from ampdoctor.replay.bundles.manifest import bundle_at
from ampdoctor.replay.bundles.target import BundleTarget
from ampdoctor.replay.factory import Environment, load_factory
from ampdoctor.replay.scripts.script import Script
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import forget_working_folder
from ampdoctor.replay.user_modules import sure_factories_in


class Target(Protocol):
    """Makes fresh runs; a Protocol, because a factory is called, a script run to its loop, and a bundle read."""

    @property
    def name(self) -> str:
        """What the user wrote."""

    @property
    def path(self) -> tuple[str, ...]:
        """Folders that are first on `sys.path` while their code runs."""

    @property
    def instead(self) -> str:
        """What to do about a file that its steps write, for the end of a sentence."""

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
    model: str | None = None,
) -> Target:
    """Returns what makes the runs; a factory is imported, a script not run yet.

    Args:
        target: A factory, as for `load_factory`; a script, by its path or as a module; or a bundle, by its folder or
            its manifest.
        app_dir: As for `load_factory`.
        environment: Makes the context manager around the user's code.
        script_arguments: What follows the file in `sys.argv` while its code runs.
        notes: Gets what there is to say of a script's replay, in sentences.
        model: The code that makes a bundle's model.

    Raises:
        UsageError: `model` is given for what is no bundle.
        FactoryError: There is no such factory, or a script has one, which is then to be named.
        UserCodeError: The import raised.
    """
    if isinstance(target, str) and bundle_at(target) is not None:
        around = environment or contextlib.nullcontext
        return BundleTarget(target, model=model, app_dir=app_dir, environment=around)
    if model is not None:
        raise UsageError(f"--model {model} makes the model of a bundle, and {target} is none")
    script = _script_named(target, app_dir) if isinstance(target, str) else None
    if script is None or not isinstance(target, str) or sure_factories_in(script[0]):
        return load_factory(target, app_dir, environment=environment, script_arguments=script_arguments)
    forget_working_folder()
    file, package = script
    folders = [str(file.parent)] if package is None else [str(_folder(app_dir))]  # as `python FILE`, `python -m MODULE`
    if app_dir is not None:
        folders.append(str(_folder(app_dir)))
    return Script(
        target,
        file,
        package=package,
        arguments=tuple(script_arguments),
        path=tuple(dict.fromkeys(folders)),
        environment=environment or contextlib.nullcontext,
        notes=[] if notes is None else notes,
    )


def _script_named(target: str, app_dir: str | None) -> tuple[Path, str | None] | None:
    """Returns the script that a target names, and the package of one that is named as a module; None for others."""
    path = Path(target.strip()).expanduser()
    if path.suffix == ".py":
        return (path.resolve(), None) if path.is_file() else None
    parts = target.strip().split(".")
    file = _folder(app_dir).joinpath(*parts).with_suffix(".py")
    if not all(part.isidentifier() for part in parts) or not file.is_file():
        return None
    return file, ".".join(parts[:-1])


def _folder(app_dir: str | None) -> Path:
    """Returns the folder in which modules are looked for first.

    Raises:
        FactoryError: There is no such folder.
    """
    folder = Path.cwd() if app_dir is None else Path(app_dir).resolve()
    if not folder.is_dir():
        raise FactoryError(f"--app-dir {str(app_dir)!r} is not a folder")
    return folder
