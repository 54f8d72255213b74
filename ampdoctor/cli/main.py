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
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import typer
from typer import Option
from typer.core import TyperCommand

from ampdoctor.cli import interrupt, process, run_command
from ampdoctor.cli.configured_command import ConfiguredCommand, ReplayCommand
from ampdoctor.cli.file_commands import env, merge, rule, scan, versions
from ampdoctor.cli.plan_command import plan
from ampdoctor.cli.replay_commands import bisect_nan, profile, recommend
from ampdoctor.cli.run_command import Action, Outcome
from ampdoctor.cli.suggest import doors, full_path, is_usage_error, said_by
from ampdoctor.cli.training_commands import health, run
from ampdoctor.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    AmpdoctorError,
    CheckpointError,
    ForkedChildError,
    UserCodeError,
)
from ampdoctor.reports.escape import sentence

_TRACEBACK_FROM = 2  # -vv
_COMPLETION = "_AMPDOCTOR_COMPLETE"  # the variable with which a shell asks for completions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; it raises only the KeyboardInterrupt that has ended a script.

    `argv` has the arguments without the program's name. None means those of the process, whose stdout then belongs to
    the report until it ends.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and arguments[:1] == ["run"]:  # the script's process: only Ctrl-C is claimed until it starts
        return run_command.end_as_python(_answer(arguments))
    process.harden()
    if argv is not None:
        return _answer(arguments)
    try:
        process.claim_process()
        process.claim_stdout()
        code = _answer(arguments)
    except KeyboardInterrupt:  # outside `_answer`
        code = _say_interrupted()
    interrupt.state.deaf = True
    if interrupt.state.interrupted and code != EXIT_INTERRUPTED:  # some code swallowed the KeyboardInterrupt
        code = _say_interrupted()
    return process.settle(code)


def _answer(arguments: list[str]) -> int:
    try:
        outcome = _parse(arguments)()
    except process.StdoutClosedError:
        return EXIT_ERROR
    except BaseException as error:  # noqa: BLE001 - no error may look like findings
        if interrupt.state.interrupted or _interrupted(error):
            return _say_interrupted()
        _explain(error, arguments)
        return EXIT_ERROR
    if outcome.reason is not None:
        process.note(f"ampdoctor: {sentence(outcome.reason)}")
    return outcome.code


def _say_interrupted() -> int:
    interrupt.state.deaf = True
    process.note(interrupt.INTERRUPTED)
    return EXIT_INTERRUPTED


def _parse(arguments: list[str]) -> Action:
    """Return the command's action, or one that only ends, where parsing did everything (`--help`)."""
    hook = sys.excepthook
    with contextlib.redirect_stdout(io.StringIO()) as shown:  # Typer's own output ends the process on an error
        try:
            result = app(arguments or ["--help"], prog_name="ampdoctor", standalone_mode=False)
        except SystemExit as ended:  # how a shell's completion ends
            result = ended.code
        finally:
            sys.excepthook = hook  # Typer replaces it for good
    if not arguments and _COMPLETION not in os.environ:
        process.note(shown.getvalue().rstrip("\n"))
        return partial(Outcome, EXIT_ERROR)
    if shown.getvalue():
        process.write_stdout(shown.getvalue())
    if callable(result):
        action: Action = result
        return action
    if result == EXIT_INTERRUPTED:  # Typer's answer to Ctrl-C
        raise KeyboardInterrupt
    return partial(Outcome, EXIT_ERROR if result else EXIT_OK)


def _interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C caused the error: if it stops an import, another error about the missing rest may follow."""
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
    except BaseException:  # noqa: BLE001 - a user's class whose str() raises
        usage = False
        process.note(_internal(f"{type(error).__name__}, which raises where its message is read"))
    if _verbosity(arguments) >= _TRACEBACK_FROM and not usage:
        process.note("".join(traceback.format_exception(error)).rstrip("\n"))


def _explained(error: BaseException, arguments: list[str]) -> bool:
    """Print the error; return True for a usage error, for which a traceback would not help."""
    if is_usage_error(error):
        process.note(f"ampdoctor: error: {sentence(said_by(error))}")
        context = getattr(error, "ctx", None)
        usual = [] if context is None else [f"Try '{context.command_path} --help' for help."]
        for line in doors(arguments, error) or usual:
            process.note(line)
        return True
    if isinstance(error, SystemExit | ForkedChildError):  # from the examined code, past our guards
        ended = f"the code under examination ended the process with {getattr(error, 'code', None)!r}"
        process.note(f"ampdoctor: error: {sentence(str(error) if isinstance(error, ForkedChildError) else ended)}")
    elif isinstance(error, AmpdoctorError):
        said = full_path(str(error), arguments) if isinstance(error, CheckpointError) else str(error)
        process.note(f"ampdoctor: error: {sentence(said)}")
        of_user = [error.traceback_text.rstrip("\n"), error.explained] if isinstance(error, UserCodeError) else None
        more = doors(arguments, error) if of_user is None else of_user
        for text in filter(None, more):
            process.note(text)
    else:
        said = sentence(str(error).strip().split("\n")[0])
        name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
        process.note(_internal(f"{name}{': ' + said if said else ''}"))
    return False


def _internal(what: str) -> str:
    return (
        f"ampdoctor: internal error: {what}\n"
        "This is not a finding. Run again with -vv for the traceback; a report with the output of "
        "`ampdoctor env` is welcome."
    )


def _verbosity(arguments: Sequence[str]) -> int:
    """Return how often -v was given; a crash may come before the options are parsed."""
    short = (argument for argument in arguments if re.fullmatch(r"-[qv]+", argument))
    return sum(argument.count("v") for argument in short) + arguments.count("--verbose")


# -- the Typer application --

_EPILOG = "Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 anything else that went wrong, 130 Ctrl-C."

_SETTINGS = (
    "Settings: an option may also stand in [tool.ampdoctor] of pyproject.toml or in ampdoctor.toml (fail-on = "
    '"warning"), or in the environment (AMPDOCTOR_FAIL_ON=warning).'
)

app = typer.Typer(
    name="ampdoctor",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: half the start-up time, and the same text everywhere
    pretty_exceptions_enable=False,  # only main() prints errors
)


def _version(asked: bool) -> None:
    if asked:
        process.write_stdout(versions() + "\n")
        raise typer.Exit


@app.callback()
def ampdoctor(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Diagnose mixed-precision training: what broke, why, what to change, and the proof."""


_EXAMPLES = """
run train.py --lr 3e-4
run --on-sick stop -m package.train
run --export tensorboard=runs/a --report html=run.html train.py
scan checkpoint-30000
scan checkpoint-30000 --against checkpoint-20000
scan checkpoints --format sarif --output scan.sarif --fail-on warning
health ampdoctor-health/TIME-train
health ampdoctor-health/TIME-train --follow
health trainer_state.json --format html --output health.html
bisect-nan train.py -- --lr 3e-4
bisect-nan train.py:make_trainer --checkpoint checkpoint-30000 --until-sick
bisect-nan ampdoctor-health/TIME-train/bundle-31000 --model train.py
profile train.py:make_run --save run.profile
profile train.py:make_run --steps 20 --precision bf16
profile run.profile --format html --output profile.html
recommend train.py:make_run
recommend run.profile --emit deepspeed
recommend run.profile --target h100 --precision-matters
plan ds_config.json --gpus 64 --to-gpus 48
plan --global-batch 512 --micro-batch 8 --gpus 64 --to-gpus 8x6 --emit megatron
plan ampdoctor-health/TIME-train --to-gpus 16 --device-memory 80GB
merge report.json
merge rank0.json rank1.jsonl --format html --output all.html
merge scan.json --fail-on warning --baseline known.json
rule
rule AMP201
rule forward-overflow --format json
env
env --format json
env > environment.txt
""".strip().splitlines()
_COMMANDS: tuple[tuple[Callable[..., Action], type[TyperCommand]], ...] = (
    *((command, ConfiguredCommand) for command in (run, scan, health)),
    *((command, ReplayCommand) for command in (bisect_nan, profile, recommend)),
    *((command, ConfiguredCommand) for command in (plan, merge)),
    *((command, TyperCommand) for command in (rule, env)),
)
for _command, _kind in _COMMANDS:
    _name = _command.__name__.replace("_", "-")
    _typed = "\n".join(f"  ampdoctor {example}" for example in _EXAMPLES if example.split()[0] == _name)
    app.command(
        _name,
        cls=_kind,
        help=f"{inspect.getdoc(_command)}\n\n\b\nExamples:\n{_typed}",
        epilog=_EPILOG if _kind is TyperCommand else f"{_SETTINGS}\n\n{_EPILOG}",
        # Arguments of a script may look like our options
        context_settings={"allow_interspersed_args": False} if _command is run else None,
    )(_command)
