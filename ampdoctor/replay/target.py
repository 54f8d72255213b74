"""The targets of a replay: a factory, a script that trains, or a bundle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from ampdoctor.errors import FactoryError, UsageError
from ampdoctor.package import working_folder
from ampdoctor.replay.bundles.classes import NamedCode
from ampdoctor.replay.bundles.read import Bundle, bundle_at
from ampdoctor.replay.factory import Environment, LoadedFactory, load_factory
from ampdoctor.replay.scripts.files import Files
from ampdoctor.replay.scripts.running import Runner
from ampdoctor.replay.scripts.script import Script
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import forget_working_folder, user_code
from ampdoctor.replay.user_files import forbid_training_and_writes
from ampdoctor.replay.user_modules import folder_of, sure_factories_in


class BundleTarget:
    """Makes fresh runs of a bundle's step; see `Target`."""

    instead: ClassVar[str] = "replay in a copy of the folder, if that file is to stay as it is"

    def __init__(
        self,
        name: str,
        *,
        model: str | None,
        app_dir: str | None,
        environment: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.name = name
        self._bundle = Bundle(name)
        self._environment = environment
        with environment():
            self._code = None if model is None else NamedCode(model, app_dir)
        here = str(working_folder()) if app_dir is None else str(Path(app_dir).resolve())
        self.path: tuple[str, ...] = (here,) if self._code is None else self._code.path

    @contextlib.contextmanager
    def user_code(self, what: str) -> Iterator[None]:
        """See `LoadedFactory.user_code`."""
        argv0 = None if self._code is None else self._code.argv0
        with self._environment(), user_code(argv0, what=what, path=self.path):
            yield

    def make(self, arguments: Mapping[str, Any] | None = None, *, batches: Any = None, loss: Any = None) -> TrainingRun:
        """See `Bundle.run`; a bundle takes no arguments (FactoryError)."""
        given = {"--arg": arguments, "--batches": batches, "--loss": loss}
        extra = [option for option, value in given.items() if value]
        if extra:
            raise FactoryError(f"{self.name} is a bundle, which has its own batches and loss: leave out {extra[0]}")
        return self._bundle.run(self._code, self._making)

    @contextlib.contextmanager
    def _making(self, what: str) -> Iterator[None]:
        with self.user_code(what), forbid_training_and_writes(what, (working_folder(), *self.path)):
            yield


Target = LoadedFactory | Script | BundleTarget
"""Makes fresh runs: a factory is called, a script is run to its loop, a bundle is read."""


def load_target(
    target: str | Callable[..., Any],
    app_dir: str | None = None,
    *,
    environment: Environment | None = None,
    script_arguments: Sequence[str] = (),
    notes: list[str] | None = None,
    model: str | None = None,
    shown: set[object] | None = None,
) -> Target:
    """Returns the maker of the runs; a factory is imported, a script is not run yet.

    `shown` holds the parts of the run whose output was shown, which is done once.
    """
    shown = set() if shown is None else shown
    if isinstance(target, str) and bundle_at(target) is not None:
        around = environment or contextlib.nullcontext
        return BundleTarget(target, model=model, app_dir=app_dir, environment=around)
    if model is not None:
        raise UsageError(f"--model {model} makes the model of a bundle, and {target} is none")
    script = _script_named(target, app_dir) if isinstance(target, str) else None
    if script is None or not isinstance(target, str) or sure_factories_in(script[0]):
        return load_factory(target, app_dir, environment=environment, script_arguments=script_arguments, shown=shown)
    forget_working_folder()
    file, package = script
    folders = [str(file.parent if package is None else folder_of(app_dir))]  # as `python FILE`, `python -m MODULE`
    if app_dir is not None:
        folders.append(str(folder_of(app_dir)))
    path = tuple(dict.fromkeys(folders))
    return Script(
        Runner(
            target,
            file,
            package=package,
            arguments=tuple(script_arguments),
            path=path,
            environment=environment or contextlib.nullcontext,
            files=Files(target, (Path.cwd(), *path), [] if notes is None else notes),
            shown=shown,
        )
    )


def _script_named(target: str, app_dir: str | None) -> tuple[Path, str | None] | None:
    path = Path(target.strip()).expanduser()
    if path.suffix == ".py":
        return (path.resolve(), None) if path.is_file() else None
    parts = target.strip().split(".")
    file = folder_of(app_dir).joinpath(*parts).with_suffix(".py")
    if not all(part.isidentifier() for part in parts) or not file.is_file():
        return None
    return file, ".".join(parts[:-1])
