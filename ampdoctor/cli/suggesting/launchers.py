"""What was named to be run and is no Python script: a launcher, a notebook, a script of the shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
_INTERPRETERS = ("python", "python3", "ipython", "uv", "poetry", "pipenv")
_AS_A_MODULE = {"accelerate": "--module", "deepspeed": "--module", "torchrun": "-m"}
"""The option of each with which it starts a module instead of a file."""
_SHELLS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch")
_HEAD = 128
"""Bytes in which a first line names its interpreter."""


def no_script(named: str, arguments: Sequence[str]) -> str | None:
    """Returns a sentence that says what to write instead; None where it may be a script.

    Args:
        named: What was typed in the script's place.
        arguments: What follows it.
    """
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
    """What follows from the first word that names a script, or `-m`, on; all where none does."""
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
