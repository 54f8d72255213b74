"""A bundle as what a replay is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from ampdoctor.errors import FactoryError
from ampdoctor.package import working_folder
from ampdoctor.replay.bundles.named_code import NamedCode
from ampdoctor.replay.bundles.reading import Bundle
from ampdoctor.replay.guarding.building import building
from ampdoctor.replay.training_run import TrainingRun
from ampdoctor.replay.user_code import user_code


class BundleTarget:
    """Makes fresh runs of a bundle's step; as `scripts.target.Target`.

    Args:
        name: What the user wrote.
        model: What `--model` says.
        app_dir: First folder of the import path.
        environment: Makes the context manager around the user's code.

    Raises:
        CheckpointError: It is no bundle, or its manifest is malformed.
        FactoryError: `--model` names nothing.
        UserCodeError: Its code raised.
    """

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
        """As in `Target`."""
        argv0 = None if self._code is None else self._code.argv0
        with self._environment(), user_code(argv0, what=what, path=self.path):
            yield

    def make(self, arguments: Mapping[str, Any] | None = None, *, batches: Any = None, loss: Any = None) -> TrainingRun:
        """As in `Target`; a bundle takes no arguments, and has its batches and its loss.

        Raises:
            FactoryError: It is given some; or the model cannot be made.
            CheckpointError: A file is malformed.
            ReplayError: The step cannot be run again.
        """
        given = {"--arg": arguments, "--batches": batches, "--loss": loss}
        extra = [option for option, value in given.items() if value]
        if extra:
            raise FactoryError(f"{self.name} is a bundle, which has its own batches and loss: leave out {extra[0]}")
        return self._bundle.run(self._code, self._making)

    @contextlib.contextmanager
    def _making(self, what: str) -> Iterator[None]:
        with self.user_code(what), building(what, (working_folder(), *self.path)):
            yield
