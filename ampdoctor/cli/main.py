"""`main()`: the only place that prints errors and decides the exit code.

| code | when |
| --- | --- |
| 0 | nothing at or above `--fail-on` |
| 1 | findings at or above `--fail-on`, and never anything else |
| 2 | usage, unreadable or refused input, no answer, the user's code raised, a crash, a reader of stdout that has gone |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from ampdoctor.cli.process import ctrl_c, ending, process, streams
from ampdoctor.cli.process.action import Action
from ampdoctor.cli.suggesting.as_typed import as_typed
from ampdoctor.cli.suggesting.typer_errors import is_usage_error, said_by
from ampdoctor.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    AmpdoctorError,
    CheckpointError,
    ForkedChildError,
    UsageError,
    UserCodeError,
)
from ampdoctor.reports.escape import sentence

_TRACEBACK_FROM = 2  # -vv
_COMPLETION = "_AMPDOCTOR_COMPLETE"
"""The variable in which a shell asks for completions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing is raised, but for the Ctrl-C that has ended a script.

    Args:
        argv: The arguments without the program's name; None: those of the process, whose stdout then belongs to the
            report until it ends.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments[:1] == [
        "run"
    ]:  # the process is the script's: nothing is claimed but Ctrl-C until then
        return ending.end_as_python(_answer(arguments))
    streams.harden()
    if argv is not None:
        return _answer(arguments)
    try:
        process.claim_process()
        streams.claim_stdout()
        code = _answer(arguments)
    except KeyboardInterrupt:  # pressed between two lines of ours
        code = _say_interrupted()
    ctrl_c.ignore()
    if ctrl_c.interrupted() and code != EXIT_INTERRUPTED:  # swallowed, and answered all the same
        code = _say_interrupted()
    return process.settle(code)


def _answer(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except streams.StdoutClosedError:
        return EXIT_ERROR
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must not pass for findings
        if ctrl_c.interrupted() or _interrupted(error):
            return _say_interrupted()
        _explain(error, arguments)
        return EXIT_ERROR


def _say_interrupted() -> int:
    ctrl_c.ignore()
    streams.note(ctrl_c.INTERRUPTED)
    return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    parsed = _parse(arguments)
    if isinstance(parsed, int):
        return parsed
    outcome = parsed()
    if outcome.reason is not None:
        streams.note(f"ampdoctor: {sentence(outcome.reason)}")
    return outcome.code


def _parse(arguments: list[str]) -> Action | int:
    """Return the command's action, or an exit code where parsing was all there was to do (`--help`)."""
    from ampdoctor.cli.app import app

    hook = sys.excepthook
    with contextlib.redirect_stdout(io.StringIO()) as shown:  # Typer's own way of writing ends the process on an error
        try:
            result = app(arguments or ["--help"], prog_name="ampdoctor", standalone_mode=False)
        except SystemExit as ended:  # how an answer to a shell's completion ends
            result = ended.code
        except (KeyError, ValueError):
            if _COMPLETION not in os.environ:
                raise
            said = f"{_COMPLETION} asks for completions, and what else a shell says then is not set: unset it"
            raise UsageError(said) from None
        finally:
            sys.excepthook = hook  # Typer puts its own there, for good
    if not arguments and _COMPLETION not in os.environ:
        streams.note(shown.getvalue().rstrip("\n"))
        return EXIT_ERROR
    if shown.getvalue():
        streams.write_stdout(shown.getvalue())
    if callable(result):
        action: Action = result
        return action
    if result == EXIT_INTERRUPTED:  # Typer's answer to Ctrl-C
        raise KeyboardInterrupt
    return EXIT_ERROR if result else EXIT_OK


def _interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is what it began with: one that stops an import half-way comes out as an error about the rest."""
    seen: set[int] = set()  # errors may refer to one another in a circle
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if isinstance(one, KeyboardInterrupt):
            return True
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            chain += [one.__cause__, one.__context__]
    return False


def _explain(error: BaseException, arguments: list[str]) -> None:
    try:
        usage = _explained(error, arguments)
    except BaseException:  # noqa: BLE001 - a class of the user's, whose own str() raises
        usage = False
        streams.note(_internal(f"{type(error).__name__}, which raises where its message is read"))
    if _verbosity(arguments) >= _TRACEBACK_FROM and not usage:
        streams.note("".join(traceback.format_exception(error)).rstrip("\n"))


def _explained(error: BaseException, arguments: list[str]) -> bool:
    """Say what went wrong; True where that is the command line, of which no traceback tells more."""
    if is_usage_error(error):
        streams.note(f"ampdoctor: error: {sentence(said_by(error))}")
        context = getattr(error, "ctx", None)
        if not _say_instead(error, arguments) and context is not None:
            streams.note(f"Try '{context.command_path} --help' for help.")
        return True
    if isinstance(error, SystemExit):  # code under examination that got past the guards around it
        said = sentence(f"the code under examination ended the process with {error.code!r}")
        streams.note(f"ampdoctor: error: {said}")
    elif isinstance(error, ForkedChildError):
        streams.note(f"ampdoctor: error: {sentence(str(error))}")
    elif isinstance(error, AmpdoctorError):
        said = as_typed(str(error), arguments) if isinstance(error, CheckpointError) else str(error)
        streams.note(f"ampdoctor: error: {sentence(said)}")
        if isinstance(error, UserCodeError):
            for text in filter(None, (error.traceback_text.rstrip("\n"), error.explained)):
                streams.note(text)
        elif not isinstance(error, UserCodeError):
            _say_instead(error, arguments)
    else:
        said = sentence(str(error).strip().split("\n")[0])
        name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        streams.note(_internal(f"{name}{': ' + said if said else ''}"))
    return False


def _say_instead(error: BaseException, arguments: list[str]) -> bool:
    """Say which ways in there are, or what to type instead, where that can be known."""
    from typer.main import get_command

    from ampdoctor.cli.app import app
    from ampdoctor.cli.suggesting.doors import doors
    from ampdoctor.cli.suggesting.instead import instead

    ways = doors(arguments, error)
    for line in ways:
        streams.note(line)
    root: Any = get_command(app)
    try:
        meant = None if ways else instead(arguments, error, root.commands)
    except Exception:  # noqa: BLE001 - the sentence stands without a guess
        meant = None
    if meant is not None:
        streams.note(f"Type: {sentence(f'ampdoctor {meant}')}")
    return meant is not None or bool(ways)


def _internal(what: str) -> str:
    return (
        f"ampdoctor: internal error: {what}\n"
        "This is not a finding. Run again with -vv for the traceback; a report with the output of "
        "`ampdoctor env` is welcome."
    )


def _verbosity(arguments: Sequence[str]) -> int:
    """How often -v was given; read here because a crash may come before the options are parsed."""
    short = (argument for argument in arguments if re.fullmatch(r"-[qv]+", argument))
    return sum(argument.count("v") for argument in short) + arguments.count("--verbose")
