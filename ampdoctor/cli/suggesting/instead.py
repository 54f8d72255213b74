"""What to type instead of a command line that was refused.

A guess is made from the arguments, the commands with their options, and the files that lie where the user points. What
the error's own sentence says already (Typer's for arguments, ours for rules and thresholds) is not said again.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ampdoctor.cli.suggesting.doors import REPLAYING
from ampdoctor.cli.suggesting.near import near_factory, near_file, near_name
from ampdoctor.cli.suggesting.typer_errors import is_usage_error
from ampdoctor.errors import AmpdoctorError, FactoryError, UsageError
from ampdoctor.replay.bundles.manifest import bundle_at
from ampdoctor.reports.formats import FORMATS

_HELP, _VERSION = frozenset({"help", "-help", "-h", "-?"}), frozenset({"version", "-version", "-V"})
_CODE = re.compile(r"(?:amp)?[\s_-]?(\d{3})", re.IGNORECASE)
_SAME = {
    "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "bfloat16": "bf16", "md": "markdown",
    "text": "human", "xml": "junit", "yaml": "json", "info": "warning", "warn": "warning", "none": "never",
    "gpu": "cuda", "yes": "always", "no": "never",
}  # fmt: skip
"""Words of other tools for a choice of ours."""
_CHOICES = re.compile(r"'([^']*)' is not one of (.*)")
"""Typer's sentence; its exceptions keep the value nowhere else."""

_Commands = dict[str, Any]
_Correction = Callable[[list[str], BaseException, _Commands], list[str] | None]


def instead(arguments: Sequence[str], error: BaseException, commands: _Commands) -> str | None:
    """Returns the command line that was probably meant, without the program's name; None where nobody can know.

    Args:
        arguments: What was typed, without the program's name.
        error: What refused it: an error of the command line, or one of ours.
        commands: All there are, by name, as Typer builds them.
    """
    if not arguments or any(not argument.strip() for argument in arguments):  # an empty variable of a script
        return None
    if getattr(error, "ctx", None) is None and not isinstance(error, AmpdoctorError):
        return None
    tried = (correct(list(arguments), error, commands) for correct in _CORRECTIONS)
    meant = next((found for found in tried if found is not None), None)
    if meant is None or not _is_taken(meant, commands):
        return None
    return " ".join([*meant[:1], *_missing(meant, commands), *map(shlex.quote, meant[1:])])


def _missing(arguments: Sequence[str], commands: _Commands) -> list[str]:
    """The names of required arguments that are not given."""
    if arguments[0] not in commands or "--help" in arguments:
        return []
    command = commands[arguments[0]]
    given = command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=True).params
    needed = [one for one in command.params if one.param_type_name == "argument" and one.required]
    return [one.metavar or one.name.upper() for one in needed if not given.get(one.name)]


def _is_taken(arguments: Sequence[str], commands: _Commands) -> bool:
    """Whether its command takes all of a command line: one that would be refused is not to be typed."""
    if arguments[0] not in commands:
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


def _another_command(arguments: list[str], _error: BaseException, commands: _Commands) -> list[str] | None:
    """A command that is misspelt, left out, or not the first word."""
    first, *rest = arguments
    if first in commands:
        return None
    if first in _HELP:
        return [*(word for word in rest if word in commands), "--help"]
    if first in _VERSION:
        return ["--version"]
    if first.startswith("-"):  # options of a command before its name
        named = next((index for index, word in enumerate(arguments) if word in commands), None)
        return None if named is None else [arguments[named], *arguments[named + 1 :], *arguments[:named]]
    if rest and f"{first}-{rest[0]}" in commands:  # a space where the hyphen belongs
        return [f"{first}-{rest[0]}", *rest[1:]]
    code = _CODE.fullmatch(first)
    if code:
        return ["rule", f"AMP{code[1]}", *rest]
    if ":" in first or first.endswith(".py"):
        return ["bisect-nan", near_factory(first) or first, *rest]
    if Path(first).exists() or Path(first).suffix:
        return ["scan", first if Path(first).exists() else near_file(first) or first, *rest]
    near = difflib.get_close_matches(first.lower().replace("_", "-"), commands, n=1)
    return [near[0], *rest] if near else None


def _another_option(arguments: list[str], error: BaseException, commands: _Commands) -> list[str] | None:
    """An option that is misspelt, or is a value of another (`--json`)."""
    wrong = getattr(error, "option_name", None)
    if wrong is None or arguments[0] not in commands:
        return None
    if wrong in _HELP:
        return [arguments[0], "--help"]
    known = [name for option in commands[arguments[0]].params for name in option.opts if name.startswith("--")]
    if wrong.removeprefix("--") in FORMATS and "--format" in known:
        return _replaced(arguments, wrong, ["--format", wrong.removeprefix("--")])
    near = near_name(wrong.replace("_", "-"), known) if wrong.startswith("--") else None
    return None if near is None else _replaced(arguments, wrong, [near])


def _another_choice(arguments: list[str], error: BaseException, _commands: _Commands) -> list[str] | None:
    """A value that is none of an option's choices."""
    refused = _CHOICES.search(str(error)) if getattr(error, "param", None) is not None else None
    if refused is None:
        return None
    word, choices = refused[1].lower(), re.findall(r"'([^']*)'", refused[2])
    same = _SAME.get(word)
    meant = same if same in choices else near_name(word, choices)
    return None if meant is None else _replaced(arguments, refused[1], [meant])


def _another_target(arguments: list[str], error: BaseException, commands: _Commands) -> list[str] | None:
    """A file, folder or function that is not there, or is not for this command."""
    if not isinstance(error, AmpdoctorError) or arguments[0] not in commands:
        return None
    command, *rest = arguments
    named = any(":" in word or word.endswith(".py") for word in rest)
    for before, word in pairwise(["", *rest]):
        if word.startswith("-") or "=" in word:  # `--report json=FILE`: a new file has no near one
            continue
        if ":" in word or word.endswith(".py"):
            factory = near_factory(word) if isinstance(error, FactoryError) or command == "scan" else None
            if factory is not None and command == "scan":
                return ["bisect-nan", factory]
            if factory not in (None, word):
                return _replaced(arguments, word, [str(factory)])
        elif Path(word).exists():
            is_target = command in REPLAYING and not named and not before.startswith("-") and bundle_at(word) is None
            if is_target and isinstance(error, FactoryError | UsageError) and not _is_ours(Path(word)):
                return ["scan", word]
        elif (near := near_file(word)) is not None and near not in rest:
            return _replaced(arguments, word, [near])
    return None


def _is_ours(path: Path) -> bool:
    """Whether a file is a report or a saved profile, damaged perhaps: `scan` would not take it either."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.startswith(b"{") or b"ampdoctor_profile" in head


_CORRECTIONS: tuple[_Correction, ...] = (_another_command, _another_option, _another_choice, _another_target)


def _replaced(arguments: Sequence[str], wrong: str, right: Sequence[str]) -> list[str]:
    """The arguments with one of them, or the name or value around its `=`, replaced."""
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
