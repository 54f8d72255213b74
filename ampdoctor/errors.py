"""The exception tree: each error carries one sentence for the user; only `main()` prints it, and exits with 2."""

from __future__ import annotations

from typing import Any

EXIT_OK = 0
"""Nothing at or above `--fail-on`."""
EXIT_FINDINGS = 1
"""Findings at or above `--fail-on`; never used for a failure of the tool or of its input."""
EXIT_ERROR = 2
"""Everything else: wrong usage, unreadable or refused input, nothing examined, a factory that raised, a crash."""
EXIT_INTERRUPTED = 130
"""Ctrl-C (128 + SIGINT)."""


class AmpdoctorError(Exception):
    """Base of every error that ampdoctor raises on purpose; `str(error)` is one clear sentence."""

    kind: str = "refused"
    """A short stable word for the error in a report's `errors`."""


class UsageError(AmpdoctorError):
    """The command line, an option's value or an argument of the library makes no sense."""


class OutputError(AmpdoctorError):
    """A command cannot write its output where it should go."""


class ReportError(AmpdoctorError):
    """A file is not one of our reports, or is a report of another version."""


class CheckpointError(AmpdoctorError):
    """A checkpoint cannot be read, is refused, or does not fit the model."""

    kind = "unreadable"


class OtherFormatError(CheckpointError):
    """A file is whole, but in no checkpoint format: found beside a checkpoint, it does not make that incomplete."""


class NoCheckpointError(CheckpointError):
    """The named file or folder exists, and is no checkpoint."""


class NoStepError(CheckpointError):
    """A log is whole, and has no step yet."""


class SeveralRunsError(CheckpointError):
    """A folder holds several runs, and it is not clear which one is meant.

    `message` is one sentence with a list of them; `typed` names each of them on a command line.
    """

    def __init__(self, message: str, typed: str) -> None:
        super().__init__(message)
        self.typed = typed


class FactoryError(AmpdoctorError):
    """The factory cannot be found, or does not return what a replay needs."""

    kind = "factory"


class UserCodeError(FactoryError):
    """The user's own code raised.

    Attributes:
        traceback_text: The user's traceback, trimmed to the frames of their code; shown below the sentence.
        raised: Type and message of the error in one line ("AssertionError: the loss is not finite").
        explained: Where, why and what to write instead, if torch refused something because of mixed precision.
    """

    kind = "raised"

    def __init__(self, sentence: str, traceback_text: str = "", raised: str = "", explained: str | None = None) -> None:
        super().__init__(sentence)
        self.explained = explained
        self.traceback_text = traceback_text
        self.raised = raised


class ForkedChildError(BaseException):
    """The user's code forked, and the child came back as if it were the parent: it must end and report nothing."""


class StoppedError(SystemExit):
    """Ends a watched training at its first bad step, past any `except Exception` and without a traceback."""

    def __init__(self) -> None:
        super().__init__(EXIT_FINDINGS)


class SickTrainingError(AmpdoctorError):
    """A training was ended at its first bad step, because `ampdoctor.watch(on_sick="stop")` asked for that.

    It is raised where the watch ends. Inside, `StoppedError` leaves the loop, even through an `except Exception`.

    Attributes:
        report: The diagnosis, a `Report`.
    """

    kind = "sick"

    def __init__(self, sentence: str, report: Any) -> None:
        super().__init__(sentence)
        self.report = report


class ReplayError(AmpdoctorError):
    """A replay is impossible as asked (device, precision, policy, memory)."""

    kind = "replay"


class CollectiveError(ReplayError):
    """Code that runs on one rank only would start a collective, which all ranks have to run."""

    kind = "collective"


class LimitExceededError(CheckpointError):
    """An input needs `actual` of `what` ("header bytes"), which is more than the safe `limit`."""

    def __init__(self, what: str, limit: int, actual: int) -> None:
        super().__init__(f"{what}: {actual} is beyond the limit of {limit}")
        self.what, self.limit, self.actual = what, limit, actual
