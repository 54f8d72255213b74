"""Which way in fits: for a command that was not told what to replay, from Python files read as text; none is run."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampdoctor.cli.suggesting.typer_errors import is_usage_error
from ampdoctor.errors import FactoryError
from ampdoctor.replay.user_modules import factories_in, sure_factories_in

REPLAYING = ("bisect-nan", "profile", "recommend")
"""The commands that take a run."""
_LONGEST = 1_000_000
"""Bytes of a file that is read."""
_LISTED = 200
"""Python files of a folder that are read."""
_SHOWN = 5
"""Files that are named: as many as can be read at a glance."""
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_NOT_REPLAYED = {
    "deepspeed": "DeepSpeed's engine, which is not replayed: hand over its model, loss and optimizer as a TrainingRun",
    "jax": "JAX, which is not PyTorch",
    "tensorflow": "TensorFlow, which is not PyTorch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What a Python file is, as far as its text says.

    Attributes:
        what: What trains in it, as a phrase.
        line: Where; None where no single line shows it.
        target: What to name on the command line; None where no door fits.
    """

    what: str
    line: int | None = None
    target: str | None = None


def door_of(file: Path) -> Door | None:
    """Returns what a file is; None if nothing in it trains, or it cannot be read as Python."""
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
    """Returns the methods that are called, each with its first line."""
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
    """Returns the lines that say which way in fits; [] where the command line was refused for something else.

    Args:
        arguments: What was typed, without the program's name.
        error: What refused it.
    """
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
    """Returns the ways in, each with what to type."""
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
    """Returns what lies in a folder, with what to type."""
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
