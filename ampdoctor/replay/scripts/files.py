"""What a script writes: on its way to the loop new files only, and in replayed steps no checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.loop.halt import StepHalted
from ampdoctor.replay.guarding.changes import told_of_changes, users_line

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

        try:
            with told_of_changes(self._folders, tell):
                yield
        except (Exception, SystemExit, _Stopped):
            if not stopped:
                raise
        if stopped:
            raise FactoryError(
                f"the script {self._name} {stopped[0]} before its training loop, over a file that is there already, "
                f"and was stopped: let it write to another folder (its arguments follow --), or run it in a copy"
            )

    @contextmanager
    def saving_nothing(self) -> Iterator[None]:
        """Inside, functions that save checkpoints do nothing."""

        def skipped(*_: Any, **__: Any) -> None:
            at = users_line().removeprefix(" at ") or self._name
            self.note("saved", f"{at} saves a checkpoint; replayed steps do not")

        with ExitStack() as stack:
            for module, owner, name in _SAVERS:
                at = sys.modules.get(module)
                place = at if not owner else getattr(at, owner, None)
                if place is not None and name in vars(place):
                    stack.callback(setattr, place, name, vars(place)[name])
                    setattr(place, name, skipped)
            yield


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
