"""The exception tree: each error carries one sentence for the user.

Only `main()` prints errors and turns them into an exit code, the same for all: none of them is a finding, and code
under examination may raise them too. Everywhere else they are raised and pass through.
"""

from __future__ import annotations

EXIT_OK = 0
"""Nothing at or above `--fail-on`."""
EXIT_FINDINGS = 1
"""Findings at or above `--fail-on`; never used for a failure of the tool or of its input."""
EXIT_ERROR = 2
"""Everything else: usage, unreadable, refused, nothing examined, the factory raised, a crash."""
EXIT_INTERRUPTED = 130
"""Ctrl-C (128 + SIGINT)."""


class AmpdoctorError(Exception):
    """Base of every error that ampdoctor raises on purpose; `str(error)` is one clear sentence."""

    kind: str = "refused"
    """The short stable word of a report's `errors`, where a report is what says it."""


class UsageError(AmpdoctorError):
    """The command line, an option's value or an argument of the library makes no sense."""


class OutputError(AmpdoctorError):
    """What a command makes cannot be written where it should go."""


class ReportError(AmpdoctorError):
    """A file that should hold a report of ours does not, or holds one of another version."""


class CheckpointError(AmpdoctorError):
    """A checkpoint cannot be read, is refused, or does not fit the model."""

    kind = "unreadable"


class OtherFormatError(CheckpointError):
    """A file is whole and in a format that is none of a checkpoint's: beside one, no reason to call that incomplete."""


class FactoryError(AmpdoctorError):
    """The factory cannot be found, or does not return what a replay needs."""

    kind = "factory"


class UserCodeError(FactoryError):
    """The user's own code raised.

    Attributes:
        traceback_text: The user's traceback, trimmed to the frames of their code; shown below the sentence.
        raised: Type and message of what was raised, in one line ("AssertionError: the loss is not finite").
    """

    kind = "raised"

    def __init__(self, sentence: str, traceback_text: str = "", raised: str = "") -> None:
        super().__init__(sentence)
        self.traceback_text = traceback_text
        self.raised = raised


class ForkedChildError(BaseException):
    """The user's code forked, and the child came back as if it were the process that was asked.

    No `AmpdoctorError`, nor an `Exception`: whatever else goes on, the child is to end and to report nothing.
    """


class ReplayError(AmpdoctorError):
    """A replay cannot be carried out as asked (device, precision, policy, memory)."""

    kind = "replay"


class LimitExceededError(CheckpointError):
    """An input would need more than a safe bound allows.

    Args:
        what: What is limited, in words ("header bytes").
        limit: The bound.
        actual: What the input asks for.
    """

    def __init__(self, what: str, limit: int, actual: int) -> None:
        super().__init__(f"{what}: {actual} is beyond the limit of {limit}")
        self.what = what
        self.limit = limit
        self.actual = actual
