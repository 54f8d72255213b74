"""The last layout: reads the files that no other layout has taken, each by itself."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ampdoctor.checkpoints.formats.json_file import read_trainer_state
from ampdoctor.checkpoints.formats.sniff import sniff
from ampdoctor.checkpoints.layouts.folder_logs import may_be_log
from ampdoctor.checkpoints.layouts.gathering import Gathering, read_saved
from ampdoctor.checkpoints.layouts.layout import Layout, Level
from ampdoctor.checkpoints.layouts.shards import check_numbers, is_numbered, numbered_family
from ampdoctor.checkpoints.storage.files import RegularFile
from ampdoctor.errors import CheckpointError
from ampdoctor.evidence.report import Skipped

_OTHER = "not the name of a format that is read"
TRAINER_STATE = "trainer_state.json"
RANDOM_STATES = "random_states_*.pkl"

_LEFT_ALONE: tuple[tuple[str, str], ...] = (
    ("training_args.bin", "pickled arguments; never opened"),
    ("rng_state*.pth", "random state"),
    (RANDOM_STATES, "random state"),
    ("scheduler*.pt", "learning-rate schedule"),
    ("scheduler*.bin", "learning-rate schedule"),
    ("dl_state_dict*.bin", "a data loader's place"),
    ("custom_checkpoint_*.pkl", "pickled object; never opened"),
    ("sampler*.bin", "pickled object; never opened"),
    ("tokenizer*", "tokenizer"),
)
"""Usual neighbours of a checkpoint that hold no weights, moments or scaler."""

_TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".index.json")
"""In a folder only these are opened, in upper case as well; the contents then decide the format."""
_OTHER_WEIGHTS = re.compile(
    r"\.(safetensors|pt|pth|bin|ckpt|pkl|tar)[.~]|\.(weights|params|h5|keras|npz|npy|gguf|ggml|onnx|msgpack|ot|pickle|state)$",
    re.IGNORECASE,
)
"""Names of files that hold weights, in a format that is not read or as a copy that no loader takes. Reports name such
files: what was not examined must not pass for healthy."""


def may_hold_tensors(name: str) -> bool:
    """Is a file of this name opened inside a folder, rather than known to hold something else?"""
    return name.lower().endswith(_TENSOR_SUFFIXES) and neighbour(name) is None


def neighbour(name: str) -> str | None:
    """Returns the contents of a file with the name of a usual neighbour of checkpoints; None for any other name."""
    return next((what for pattern, what in _LEFT_ALONE if fnmatch.fnmatchcase(name.lower(), pattern)), None)


def _claims(name: str) -> bool:
    says_weights = name.lower().endswith(_TENSOR_SUFFIXES) or _OTHER_WEIGHTS.search(name) is not None
    return name == TRAINER_STATE or says_weights


def _read(into: Gathering, level: Level, names: Sequence[str]) -> None:
    left = [n for n in names if n not in level.taken and n not in level.listing.folders and not may_be_log(n)]
    check_numbers(into, [name for name in left if _add_file(into, level, name)], level.prefix)
    level.taken |= set(left)


def _add_file(into: Gathering, level: Level, name: str) -> bool:
    """Open a single file; returns whether it became a part."""
    path, shown = level.path / name, level.prefix + name
    reason = _left_alone(name, indexed=level.indexed)
    if reason is not None:
        into.skipped.append(
            Skipped(what=shown, reason=reason, kind="other_weights" if reason == _OTHER else "left_out")
        )
        if fnmatch.fnmatchcase(name, RANDOM_STATES):
            _take_step(into, path, shown)
        return False
    try:
        file = RegularFile(path, shown)
    except CheckpointError as error:
        into.refuse(shown, error)
        return False
    if name != TRAINER_STATE:
        return into.add(file, index=level.prefix + numbered_family(name) if is_numbered(name) else "") is not None
    try:
        with file:
            into.global_step, log = read_trainer_state(file)
            into.log, into.own_log = (log, True) if log else (into.log, into.own_log)
    except CheckpointError as error:
        into.refuse(shown, error)
    return False


def _left_alone(name: str, *, indexed: bool) -> str | None:
    """Returns why a file is not opened; None if it is."""
    if name != TRAINER_STATE and not name.lower().endswith(_TENSOR_SUFFIXES):
        return _OTHER
    if indexed and is_numbered(name):
        return "a shard that no index names"
    return neighbour(name)


def _take_step(into: Gathering, path: Path, name: str) -> None:
    """Take the step that Accelerate keeps beside the random state; a file that cannot be read has none.

    It counts batches, and may restart with each epoch, so it is only used if nothing else counts steps.
    """
    try:
        with RegularFile(path, name) as file:
            tree = read_saved(file, sniff(file)).tree
    except CheckpointError:
        return
    step = tree.get("step") if isinstance(tree, Mapping) else None
    if type(step) is int and step > 0:
        into.spare_step = max(step, into.spare_step or 0)


LOOSE_FILES = Layout(name="", claims=_claims, read=_read)
