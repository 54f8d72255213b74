"""Reads from a file's or folder's name at which moment of a training it was saved.

Only the word right before a number tells what it counts: `step_100` is a moment, `rank_100` a process, `model_1` either
the first step or the second of two models. An uncertain name is reported as "unsure", and the caller looks inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Unit = Literal["step", "epoch", "number", "unsure"]
"""What a name's number counts: optimizer steps; epochs; saves or steps (`checkpoint-500`); or perhaps something other
than time (`model_500`)."""

_STEP_WORDS = frozenset({"step", "steps", "iter", "iters", "iteration", "iterations", "update", "updates"})
_EPOCH_WORDS = frozenset({"epoch", "epochs", "ep"})
_SAVE_WORDS = frozenset({"checkpoint", "checkpoints", "ckpt", "ckpts", "chkpt", "snapshot", "save"})
_LAST_WORDS = frozenset({"last", "latest", "final", "newest"})
_CHOSEN_WORDS = frozenset({"best"})
_NO_TIME = frozenset(
    {
        "rank", "ranks", "shard", "part", "of", "layer", "expert", "random", "rng", "worker", "fold", "seed", "node",
        "consolidated", "fsdp", "zero", "custom",
    }
)  # fmt: skip
"""A number next to one of these words, or beside one, counts pieces of one checkpoint."""

_PIECES = frozenset({"rank", "ranks", "shard", "part", "worker", "node", "gpu", "mp", "tp", "pp", "dp", "fsdp", "zero"})
"""A number behind one of these words counts pieces of one checkpoint, also where the name tells its step."""
_COMPONENTS = frozenset(
    {
        "model", "net", "network", "module", "weights", "params", "state", "optimizer", "optim", "opt", "optimizers",
        "scheduler", "sched", "scaler", "ema", "swa", "avg", "average", "averaged", "shadow", "raw", "g", "d", "dur",
        "netg", "netd", "gen", "generator", "disc", "discriminator", "critic", "actor", "policy", "value", "target",
        "online", "teacher", "student", "encoder", "decoder", "vae", "unet", "prior", "lora", "adapter", "head",
        "backbone", "embedding", "embeddings",
    }
)  # fmt: skip
"""Words for what of a training a file holds: files that differ in them alone are of one training."""
_RUN = re.compile(
    r"(?<![A-Za-z])(exp|experiment|run|trial|seed|fold|job)[-_=]?([A-Z]|\d+)(?![A-Za-z\d])", re.IGNORECASE | re.ASCII
)
"""What tells one training from another in a name: `exp1`, `seed=2`, `runB`."""
_TOKEN = re.compile(r"\d+\.\d+|[A-Za-z]+|\d+|#")

_SUFFIX = re.compile(r"(\.pth\.tar|\.[a-z]+)$")
_VERSION = re.compile(r"-v(\d+)$")
_NUMBERED = re.compile(r"([A-Za-z]*)([-_=. ]*)(?<!\d)(?<!\d\.)(\d+)((?:[-_]\d+)?)(?![\dA-Za-z]|\.\d)")
_WORD = re.compile(r"[a-z]+")
_PIECE = re.compile(r"\d+-of-\d+")
_PADDED = 4
"""A number right after a word with at least this many digits belongs to a series (`model010000`); with fewer it is part
of the word (`fp16`, `v2`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment that a name tells.

    Attributes:
        unit: What `number` counts.
        number: The number; of several, the finest.
        epoch: The epoch, if the name has it beside the step.
        stem: The name without these numbers: equal for the files of one series.
        version: Distinguishes files of one moment: the number that Lightning adds (`-v1`), else 0.
    """

    unit: Unit
    number: int
    epoch: int | None
    stem: str
    version: int = 0


def moment_of(name: str, *, folder: bool) -> Moment | None:
    """Returns the moment that a name tells; None if it tells none.

    Args:
        name: Name of a file, with its suffix, or of a folder.
        folder: True for a folder, False for a file.
    """
    base = name.removesuffix(".ckpt") if folder else _SUFFIX.sub("", name)
    found = _VERSION.search(base)
    base = _VERSION.sub("", base)
    version = int(found.group(1)) if found else 0
    by_unit: dict[Unit, re.Match[str]] = {}
    for match in _NUMBERED.finditer(base):
        unit = _unit(match, base, folder=folder)
        if unit is not None:
            by_unit[unit] = match
    order: tuple[Unit, ...] = ("step", "epoch", "number", "unsure")
    unit = next((unit for unit in order if unit in by_unit), None)
    if unit is None:
        return None
    match = by_unit[unit]
    finest = match.group(3) if unit == "epoch" else match.group(4) or match.group(3)
    epoch = by_unit.get("epoch") if unit == "step" else None
    stem = base
    for part in sorted((m for m in (match, epoch) if m is not None), key=lambda m: -m.start()):
        stem = f"{stem[: part.start(3)]}#{stem[part.end() :]}"
    return Moment(
        unit=unit,
        number=int(finest.lstrip("-_")),
        epoch=int(epoch.group(3)) if epoch is not None else None,
        stem=stem,
        version=version,
    )


def step_in(path: Path) -> int | None:
    """Returns the training step in a file's or folder's name; None if its number may count something else."""
    moment = moment_of(path.name, folder=path.is_dir())
    return moment.number if moment is not None and moment.unit == "step" else None


def run_of(stem: str, *, settings: bool = False) -> str:
    """Returns what a stem says beside the step: equal for the files of one training, as far as names tell.

    What a file holds (`model`, `optimizer`, `ema_0.999`), which piece it is (`rank0`) and which checkpoint is the best
    are left out.

    Args:
        stem: As in `Moment`.
        settings: Numbers with a decimal point are settings (`lr0.1`), and not metrics, which each save has its own of.
    """
    told: list[str] = []
    before = ""
    for token in _TOKEN.findall(stem):
        word = token.lower()
        part = before in _PIECES if word.isdigit() else "." in word and (before in _COMPONENTS or not settings)
        if not part and word not in _COMPONENTS | _CHOSEN_WORDS | _LAST_WORDS | _PIECES:
            told.append(word)
        before = word
    return " ".join(told)


def names_run(stem: str) -> str | None:
    """Returns the part of a stem that names one of several trainings (`exp1`); None where there is none."""
    match = _RUN.search(stem)
    return match.group(0).lower() if match is not None else None


def alias_of(name: str, *, folder: bool) -> Literal["last", "chosen"] | None:
    """Returns "last" or "chosen" for a name with a word instead of a number: `last.ckpt`, `model_best.pth`."""
    base = _VERSION.sub("", name if folder else _SUFFIX.sub("", name))
    words = set(_WORD.findall(base.lower()))
    if words & _LAST_WORDS:
        return "last"
    return "chosen" if words & _CHOSEN_WORDS else None


def without_alias(name: str) -> str:
    """Returns a name without the words that `alias_of` understands."""
    return _WORD.sub(lambda word: "" if word.group(0) in _LAST_WORDS | _CHOSEN_WORDS else word.group(0), name.lower())


def _unit(match: re.Match[str], base: str, *, folder: bool) -> Unit | None:
    word = match.group(1).lower()
    if word in _STEP_WORDS:
        return "step"
    if word in _EPOCH_WORDS:
        return "epoch"
    words = set(_WORD.findall(base.lower()))
    if _PIECE.search(base) or words & _NO_TIME:
        return None
    if word in _SAVE_WORDS:
        return "number"
    if folder:
        return "unsure" if base == match.group(3) else None  # `run_1` and `version_1` are different trainings
    attached = word and not match.group(2)
    return None if attached and len(match.group(3)) < _PADDED else "unsure"
