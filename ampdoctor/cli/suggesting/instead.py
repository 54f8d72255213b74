"""What to type instead: of a command line that was refused, the one that was probably meant.

Nothing here decides anything: it reads the arguments, the commands and their options, names of files that lie where the
user points, and the text of a Python file; a guess that does not hold is not made.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from ampdoctor.cli.suggesting.guesses import (
    function_of,
    is_saved_profile,
    last_number,
    near_file,
    near_name,
    same_factory,
)
from ampdoctor.cli.suggesting.typer_errors import is_usage_error
from ampdoctor.errors import AmpdoctorError, CheckpointError
from ampdoctor.evidence.targets import TARGETS
from ampdoctor.reports.forms.formats import ReportFormat

_HELP, _VERSION = frozenset({"help", "-help", "-h", "-?"}), frozenset({"version", "-version", "-V"})
_CODE = re.compile(r"(?:amp)?[\s_-]?(\d{3})", re.IGNORECASE)
_SAME = {
    "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "bfloat16": "bf16", "tfloat32": "tf32",
    "text": "human", "md": "markdown", "xml": "junit", "yaml": "json", "info": "note", "note": "warning",
    "warn": "warning", "none": "never", "low": "warning", "high": "error", "critical": "error", "gpu": "cuda",
    "yes": "always", "no": "never",
}  # fmt: skip
"""Words of other tools for a choice of ours; followed on, where the word meant is no choice here either."""
_SHORT = {
    "-o": ("--output",), "-f": ("--format",), "-s": ("--steps",), "-n": ("--steps",), "-p": ("--precision",),
    "-d": ("--device",), "-j": ("--jobs",), "-t": ("--target",), "-a": ("--arg", "--all"),
    "-c": ("--checkpoint", "--config"),
}  # fmt: skip
"""What a letter stands for with other tools; the first that the command has."""
_ASKING = frozenset({"check", "diagnose", "doctor", "examine", "explain", "inspect", "run", "show"})
"""Verbs that are no command of ours, before what one of them is for."""
_NO_FACTORY = re.compile(r"names no function|without a profile|is no profile")
_A_PROFILE = re.compile(r"is a saved profile, not a checkpoint")
_NOT_ALONE = re.compile(r"is no saved profile: one factory, or")
_NOT_FOUND = re.compile(r"names no function|there is no (?:file|module)|has no '")
"""Sentences about the factory's own name; where another one stands, that name is right."""
_CHOICES = re.compile(r"'([^']*)' is not one of (.*)")
_NO_REPORT = re.compile(r"--report (.*): the form is FORMAT=FILE")
_NO_ARGUMENT = re.compile(r"--arg (.*): the form is KEY=JSON")
_OTHER_ARGUMENT = re.compile(r"has no argument '(\w+)': did you mean '(\w+)'\?")
_NO_HARDWARE = re.compile(r"unknown target '(.*)'; known")
_TOO_LOW = re.compile(r"greater than or equal to (\d+)")


def instead(arguments: Sequence[str], error: BaseException, commands: _Commands) -> list[str]:
    """Return the command line that was probably meant, and below it what a name in it stands for; [] where none is.

    Args:
        arguments: What was typed, without the program's name.
        error: What refused it: an error of the command line, or one of ours.
        commands: All there are, by name, as Typer builds them.
    """
    if any(not argument.strip() for argument in arguments):  # an empty variable of a script: nothing to guess from
        return []
    if getattr(error, "ctx", None) is None and not isinstance(error, AmpdoctorError):
        return []
    tried = (correct(list(arguments), error, commands) for correct in _CORRECTIONS)
    meant = next((found for found in tried if found is not None), list(arguments))
    if not _is_known(meant, commands):
        return []
    missing = _missing(meant, commands)
    if not missing and meant == list(arguments):
        return []
    whole = [*meant[:1], *missing, *map(shlex.quote, meant[1:])]
    return [f"ampdoctor {' '.join(whole)}", *(f"  {name}: {about}" for name, about in missing.items())]


def _is_known(arguments: Sequence[str], commands: _Commands) -> bool:
    """Whether its command takes all of a command line: one that was refused is not to be typed again."""
    if not arguments or arguments[0] not in commands:
        return True
    command = commands[arguments[0]]
    context = command.make_context(arguments[0], [], resilient_parsing=True)
    context.resilient_parsing = False
    try:
        _, too_many, _ = command.make_parser(context).parse_args(args=list(arguments[1:]))
    except Exception as error:
        if is_usage_error(error):
            return False
        raise
    return not too_many


_Commands = dict[str, Any]
_Correction = Callable[[list[str], BaseException, _Commands], list[str] | None]


def _another_command(arguments: list[str], _error: BaseException, commands: _Commands) -> list[str] | None:
    """A command that is misspelt, left out, or not the first word."""
    first, *rest = arguments
    if first in commands:
        return None
    if first in _HELP:
        return [*(word for word in rest if word in commands), "--help"]
    if first in _VERSION:
        return ["--version"]
    named = next((index for index, word in enumerate(arguments) if word in commands), None)
    if first.startswith("-"):  # options of a command before its name
        return None if named is None else [arguments[named], *arguments[named + 1 :], *arguments[:named]]
    if rest and f"{first}-{rest[0]}" in commands:  # a space where the hyphen belongs
        return [f"{first}-{rest[0]}", *rest[1:]]
    if first in _ASKING and rest:
        return _another_command(rest, _error, commands)
    code = _CODE.fullmatch(first)
    if code:
        return ["rule", f"AMP{code[1]}", *rest]
    if Path(first).exists() or ":" in first or Path(first).suffix:
        return _by_target(first, rest)
    near = difflib.get_close_matches(first.lower().replace("_", "-"), commands, n=1)
    return [near[0], *rest] if near else None


def _by_target(target: str, rest: list[str]) -> list[str]:
    """The command for what was given without one."""
    if ":" in target or Path(target).suffix == ".py":
        return ["bisect-nan", function_of(target) or target, *rest]
    return ["scan", near_file(target) or target, *rest]


def _another_option(arguments: list[str], error: BaseException, commands: _Commands) -> list[str] | None:
    """An option that is misspelt, or is a value of another (`--json`)."""
    wrong = getattr(error, "option_name", None)
    if wrong is None or arguments[0] not in commands:
        return None
    if wrong in _HELP:
        return [arguments[0], "--help"]
    known = [name for option in commands[arguments[0]].params for name in option.opts if name.startswith("--")]
    if wrong.removeprefix("--") in get_args(ReportFormat) and "--format" in known:
        return _replaced(arguments, wrong, ["--format", wrong.removeprefix("--")])
    short = next((name for name in _SHORT.get(wrong, ()) if name in known), None)
    near = short if len(wrong) == len("-x") else near_name(wrong.replace("_", "-"), known)
    return None if near is None else _replaced(arguments, wrong, [near])


def _another_choice(arguments: list[str], error: BaseException, _commands: _Commands) -> list[str] | None:
    """A value that is none of an option's choices."""
    refused = _CHOICES.search(str(error)) if getattr(error, "param", None) is not None else None
    if refused is None:
        return None
    value, choices = refused[1], re.findall(r"'([^']*)'", refused[2])
    meant = _chosen(value, choices)
    return None if meant is None else _replaced(arguments, value, [meant])


def _chosen(value: str, choices: Sequence[str]) -> str | None:
    word, seen = value.lower(), set[str]()
    while word in _SAME and word not in choices and word not in seen:
        seen.add(word)
        word = _SAME[word]
    if word in choices:
        return word
    return next(iter(difflib.get_close_matches(value.lower(), choices, n=1)), None)


def _another_value(arguments: list[str], error: BaseException, _commands: _Commands) -> list[str] | None:
    """A value that is of another form than its option takes, or lower."""
    said, forms = str(error), get_args(ReportFormat)
    if refused := _NO_REPORT.search(said):
        form, _, file = refused[1].partition("=")
        if not file and Path(form).suffix[1:] in forms:  # the name of the file alone
            form, file = Path(form).suffix[1:], form
        chosen = _chosen(form, forms)
        return (
            None if chosen is None else _with_value(arguments, ["--report"], refused[1], f"{chosen}={file or 'FILE'}")
        )
    if (refused := _NO_ARGUMENT.search(said)) and refused[1].isidentifier():
        return _with_value(arguments, ["--arg"], refused[1], f"{refused[1]}=JSON")
    if refused := _OTHER_ARGUMENT.search(said):
        given = next((word for word in arguments if word.removeprefix("--arg=").startswith(f"{refused[1]}=")), "")
        value = given.removeprefix("--arg=")
        return _with_value(arguments, ["--arg"], value, f"{refused[2]}={value.partition('=')[2]}")
    if refused := _NO_HARDWARE.search(said):
        near = near_name(refused[1].lower(), TARGETS)
        return None if near is None else _with_value(arguments, ["--target"], refused[1], near)
    option = getattr(error, "param", None)
    if option is not None and (refused := _TOO_LOW.search(said)):
        return _with_value(arguments, option.opts, None, refused[1])
    return None


def _joined(arguments: list[str], error: BaseException, _commands: _Commands) -> list[str] | None:
    """A function that stands beside its file and not after a colon."""
    if "extra argument" not in str(error):
        return None
    for index, (file, name) in enumerate(pairwise(arguments)):
        if file.endswith(".py") and name.isidentifier():
            return [*arguments[:index], f"{file}:{name}", *arguments[index + 2 :]]
    return None


def _another_rule(arguments: list[str], error: BaseException, _commands: _Commands) -> list[str] | None:
    """The rule that a code or name is nearest to."""
    if arguments[0] != "rule" or not isinstance(error, AmpdoctorError):
        return None
    near = re.search(r"did you mean ([\w-]+)\?", str(error))
    return ["rule", near[1]] if near else None


def _another_target(arguments: list[str], error: BaseException, commands: _Commands) -> list[str] | None:
    """A file, folder or function that is not there, or is not for this command."""
    if not isinstance(error, AmpdoctorError) or arguments[0] not in commands:
        return None
    name, given = arguments[0], _values(arguments, commands)
    for target in (*_as_list(given.get("paths")), *_as_list(given.get("reports"))):
        if ":" in target or target.endswith(".py"):
            factory = function_of(target)
            return None if factory is None else ["bisect-nan", factory]
        near = None if Path(target).exists() else near_file(target)
        if near is not None:
            return _replaced(arguments, target, [near])
    if _A_PROFILE.search(str(error)):
        profiles = [target for target in _as_list(given.get("paths")) if is_saved_profile(target)]
        return ["recommend", *profiles] if profiles else None
    targets = [*_as_list(given.get("factory")), *_as_list(given.get("target"))]
    if len(targets) > 1 and _NOT_ALONE.search(str(error)):
        return _one_target(name, targets)
    for target in targets:
        if _NO_FACTORY.search(str(error)) and Path(target).exists() and not target.endswith(".py"):
            return ["scan", target]
        factory = same_factory(target) if _NOT_FOUND.search(str(error)) else None
        if factory is not None and factory != target:
            return _replaced(arguments, target, [factory])
    of_the_checkpoint = isinstance(error, CheckpointError) and name != "scan"
    return _another_checkpoint(arguments, given.get("checkpoint")) if of_the_checkpoint else None


def _one_target(command: str, targets: Sequence[str]) -> list[str] | None:
    """Of a factory and files beside it: the files, where they are profiles; else the one may be its checkpoint."""
    files = [target for target in targets if Path(target).is_file() and Path(target).suffix not in (".py", ".json")]
    factories = [target for target in targets if target not in files]
    if files and all(map(is_saved_profile, files)):
        return [command, *files]
    return [command, *factories, "--checkpoint", *files] if len(files) == len(factories) == 1 else None


def _another_checkpoint(arguments: list[str], checkpoint: str | None) -> list[str] | None:
    """One of the folder of many, the last; or one whose name is nearly that."""
    if checkpoint is None:
        return None
    near = last_number(checkpoint) if Path(checkpoint).is_dir() else near_file(checkpoint)
    return None if near is None or Path(checkpoint).is_file() else _replaced(arguments, checkpoint, [near])


_CORRECTIONS: tuple[_Correction, ...] = (
    _another_command,
    _another_option,
    _another_choice,
    _another_value,
    _joined,
    _another_rule,
    _another_target,
)


def _missing(arguments: list[str], commands: _Commands) -> dict[str, str]:
    """The required arguments that are not given, and what they are."""
    if not arguments or arguments[0] not in commands or "--help" in arguments:
        return {}
    given = _values(arguments, commands)
    return {
        parameter.metavar or parameter.name.upper(): parameter.help
        for parameter in commands[arguments[0]].params
        if parameter.param_type_name == "argument" and parameter.required and not given.get(parameter.name)
    }


def _values(arguments: Sequence[str], commands: _Commands) -> dict[str, Any]:
    """What the command would read from its arguments, as far as it can."""
    command = commands[arguments[0]]
    found: dict[str, Any] = command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=True).params
    return found


def _as_list(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, Iterable):
        yield from (part for part in given if isinstance(part, str))


def _replaced(arguments: Sequence[str], wrong: str, right: Sequence[str]) -> list[str]:
    """The arguments with one of them, or the name before its `=`, replaced."""
    found: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument == wrong:
            found += right
        elif equals and name == wrong:
            found += [*right[:-1], f"{right[-1]}={value}"]
        elif equals and value == wrong:
            found.append(f"{name}={right[0]}")
        else:
            found.append(argument)
    return found


def _with_value(arguments: Sequence[str], option: Sequence[str], wrong: str | None, right: str) -> list[str]:
    """The arguments with an option's value replaced: this one, or with None whatever it is.

    Args:
        arguments: The arguments.
        option: The names of the option.
        wrong: The value.
        right: What stands in its place.
    """
    found: list[str] = []
    for before, argument in pairwise(["", *arguments]):
        name, _, value = argument.partition("=")
        if before in option and wrong in (None, argument):
            found.append(right)
        elif name in option and name != argument and wrong in (None, value):
            found.append(f"{name}={right}")
        else:
            found.append(argument)
    return found
