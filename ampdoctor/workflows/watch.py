"""Watches a script from before its first line (`ampdoctor run`), or a loop from inside (`ampdoctor.watch`)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampdoctor.errors import SickTrainingError, StoppedError, UsageError
from ampdoctor.hooks.interfaces import when_imported
from ampdoctor.workflows.log_listeners import OnAlert, exports_of
from ampdoctor.workflows.output_files import give_back, usual_folder
from ampdoctor.workflows.requests import (
    USUAL_BUNDLE_BYTES,
    USUAL_EVERY,
    USUAL_GOOD_BYTES,
    USUAL_PROBATION,
    Look,
    OnSick,
    WatchRequest,
)

if TYPE_CHECKING:
    import torch

    from ampdoctor.evidence.report import Report
    from ampdoctor.health.sinks.sink import Sink
    from ampdoctor.workflows.watcher import TrainingWatcher

_log = logging.getLogger("ampdoctor")


@dataclass(slots=True, eq=False)
class Watch:
    """A watch over a training, which may have ended.

    Attributes:
        folder: Folder of the log and the bundles.
    """

    folder: str
    _doctor: TrainingWatcher = field(repr=False)

    @property
    def report(self) -> Report | None:
        """The diagnosis of the first sick step; None as long as there is none."""
        return self._doctor.report


@contextmanager
def watch(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    every: int = USUAL_EVERY,
    on_sick: OnSick = "record",
    look: Look = "auto",
    guard: bool = False,
    bundle: bool = True,
    bundle_max: int = USUAL_BUNDLE_BYTES,
    record_batches: int = 0,
    export: Iterable[str | Sink] = (),
    checkpoints: str | os.PathLike[str] | None = None,
    probation: int = USUAL_PROBATION,
    good_max: int = USUAL_GOOD_BYTES,
    tell: Callable[[Report], None] | None = None,
    on_alert: OnAlert | None = None,
) -> Iterator[Watch]:
    """Watch the loops that run inside, as `ampdoctor run` does: a context manager.

    Models, optimizers and torch's own scalers are found when the loop uses them; those given here come first. A watch
    inside another, or under `ampdoctor run`, is the outer one: its own arguments are not used, and a message says so.

    An error in the watch itself ends the watch, with a sentence, and never the training. Sentences and, without `tell`,
    diagnoses are warnings of the logger "ampdoctor": on stderr if logging is not set up.

    Args:
        model: A model to watch. Give the module before `model.compile()`, or as it is: hooks do not see inside one.
        optimizer: One, or several in the order in which they are numbered.
        scaler: Needed for a scaler that is not torch's GradScaler and has its methods.
        folder: Folder of the log and the bundles; None: `ampdoctor-health/<time>-<name>`, with the script's name.
        every: Steps from one close measurement to the next.
        on_sick: `record`: diagnose, log, keep a bundle, and let the training continue. `stop`: the same, then leave the
            loop.
        look: `auto`: check before the update wherever that does not synchronise the device. `sync`: everywhere, with
            one synchronisation a step. `off`: never replay a step.
        guard: Let a fused optimizer hold a sick update back on the device.
        bundle: Keep a bundle of the first sick step.
        bundle_max: Maximum bytes of a bundle, and of what `record_batches` keeps for one.
        record_batches: Keep the batches of this many of the last updates, on the GPU. On a GPU a sick step is known
            only after its update, so its bundle is replayed from an earlier checkpoint.
        export: Where the log's numbers and alerts are sent while the training runs: texts as of `--export`, and objects
            with `log`, `alert`, `flush` and `close`, which are called on their own thread.
        checkpoints: Folder that the training saves to: its last good checkpoints are kept under `folder`.
        probation: Clean steps after which a finite checkpoint is good.
        good_max: Maximum bytes of copies of checkpoints; most are links, which take none.
        tell: Called with the diagnosis at the sick step; None logs its first sentence.
        on_alert: Called with each alert, a `Finding`, as it is made, on ampdoctor's thread; errors and warnings are
            logged as well.

    Yields:
        The watch, whose `report` is set from the first sick step on.

    Raises:
        UsageError: An argument makes no sense.
        SickTrainingError: A step was sick and `on_sick` is `stop`.
    """
    import torch

    from ampdoctor.workflows.watcher import TrainingWatcher, standing

    outer = standing()
    if outer is not None:
        _say("the training is watched already, and this watch is the one that stands: its arguments are not used")
        yield Watch(outer.folder, outer)
        return
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "interactive"
    request = WatchRequest(
        health=str(Path(usual_folder(script, is_module=False) if folder is None else folder).absolute()),
        script=script,
        arguments=tuple(sys.argv[1:]),
        command=tuple(sys.orig_argv),
        every=every,
        on_sick=on_sick,
        look=look,
        guard=guard,
        bundle=bundle,
        bundle_max=bundle_max,
        record_batches=record_batches,
        export=exports_of(export),
        checkpoints=None if checkpoints is None else os.fspath(checkpoints),
        probation=probation,
        good_max=good_max,
    )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}, and no torch.nn.Module; a folder is given as folder=")
    optimizers = _several(optimizer)

    def told(report: Report) -> None:
        if doctor.speaks:
            _tell(report)

    doctor = TrainingWatcher(request, tell or told, _say, on_alert)
    with ExitStack() as stack:
        try:
            scalers = () if scaler is None else (scaler,)
            stack.enter_context(doctor.attending(model=model, optimizers=optimizers, scalers=scalers))
        except Exception as error:  # noqa: BLE001 - a training is never harmed
            _say(_not_watched(error))
        try:
            yield Watch(doctor.folder, doctor)
        except BaseException as error:
            doctor.ended(error)
            if isinstance(error, StoppedError) and doctor.report is not None:
                raise SickTrainingError(sentence_of(doctor.report), doctor.report) from None
            raise
        doctor.ended(None)


def sentence_of(report: Report) -> str:
    """Returns a report's first sentence, with the bundle's path where there is one."""
    said = [finding.message for finding in report.findings] or [error.message for error in report.errors]
    first = said[0] if said else "nothing more is known of it"
    left = report.run.get("kept", {})
    whole = "bundle" in left and "from_checkpoint" not in left  # a bundle that starts from a checkpoint says so itself
    kept = f" (ampdoctor bisect-nan {left['bundle']})" if whole else ""
    return f"step {report.run.get('step')} is sick: {first}{kept}"


def _several(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    if any(not hasattr(one, "param_groups") for one in found):
        raise UsageError("optimizer is neither an optimizer nor several: give one, or a list of them")
    return found


def _tell(report: Report) -> None:
    _log.warning(sentence_of(report))


def _not_watched(error: Exception) -> str:
    return f"the training is not watched: {type(error).__name__}: {error}".splitlines()[0]


def _say(sentence: str) -> None:
    _log.warning(sentence)


# -- a script, which runs once --


def _nobody(_: object) -> None:
    pass


class ScriptWatch:
    """A watch and its result; it begins when the script itself has imported torch (`doctor` is None before)."""

    def __init__(self) -> None:
        self.doctor: TrainingWatcher | None = None

    @property
    def report(self) -> Report | None:
        """The diagnosis of the first sick step; None as long as there is none."""
        return None if self.doctor is None else self.doctor.report

    def ended(self, error: BaseException | None) -> None:
        """End the watch: the script has finished, or raised this error."""
        if self.doctor is not None:
            self.doctor.ended(error)


@contextmanager
def watching(
    request: WatchRequest, *, tell: Callable[[Report], None] = _nobody, say: Callable[[str], None] = _nobody
) -> Iterator[ScriptWatch]:
    """Watch whatever trains in this process until the block ends; `tell` gets the diagnosis, `say` gets sentences."""
    watch = ScriptWatch()
    with ExitStack() as stack:

        def begin() -> None:
            from ampdoctor.hooks.process_state import unwarned

            with unwarned():
                from ampdoctor.workflows.watcher import TrainingWatcher

                watch.doctor = TrainingWatcher(request, tell, say)
                stack.enter_context(watch.doctor.attending())

        def failed(error: Exception) -> None:
            watch.doctor = None
            say(_not_watched(error))

        with when_imported("torch", begin, failed):
            yield watch
    give_back(request.health)
