"""Says what fits in the place of a refused target: what can be replayed, a launcher, a similar name."""

from __future__ import annotations

import ast
import difflib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from ampdoctor.errors import FactoryError
from ampdoctor.replay.user_modules import factories_in, sure_factories_in

# -- Typer's errors: it does not export their types, so they are recognised by attributes --

_PYDANTICS = "Value error, "  # Typer's validation puts this before the message about a choice


def is_usage_error(error: BaseException) -> bool:
    """Whether Typer refused the command line."""
    return callable(getattr(error, "format_message", None)) and isinstance(getattr(error, "exit_code", None), int)


def said_by(error: Any) -> str:
    """Return the error's message with its option."""
    return str(error.format_message()).replace(_PYDANTICS, "", 1)


def said_of_the_value(error: Any) -> str:
    """Return the error's message about the value alone, for a value that did not come from an option."""
    return str(error.message).replace(_PYDANTICS, "", 1)


# -- what a file trains with, for a command without a target: Python files are read as text, never run --

REPLAYING = ("bisect-nan", "profile", "recommend")  # the commands that replay a run
_LONGEST = 1_000_000  # largest file that is read, in bytes
_LISTED = 200  # most Python files that are read in a folder
_SHOWN = 5  # most files that are listed
_ENTRIES = {
    "fit": ("lightning", "pytorch_lightning", "lightning_fabric"),
    "train": ("transformers", "trl", "sentence_transformers"),
    "backward": ("accelerate",),
}
"""The methods with which frameworks train, beside a loop's own `backward` and `step`."""


def target_in(file: Path) -> str | None:
    """Return what to name of a file that trains, judged by its text; None where nothing in it can be replayed."""
    try:
        if not file.is_file() or file.stat().st_size > _LONGEST:
            return None
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: set[str] = set()
    packages: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            calls.add(node.func.attr)
        elif isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    if factories := sure_factories_in(file):
        return f"{file}:{factories[0]}"
    if "deepspeed" in packages and "initialize" in calls:  # its engine is not replayed
        return None
    by_framework = any(entry in calls and packages & {*of} for entry, of in _ENTRIES.items())
    return str(file) if by_framework or {"backward", "step"} <= calls else None


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
    fits_none = all(target_in(file) is None and not factories_in(file) for file in scripts)
    return _all_of(arguments[0]) if scripts and fits_none else []


def _is_missing(error: Any) -> bool:
    parameter = getattr(error, "param", None)
    missing = is_usage_error(error) and type(error).__name__ == "MissingParameter"
    return missing and getattr(parameter, "param_type_name", None) == "argument"


def _all_of(command: str) -> list[str]:
    late = [
        "  what fails late: either of these, with --checkpoint checkpoint-30000 --until-sick",
        "    runs on from a checkpoint until something breaks",
    ]
    return [
        "What can be replayed:",
        f"  a script: ampdoctor {command} train.py -- --its arguments",
        "    runs it up to its first step and replays from there; nothing is added to it. It is a plain loop, or calls",
        "    Trainer.train() (transformers, TRL), Trainer.fit() (Lightning) or accelerator.backward()",
        f"  a function: ampdoctor {command} train.py:make_trainer",
        "    returns a Trainer, (LightningModule, Trainer), (Accelerator, and what its prepare gave), or a TrainingRun",
        *(late if command == "bisect-nan" else []),
        "A checkpoint alone, without its code: ampdoctor scan checkpoint-30000",
    ]


def _in_folder(command: str, folder: Path) -> list[str]:
    try:
        files = sorted(folder.glob("*.py"))[:_LISTED]
    except OSError:
        return []
    found = [target for file in files if (target := target_in(file)) is not None]
    lines = [f"  ampdoctor {command} {shlex.quote(target)}" for target in found[:_SHOWN]]
    more = [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return ["In this folder:", *lines, *more] if lines else []


# -- similar names --

_NEAR = 0.75  # similarity from which two names count as spellings of one: about one letter moved, missing or added


def close_file(path: str) -> str | None:
    """Return the file or folder with the most similar name in the folder of a path that does not exist."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in wanted.parent.iterdir() if entry.suffix == wanted.suffix)
    except OSError:
        return None
    near = difflib.get_close_matches(wanted.name, names, n=1, cutoff=_NEAR)
    return str(wanted.with_name(near[0])) if near and near[0] != wanted.name else None


# -- a target of `run` that is no Python script: a launcher, a notebook, a shell script --

_STARTERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")


def no_script(named: str) -> str | None:
    """Return a sentence that says what to write instead; None where `named` may be a script."""
    file = Path(named)
    if file.suffix == ".ipynb" and file.is_file():
        made = f"jupyter nbconvert --to script {shlex.quote(named)}"
        return f"{named} is a notebook: `{made}` makes a script of it; run that"
    if file.is_file() and (file.suffix in _SHELLS or _is_of_a_shell(file)):
        return (
            f"{named} is a script of the shell: write `ampdoctor run` in it, where it starts Python, in python's place"
        )
    if file.name not in _STARTERS or (os.sep not in named and file.exists()):
        return None
    return (
        f"{file.name} is no script: write `ampdoctor run train.py`; of several processes `torchrun -m ampdoctor run "
        "train.py`, `accelerate launch --module ampdoctor run train.py` or `srun python -m ampdoctor run train.py`"
    )


def _is_of_a_shell(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            first = opened.readline(128)
    except OSError:
        return False
    return first.startswith(b"#!") and first.rstrip().endswith(b"sh")


# -- paths in errors as the user typed them: deeper code only has the file's name --


def full_path(said: str, arguments: Sequence[str]) -> str:
    """Return a message with the path from the command line in place of the file's name that it begins with."""
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        name = PurePath(path).name
        if not name or not said.startswith(f"{name} "):
            continue
        missing = said == f"{name} does not exist."
        if missing and "://" in path:
            return f"{path} is a URL, and none is fetched: download the file and name that."
        if missing and set("*?[") & set(path):
            return f"{path} does not exist: the shell has found no file that this pattern matches."
        return path + said.removeprefix(name)
    return said
