"""Says what fits in the place of a refused target: what can be replayed, a launcher's form; paths as typed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from ampdoctor.errors import FactoryError

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


# -- what can be replayed, for a command without a target --

REPLAYING = ("bisect-nan", "profile", "recommend")  # the commands that replay a run


def doors(arguments: Sequence[str], error: BaseException) -> list[str]:
    """Return lines that say which target fits; [] where `error` refused the command line for another reason."""
    if arguments[:1] == ["run"] and _is_missing(error):
        return ["Name what trains: ampdoctor run train.py --its arguments, or ampdoctor run -m package.train"]
    if not arguments or arguments[0] not in REPLAYING:
        return []
    if _is_missing(error):
        return _all_of(arguments[0])
    notebook = next((word for word in arguments[1:] if word.endswith(".ipynb") and Path(word).is_file()), None)
    if not isinstance(error, FactoryError) or notebook is None:
        return []
    made = f"jupyter nbconvert --to script {shlex.quote(notebook)}"
    return [f"A notebook is no Python file: {made} makes one; name that."]


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


# -- a target of `run` that is no Python script: a launcher, a notebook, a shell script --

_STARTERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")


def no_script(named: str) -> str | None:
    """Return a sentence that says what to write instead; None where `named` may be a script."""
    file = Path(named)
    if file.suffix == ".ipynb" and file.is_file():
        made = f"jupyter nbconvert --to script {shlex.quote(named)}"
        return f"{named} is a notebook: `{made}` makes a script of it; run that"
    if file.suffix in _SHELLS and file.is_file():
        return (
            f"{named} is a script of the shell: write `ampdoctor run` in it, where it starts Python, in python's place"
        )
    if file.name not in _STARTERS or (os.sep not in named and file.exists()):
        return None
    return (
        f"{file.name} is no script: write `ampdoctor run train.py`; of several processes `torchrun -m ampdoctor run "
        "train.py`, `accelerate launch --module ampdoctor run train.py` or `srun python -m ampdoctor run train.py`"
    )


# -- paths in errors as the user typed them: deeper code only has the file's name --


def full_path(said: str, arguments: Sequence[str]) -> str:
    """Return a message with the path from the command line in place of the file's name that it begins with."""
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        name = PurePath(path).name
        if name and said.startswith(f"{name} "):
            return path + said.removeprefix(name)
    return said
