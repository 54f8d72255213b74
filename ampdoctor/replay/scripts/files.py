"""Protects files and process state from a script's runs: they write new files only, and replays save nothing."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import io
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from multiprocessing import context
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.library import Library

from ampdoctor.hooks.interfaces import StepHalted
from ampdoctor.hooks.torch_internals import replaced
from ampdoctor.replay.user_files import Stopped, audit_file_writes, changes_note, is_users_file, refusing, users_line

_SAVERS = (
    *((module, "", "save") for module in ("torch", "numpy", "torch.distributed.checkpoint")),
    *(("numpy", "", name) for name in ("savez", "savez_compressed")),
    # called by `save_file`, however early a script has imported that
    *((module, "", "serialize_file") for module in ("safetensors.torch", "safetensors.numpy")),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("transformers.processing_utils", "ProcessorMixin", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
    *(("accelerate.accelerator", "Accelerator", name) for name in ("save_state", "save_model")),
)
"""Functions that save what was trained: the module, the class or "", the name."""
_OPENERS = ((builtins, "open"), (io, "open"), (os, "open"))
"""Functions that open a file; for a protected file they open a null device."""
_CHANGERS = (
    *((os, name) for name in ("remove", "unlink", "rename", "replace", "truncate", "link", "symlink")),
    (shutil, "rmtree"),
)
"""Functions that change a file in other ways; for a protected file they do nothing."""
_QUIET = {"WANDB_MODE": "disabled"}
"""Variables that turn experiment trackers off in a replay, unless the user has set them."""

COPY = "replay in a copy of the folder, if that file is to stay as it is"
"""Advice about a file that a script's steps change."""


class _Spared(StepHalted):
    """Ends the opening or removal of a protected file; our wrappers catch it, so that callers do not see it."""


class Files:
    """The files of a script's runs, with its folder and the working folder; `notes` gets sentences."""

    def __init__(self, name: str, folders: Iterable[str | Path], notes: list[str]) -> None:
        self._name, self._folders, self._notes = name, tuple(folders), notes
        self._made: set[Path] = set()
        self._told: set[str] = set()
        self._saves = True
        self._asked = threading.local()

    def note(self, kind: str, sentence: str) -> None:
        """Add a sentence, once for each `kind`."""
        if kind not in self._told:
            self._told.add(kind)
            self._notes.append(sentence)

    @contextmanager
    def guarded(self, left: Callable[[], bool]) -> Iterator[None]:
        """Inside, a change of an earlier run's file raises FactoryError; once the script is `left`, nothing is said."""
        stopped: list[str] = []

        def tell(did: str, place: Path) -> None:
            if left():
                raise Stopped
            if not os.path.lexists(place):
                self._made.add(place)
                self.note("made", f"{self._name} {did} before its training loop, and so does each replay of it")
            elif not any(one in self._made for one in (place, *place.parents)):
                stopped.append(
                    f"the script {self._name} {did} before its training loop, over a file that is there already, and "
                    f"was stopped: let it write to another folder (its arguments follow --), or run it in a copy"
                )
                raise Stopped

        def start() -> None:
            if left():
                raise Stopped

        with refusing(stopped), audit_file_writes(self._folders, tell, start):
            yield

    def closed(self, generator: Generator[Any, Any, Any]) -> None:
        """Close a user's generator after the script was left; writes in its `finally` are stopped without a message."""

        def stop(_did: str, _place: Path) -> None:
            raise Stopped

        with suppress(Exception, StepHalted), audit_file_writes(self._folders, stop):
            generator.close()

    @contextmanager
    def asked_to_save(self) -> Iterator[None]:
        """Inside, functions that save checkpoints or write, remove and move files first check whether they may."""
        with ExitStack() as stack:
            for home, name in _OPENERS:
                stack.enter_context(replaced(home, name, self._sparing(getattr(home, name), _opened_nowhere)))
            for home, name in _CHANGERS:
                stack.enter_context(replaced(home, name, self._sparing(getattr(home, name), lambda *_, **__: None)))
            for module, owner, name in _SAVERS:
                at = sys.modules.get(module)
                place = at if not owner else getattr(at, owner, None)
                if place is not None and name in vars(place):
                    stack.enter_context(replaced(place, name, self._asking(vars(place)[name])))
            yield

    def _sparing(self, original: Any, instead: Callable[..., Any]) -> Any:
        """Wraps a function that does something else if it would change a protected file."""

        @functools.wraps(original)
        def changing(*args: Any, **kwargs: Any) -> Any:
            if self._saves:
                return original(*args, **kwargs)
            outer, self._asked.here = getattr(self._asked, "here", False), True
            try:
                return original(*args, **kwargs)
            except _Spared:
                return instead(original, *args, **kwargs)
            finally:
                self._asked.here = outer

        return changing

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
        """Inside, no file from before the script is changed, and functions that save do nothing."""
        before, self._saves = self._saves, False
        try:
            with audit_file_writes(self._folders, self._spare), self.asked_to_save():
                yield
        finally:
            self._saves = before

    def _spare(self, did: str, place: Path) -> None:
        if any(one in self._made for one in (place, *place.parents)):
            return
        if not os.path.lexists(place):
            self._made.add(place)
        elif getattr(self._asked, "here", False):
            self.note(
                "spared",
                f"what is there stays as it is, replayed steps do not write, move or remove it: the first is "
                f"{place.name}{users_line()}",
            )
            raise _Spared
        self.note("tried", changes_note(did, COPY))


def _opened_nowhere(original: Any, *args: Any, **kwargs: Any) -> Any:
    others = {name: value for name, value in kwargs.items() if name not in ("file", "path")}
    return original(os.devnull, *args[1:], **others)


def nothing_at_exit() -> AbstractContextManager[None]:
    """Inside, exit functions of the user's own code are not registered."""
    original = atexit.register

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_users_file(sys._getframe(1).f_code.co_filename):  # noqa: SLF001 the one way up that makes no traceback
            return function
        return original(function, *args, **kwargs)

    return replaced(atexit, "register", register)


@contextmanager
def out_of_the_records() -> Iterator[None]:
    """Inside, experiment trackers record nothing, unless the user has set their mode."""
    added = [name for name in _QUIET if name not in os.environ]
    os.environ.update({name: _QUIET[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


# -- registrations, which the whole process shares and which refuse a second time --
#
# A script runs more than once in one process, as if each run had its own. So its registrations are removed before it
# runs again: operators, the start method of processes, names in libraries' registries. If a setting cannot be undone
# (the number of interop threads), its second call is ignored.

_MAIN = "__main__"
_REGISTRIES = ("_extra_content", "_module_dict", "_obj_map", "_model_entrypoints")
"""Attributes of registries that raise for an existing name: transformers' Auto classes, mmengine's and mmcv's, fvcore's
and detectron2's, timm's."""
_OF = ("transformers", "mmengine", "mmcv", "fvcore", "detectron2", "iopath", "timm", "lightning_utilities")
"""Packages with such registries."""


class Registrations:
    """The registrations of one script's runs that have not been removed."""

    def __init__(self) -> None:
        self._libraries: list[Library] = []
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._start: Any = None
        self._begun = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, registrations by the user's code are recorded."""
        if not self._begun:
            self._begun = True
            self._start = context._default_context._actual_context  # type: ignore[attr-defined]  # noqa: SLF001
        made, threads, add_handler = Library.__init__, torch.set_num_interop_threads, logging.Logger.addHandler

        @wraps(made)
        def init(library: Library, *args: Any, **kwargs: Any) -> None:
            made(library, *args, **kwargs)  # type: ignore[no-untyped-call]
            if _by_user(sys._getframe(1)):  # noqa: SLF001 - whose call it is
                self._libraries.append(library)

        @wraps(threads)
        def set_threads(count: int) -> None:
            with contextlib.suppress(RuntimeError):  # torch has already run ops here; no number depends on it
                threads(count)

        @wraps(add_handler)
        def add(logger: logging.Logger, handler: logging.Handler) -> None:
            add_handler(logger, handler)
            if _by_user(sys._getframe(1)):  # noqa: SLF001 - whose call it is
                self._handlers.append((logger, handler))

        with (
            replaced(Library, "__init__", init),
            replaced(torch, "set_num_interop_threads", set_threads),
            replaced(logging.Logger, "addHandler", add),
        ):
            yield

    def undo(self) -> None:
        """Remove the registrations of earlier runs; code that calls their operators later gets the next run's."""
        while self._handlers:  # the next run adds its own, and a line would be logged twice
            logger, handler = self._handlers.pop()
            logger.removeHandler(handler)
        while self._libraries:
            self._libraries.pop()._destroy()  # noqa: SLF001 - torch has no public way
        if self._begun:
            context._default_context._actual_context = self._start  # type: ignore[attr-defined]  # noqa: SLF001
        for registry in _registries():
            for key in [key for key, value in registry.items() if _is_users(key) or _is_users(value)]:
                del registry[key]


_BY_SCRIPT: dict[str, Registrations] = {}


def registrations_of(file: str) -> Registrations:
    """Returns the registrations of a script in this process, whoever ran it."""
    return _BY_SCRIPT.setdefault(file, Registrations())


def _by_user(frame: FrameType | None) -> bool:
    """Is it called by the user's code, and not by a package during its import, which stays loaded?"""
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            return True
        if code.co_name == "<module>":
            return False
        frame = frame.f_back
    return False


def _registries() -> Iterator[MutableMapping[Any, Any]]:
    seen: set[int] = set()
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] not in _OF:
            continue
        for value in [module, *vars(module).values()]:
            try:
                own = vars(value)
            except TypeError:
                continue
            for attribute in _REGISTRIES:
                found = own.get(attribute)
                if isinstance(found, dict) and id(found) not in seen:
                    seen.add(id(found))
                    yield found


def _is_users(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)  # transformers: a slow and a fast tokenizer
    return any(_module_of(part) == _MAIN or is_users_file(_file_of(part)) for part in parts)


def _module_of(value: Any) -> str | None:
    return getattr(value, "__module__", None)


def _file_of(value: Any) -> str:
    functions = [member for member in [value, *getattr(value, "__dict__", {}).values()] if hasattr(member, "__code__")]
    return functions[0].__code__.co_filename if functions else "<unknown>"
