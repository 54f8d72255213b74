"""Suggests what to type instead of a refused command line.

The guess uses the arguments, the commands with their options, and the files in the folder. It does not repeat what the
error message already says (Typer's for arguments, ours for rules and thresholds).
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from ampdoctor.errors import AmpdoctorError, FactoryError, UsageError
from ampdoctor.replay.bundles.manifest import bundle_at
from ampdoctor.replay.user_modules import factories_in, sure_factories_in
from ampdoctor.reports.formats import FORMATS

# -- Typer's errors: it does not export their types, so they are recognised by attributes --

_PYDANTICS = "Value error, "  # Typer's validation puts this before the message about a choice


def is_usage_error(error: BaseException) -> bool:
    """Whether Typer refused the command line."""
    return callable(getattr(error, "format_message", None)) and isinstance(getattr(error, "exit_code", None), int)


def said_by(error: Any) -> str:
    """Return the error's message with its option, and only those alternatives that are similar."""
    possible = getattr(error, "possibilities", None)
    if possible:  # Typer's own comparison counts the two leading hyphens, which all share
        alike = get_close_matches(error.option_name.strip("-"), [name.strip("-") for name in possible])
        error.possibilities = [name for name in possible if name.strip("-") in alike]
    return str(error.format_message()).replace(_PYDANTICS, "", 1)


def said_of_the_value(error: Any) -> str:
    """Return the error's message about the value alone, for a value that did not come from an option."""
    return str(error.message).replace(_PYDANTICS, "", 1)


# -- what a file trains with, for a command without a target: Python files are read as text, never run --

REPLAYING = ("bisect-nan", "profile", "recommend")  # the commands that replay a run
_LONGEST = 1_000_000  # largest file that is read, in bytes
_LISTED = 200  # most Python files that are read in a folder
_SHOWN = 5  # most files that are listed
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_NOT_REPLAYED = {
    "deepspeed": "DeepSpeed's engine, which is not replayed: hand over its model, loss and optimizer as a TrainingRun",
    "jax": "JAX, which is not PyTorch",
    "tensorflow": "TensorFlow, which is not PyTorch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How a Python file trains, judged by its text."""

    what: str  # what trains, as a phrase
    line: int | None = None  # None where no single line shows it
    target: str | None = None  # what to name on the command line; None where nothing fits


def door_of(file: Path) -> Door | None:
    """Return how a file trains; None if nothing in it trains, or it cannot be read as Python."""
    try:
        if not file.is_file() or file.stat().st_size > _LONGEST:
            return None
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = _calls(tree)
    packages = set(_packages(tree))
    updates = {"backward", "step"} <= calls.keys()
    for package, what in _NOT_REPLAYED.items():
        if package in packages and ("torch" not in packages or (package == "deepspeed" and "initialize" in calls)):
            return Door(what=what, line=calls.get("initialize"))
    if factories := sure_factories_in(file):
        return Door(what=f"the factory {factories[0]}", target=f"{file}:{factories[0]}")
    if "fit" in calls and packages & {*_LIGHTNING}:
        return Door(what="Lightning's Trainer.fit()", line=calls["fit"], target=str(file))
    if "train" in calls and packages & {"transformers", "trl", "sentence_transformers"} and not updates:
        return Door(what="a Hugging Face Trainer", line=calls["train"], target=str(file))
    if "backward" in calls and "accelerate" in packages:
        return Door(what="a loop with Accelerate", line=calls["backward"], target=str(file))
    if updates:
        return Door(what="a training loop", line=calls["backward"], target=str(file))
    return None


def _calls(tree: ast.AST) -> dict[str, int]:
    called = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    lines: dict[str, int] = {}
    for node in called:
        assert isinstance(node.func, ast.Attribute)  # noqa: S101 for the type checker
        lines[node.func.attr] = min(node.lineno, lines.get(node.func.attr, node.lineno))
    return lines


def _packages(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def doors(arguments: Sequence[str], error: BaseException) -> list[str]:
    """Return lines that say which target fits; [] where `error` refused the command line for another reason."""
    if arguments[:1] == ["run"] and _is_missing(error):
        return ["Name what trains: ampdoctor run train.py --its arguments, or ampdoctor run -m package.train"]
    if not arguments or arguments[0] not in REPLAYING:
        return []
    if _is_missing(error):
        return [*_all_of(arguments[0]), *_in_folder(arguments[0], Path())]
    named = [Path(word) for word in arguments[1:] if not word.startswith("-")]
    if not isinstance(error, FactoryError) or not named:
        return []
    if any(file.suffix == ".ipynb" and file.is_file() for file in named):
        notebook = shlex.quote(next(str(file) for file in named if file.suffix == ".ipynb"))
        return [f"A notebook is no Python file: jupyter nbconvert --to script {notebook} makes one; name that."]
    scripts = [file for file in named if file.suffix == ".py" and file.is_file()]
    fits_none = all(door_of(file) is None and not factories_in(file) for file in scripts)
    return _all_of(arguments[0]) if scripts and fits_none else []


def _is_missing(error: Any) -> bool:
    parameter = getattr(error, "param", None)
    missing = is_usage_error(error) and type(error).__name__ == "MissingParameter"
    return missing and getattr(parameter, "param_type_name", None) == "argument"


def _all_of(command: str) -> list[str]:
    return [
        "What can be replayed:",
        f"  a script: ampdoctor {command} train.py -- --its arguments",
        "    runs it up to its first step and replays from there; nothing is added to it. It is a plain loop, or calls",
        "    Trainer.train() (transformers, TRL), Trainer.fit() (Lightning) or accelerator.backward()",
        f"  a function: ampdoctor {command} train.py:make_trainer",
        "    returns a Trainer, (LightningModule, Trainer), (Accelerator, and what its prepare gave), or a TrainingRun",
        *(
            (
                "  what fails late: either of these, with --checkpoint checkpoint-30000 --until-sick",
                "    runs on from a checkpoint until something breaks",
            )
            if command == "bisect-nan"
            else ()
        ),
        "A checkpoint alone, without its code: ampdoctor scan checkpoint-30000",
    ]


def _in_folder(command: str, folder: Path) -> list[str]:
    try:
        files = sorted(folder.glob("*.py"))[:_LISTED]
    except OSError:
        return []
    found = [(file, door) for file in files if (door := door_of(file)) is not None]
    lines = []
    for file, door in found[:_SHOWN]:
        where = f"{file}, line {door.line}" if door.line is not None else str(file)
        typed = "" if door.target is None else f": ampdoctor {command} {shlex.quote(door.target)}"
        lines.append(f"  {where}, {door.what}{typed}")
    more = [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return ["In this folder:", *lines, *more] if lines else []


# -- similar names: words, files, functions of a Python file, which is not imported --

_NEAR = 0.75  # similarity from which two names count as spellings of one: about one letter moved, missing or added


def near_name(word: str, names: Iterable[str]) -> str | None:
    """Return the name that begins with the word, if there is only one, or the most similar name."""
    known = sorted(set(names))
    begun = [name for name in known if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=_NEAR)), None)


def near_file(path: str) -> str | None:
    """Return the file or folder with the most similar name in the folder of a path that does not exist."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in wanted.parent.iterdir() if entry.suffix == wanted.suffix)
    except OSError:
        return None
    near = difflib.get_close_matches(wanted.name, names, n=1, cutoff=_NEAR)
    return str(wanted.with_name(near[0])) if near and near[0] != wanted.name else None


def near_factory(target: str) -> str | None:
    """Return `FILE.py:FUNCTION` for a Python file that was named with a wrong function or without one."""
    file, _, wanted = target.partition(":")
    if not Path(file).is_file():
        file = near_file(file) or file
    names = factories_in(Path(file)) if file.endswith(".py") else []
    if wanted in names or not names:
        return f"{file}:{wanted}" if names else None
    near = difflib.get_close_matches(wanted, names, n=1) if wanted and len(names) > 1 else names[:1]
    return f"{file}:{near[0]}" if near else None


_HELP, _VERSION = frozenset({"help", "-help", "-h", "-?"}), frozenset({"version", "-version", "-V"})
_CODE = re.compile(r"(?:amp)?[\s_-]?(\d{3})", re.IGNORECASE)
_SAME = {
    "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32", "bfloat16": "bf16", "md": "markdown",
    "text": "human", "xml": "junit", "yaml": "json", "info": "warning", "warn": "warning", "none": "never",
    "gpu": "cuda", "yes": "always", "no": "never",
}  # fmt: skip
"""Words that other tools use for our choices."""
_CHOICES = re.compile(r"'([^']*)' is not one of (.*)")  # Typer's message; the exception keeps the value nowhere else

_Commands = dict[str, Any]
_Correction = Callable[[list[str], BaseException, _Commands], list[str] | None]


def instead(arguments: Sequence[str], error: BaseException, commands: _Commands) -> str | None:
    """Return the command line that was probably meant, without the program's name; None without a good guess."""
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
    if arguments[0] not in commands or "--help" in arguments:
        return []
    command = commands[arguments[0]]
    given = command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=True).params
    needed = [one for one in command.params if one.param_type_name == "argument" and one.required]
    return [one.metavar or one.name.upper() for one in needed if not given.get(one.name)]


def _is_taken(arguments: Sequence[str], commands: _Commands) -> bool:
    """Whether the command accepts a command line; one that would be refused is not suggested."""
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
    """Correct a command that is misspelt, left out, or not the first word."""
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
    """Correct an option that is misspelt, or is a value of another (`--json`)."""
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
    refused = _CHOICES.search(str(error)) if getattr(error, "param", None) is not None else None
    if refused is None:
        return None
    word, choices = refused[1].lower(), re.findall(r"'([^']*)'", refused[2])
    same = _SAME.get(word)
    meant = same if same in choices else near_name(word, choices)
    return None if meant is None else _replaced(arguments, refused[1], [meant])


def _another_target(arguments: list[str], error: BaseException, commands: _Commands) -> list[str] | None:
    """Correct a file, folder or function that does not exist, or does not fit this command."""
    if not isinstance(error, AmpdoctorError) or arguments[0] not in commands:
        return None
    command, *rest = arguments
    named = any(":" in word or word.endswith(".py") for word in rest)
    for before, word in pairwise(["", *rest]):
        if word.startswith("-") or "=" in word:  # `--report json=FILE`: a new file resembles none
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
    """Whether a file is a report or a saved profile, even a damaged one: `scan` would not take it either."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.startswith(b"{") or b"ampdoctor_profile" in head


_CORRECTIONS: tuple[_Correction, ...] = (_another_command, _another_option, _another_choice, _another_target)


def _replaced(arguments: Sequence[str], wrong: str, right: Sequence[str]) -> list[str]:
    """Return the arguments with `wrong` replaced, where it is an argument or stands before or after an `=`."""
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


# -- a target of `run` that is no Python script: a launcher, a notebook, a shell script --

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_INTERPRETERS = ("python", "python3", "ipython", "uv", "poetry", "pipenv")
_AS_A_MODULE = {"accelerate": "--module", "deepspeed": "--module", "torchrun": "-m"}
"""The option with which each launcher starts a module instead of a file."""
_SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_HEAD = 128  # the first line names its interpreter within these bytes


def no_script(named: str, arguments: Sequence[str]) -> str | None:
    """Return a sentence that says what to write instead; None where `named` may be a script."""
    file = Path(named)
    name = file.name
    if file.suffix == ".ipynb" and file.is_file():
        made = f"jupyter nbconvert --to script {shlex.quote(named)}"
        return f"{named} is a notebook: `{made}` makes a script of it; run that"
    if file.is_file() and (file.suffix in _SHELLS or _is_of_a_shell(file)):
        return (
            f"{named} is a script of the shell: write `ampdoctor run` in it, where it starts Python, in python's place"
        )
    if os.sep not in named and file.exists():
        return None
    if name in _INTERPRETERS or name.startswith("python3."):
        return f"{name} is left out: write `{_joined(['ampdoctor', 'run', *_from_script(arguments)])}`"
    if name in _LAUNCHERS:
        before = arguments[: len(arguments) - len(_from_script(arguments))]
        ours = (
            ["-m", "ampdoctor", "run"]
            if name == "torchrun"
            else [_AS_A_MODULE.get(name, "python -m"), "ampdoctor", "run"]
        )
        typed = _joined([name, *before, *ours, *_from_script(arguments)])
        return f"{name} starts the processes, and each of them runs ampdoctor: write `{typed}`"
    return None


def _from_script(arguments: Sequence[str]) -> list[str]:
    """Return the words from the first that names a script, or `-m`; all of them where none does."""
    for at, word in enumerate(arguments):
        if word.endswith(".py") or word in ("-m", "--module"):
            return list(arguments[at:])
    return list(arguments)


def _joined(words: Sequence[str]) -> str:
    return " ".join(word if word == "python -m" else shlex.quote(word) for word in words)


def _is_of_a_shell(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            first = opened.read(_HEAD).partition(b"\n")[0]
    except OSError:
        return False
    return first.startswith(b"#!") and first.rstrip().endswith(b"sh")


# -- paths in errors as the user typed them: deeper code only has the file's name --

_MISSING = " does not exist."


def as_typed(said: str, arguments: Sequence[str]) -> str:
    """Return a message with the path from the command line in place of the file's name that it begins with."""
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        name = PurePath(path).name
        if not name or not said.startswith(f"{name} "):
            continue
        missing = said == f"{name}{_MISSING}"
        if missing and "://" in path:
            return f"{path} is a URL, and none is fetched: download the file and name that."
        if missing and set("*?[") & set(path):
            return f"{path} does not exist: the shell has found no file that this pattern matches."
        return path + said.removeprefix(name)
    return said
