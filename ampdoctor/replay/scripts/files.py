"""What a script writes: on its way to the loop new files only, and in replayed steps no checkpoint."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.loop.halt import StepHalted
from ampdoctor.replay.guarding.changes import changes_note, is_users_file, told_of_changes, users_line

_SAVERS = (
    ("torch", "", "save"),
    ("numpy", "", "save"),
    ("numpy", "", "savez"),
    ("numpy", "", "savez_compressed"),
    ("safetensors.torch", "", "serialize_file"),  # what `save_file` asks, however early a script has taken hold of it
    ("safetensors.numpy", "", "serialize_file"),
    ("torch.distributed.checkpoint", "", "save"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("transformers.processing_utils", "ProcessorMixin", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
    ("accelerate.accelerator", "Accelerator", "save_state"),
    ("accelerate.accelerator", "Accelerator", "save_model"),
)
"""Functions that save what was trained: the module, the class or "", the name."""
_QUIET = {"WANDB_MODE": "disabled"}
"""Variables that keep a replay out of a record of experiments, where the user has not said otherwise."""

COPY = "replay in a copy of the folder, if that file is to stay as it is"
"""What to do about a file that a script's steps change."""


class _Stopped(StepHalted):
    """Ends what the script has begun; its `except Exception` does not swallow it."""


class Files:
    """The files of a script's runs.

    Args:
        name: The script's, for sentences.
        folders: Its folder, and the working folder.
        notes: Gets a sentence for each kind of thing that is done, or left out.
    """

    def __init__(self, name: str, folders: Iterable[str | Path], notes: list[str]) -> None:
        self._name, self._folders, self._notes = name, tuple(folders), notes
        self._made: set[Path] = set()
        self._told: set[str] = set()
        self._saves = True

    def note(self, kind: str, sentence: str) -> None:
        """Say something, once for each kind of thing.

        Args:
            kind: The kind.
            sentence: What is said.
        """
        if kind not in self._told:
            self._told.add(kind)
            self._notes.append(sentence)

    @contextmanager
    def guarded(self, left: Callable[[], bool]) -> Iterator[None]:
        """Inside, what an earlier run of the user's has written is not changed.

        Args:
            left: Has the script been left? What it would clean up or save then is stopped without a word.

        Raises:
            FactoryError: A file that was there would have been changed, and the script was stopped before.
        """
        stopped: list[str] = []

        def tell(did: str, place: Path) -> None:
            if left():
                raise _Stopped
            if not os.path.lexists(place):
                self._made.add(place)
                self.note("made", f"{self._name} {did} before its training loop, and so does each replay of it")
            elif not any(one in self._made for one in (place, *place.parents)):
                stopped.append(did)
                raise _Stopped

        def start() -> None:
            if left():
                raise _Stopped

        try:
            with told_of_changes(self._folders, tell, start):
                yield
        except (Exception, SystemExit, _Stopped):
            if not stopped:
                raise
        if stopped:
            raise FactoryError(
                f"the script {self._name} {stopped[0]} before its training loop, over a file that is there already, "
                f"and was stopped: let it write to another folder (its arguments follow --), or run it in a copy"
            )

    def closed(self, generator: Generator[Any, Any, Any]) -> None:
        """Close a generator that was left with the script: what its `finally` would write is stopped without a word.

        Args:
            generator: The user's.
        """

        def stop(_did: str, _place: Path) -> None:
            raise _Stopped

        with suppress(Exception, StepHalted), told_of_changes(self._folders, stop):
            generator.close()

    @contextmanager
    def asked_to_save(self) -> Iterator[None]:
        """Inside, functions that save checkpoints ask first whether they are to, and ever after under other names."""
        with ExitStack() as stack:
            for module, owner, name in _SAVERS:
                at = sys.modules.get(module)
                place = at if not owner else getattr(at, owner, None)
                if place is not None and name in vars(place):
                    stack.callback(setattr, place, name, vars(place)[name])
                    setattr(place, name, self._asking(vars(place)[name]))
            yield

    def _asking(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._saves:
                return original(*args, **kwargs)
            at = users_line().removeprefix(" at ") or self._name
            self.note("saved", f"{at} saves a checkpoint; replayed steps do not")
            return None

        return save

    @contextmanager
    def saving_nothing(self) -> Iterator[None]:
        """Inside, functions that save checkpoints do nothing, those that a script has imported by name as well."""
        before, self._saves = self._saves, False
        try:
            with self.asked_to_save():
                yield
        finally:
            self._saves = before

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Inside, the first change that is made to the user's files becomes a note."""

        def tell(did: str, _place: Path) -> None:
            self.note("tried", changes_note(did, COPY))

        with told_of_changes(self._folders, tell):
            yield


@contextmanager
def nothing_at_exit() -> Iterator[None]:
    """Inside, what the user's own code registers for the end of the process is not done."""
    original = atexit.register

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_users_file(sys._getframe(1).f_code.co_filename):  # noqa: SLF001 the one way up that makes no traceback
            return function
        return original(function, *args, **kwargs)

    atexit.register = register  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = original


@contextmanager
def out_of_the_records() -> Iterator[None]:
    """Inside, experiment trackers record nothing, unless the user has said how they are to run."""
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
