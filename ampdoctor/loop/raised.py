"""Describes an exception of training code, and tells whether memory ran out."""

from __future__ import annotations

from collections.abc import Iterator

from ampdoctor.errors import EXIT_INTERRUPTED

_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_MAX_MESSAGE = 300
"""Maximum number of characters of an exception's own text in one sentence; the rest is in the traceback."""


def is_out_of_memory(error: BaseException) -> bool:
    """Did Python, the CPU's allocator or an accelerator's run out of memory?

    torch's CPU allocator raises a plain RuntimeError, which only its text identifies.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def describe(error: BaseException) -> str:
    """Returns type and message of an exception in one line: "ValueError: no such file"."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 a user's broken __str__ must not hide the error that it belongs to
        lines = []
    message = lines[0].strip() if lines else ""
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 3] + "..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, what it was raised from, and what was being handled then, once each."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def code_of(error: BaseException | None) -> int:
    """With what Python ends a process that nothing but this has ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)
