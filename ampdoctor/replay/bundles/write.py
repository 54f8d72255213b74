"""`write_bundle` writes a recorded step as a folder: all of it, or nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

import torch

from ampdoctor.errors import OutputError
from ampdoctor.hooks.json_values import NotSerializableError, class_name, constants_of, written
from ampdoctor.hooks.program import PriorSteps, Program
from ampdoctor.package import version
from ampdoctor.replay.bundles.entries import StatesOut, optimizer_out, settings_out, stored_tensor, write_safetensors
from ampdoctor.replay.bundles.instructions import instruction_out, line_out
from ampdoctor.replay.bundles.model import Made, code_of, described
from ampdoctor.replay.bundles.read import CALLS, LOG, MANIFEST, SCHEMA, STATE
from ampdoctor.replay.recorded_step import format_of, prepared_models, with_inner_autocast

# -- what goes into a bundle, and what is left out where it would be too large --

MANIFEST_ROOM = 1 << 20
"""Bytes that are reserved for manifest and log before they are written."""
_MOST_TEXT = 4 << 20  # characters of all earlier steps in a manifest: its reader has bounds; indents double the text


class CollectedStep:
    """The data of one step in a bundle."""

    def __init__(self, program: Program, name: str, states: StatesOut, known: dict[int, dict[str, Any]]) -> None:
        self.cannot: list[str] = []  # sentences: why it cannot be run again
        self.doubts = program.unexplained  # sentences: what its instructions do not cover
        self.tensors: dict[str, torch.Tensor] = {}  # its inputs and buffers by their names in the file
        self._known = known
        instructions: list[Any] = []
        for one in program.instructions:
            try:
                instructions.append(instruction_out(one, states.index_of))
            except NotSerializableError as error:
                self.cannot.append(str(error))
        given = [self._needed(f"{name}given/{index}", tensor) for index, tensor in enumerate(program.given)]
        before = {key: self._needed(f"{name}before/{key}", tensor) for key, tensor in program.buffers.items()}
        self.said: dict[str, Any] = {
            "step": program.step,
            "line": line_out(program.line),
            "instructions": [] if self.cannot else instructions,
            "given": given,
            "before": before,
        }

    def _needed(self, key: str, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        stored = stored_tensor(key, tensor)
        if isinstance(stored, str):
            self.cannot.append(f"a tensor that entered the step {stored}")
            return None
        entry, self.tensors[key] = stored
        self._known[id(tensor)] = entry
        return entry


class BundleContents:
    """All data of a bundle."""

    def __init__(self, program: Program, made: Made) -> None:
        self._program = program
        self._lacking: list[str] = []
        self.earlier: list[CollectedStep] = []  # oldest first
        self.calls: dict[str, torch.Tensor] = {}  # tensors of the calls by their names in the file
        self.state: dict[str, torch.Tensor] = {}  # parameters and buffers
        self.moments: dict[str, torch.Tensor] = {}  # the optimizer's state
        self.has_weights = True  # whether `state` holds the parameters
        self._weights: set[str] = set()
        self._states = StatesOut()
        self._known: dict[int, dict[str, Any]] = {}
        self._step = CollectedStep(program, "", self._states, self._known)
        self.cannot = self._step.cannot
        self.calls.update(self._states.tensors)
        self.calls.update(self._step.tensors)
        model = program.model
        self._parameters = self._named(dict(model.named_parameters(remove_duplicate=False)), "parameter")
        self._buffers = self._named(dict(model.named_buffers(remove_duplicate=False)), "buffer")
        self._model = described(model, made)
        self._optimizer = self._of_optimizer()

    def _named(self, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, Any]:
        first: dict[int, str] = {}
        entries: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if first.setdefault(id(tensor), name) != name:
                entries[name] = {"same_as": first[id(tensor)]}
                continue
            key = f"{what}/{name}"
            stored = stored_tensor(key, tensor)
            if isinstance(stored, str):
                self._lacking.append(f"the {what} {name} {stored}: it stays as the model is made")
                continue
            entries[name], self.state[key] = stored
            if what == "parameter":
                self._weights.add(key)
        return entries

    def _of_optimizer(self) -> dict[str, Any] | None:
        optimizer = self._program.optimizer
        if optimizer is None:
            return None
        names = {id(p): name for name, p in self._program.model.named_parameters()}

        def tensor(key: str, value: torch.Tensor) -> Any:
            stored = stored_tensor(key, value)
            if isinstance(stored, str):
                self._lacking.append(f"{key} {stored}")
                return None
            entry, self.moments[key] = stored
            return entry

        said = optimizer_out(_bare(optimizer), names, tensor, self._program.settings)
        if said["lost"]:
            self._lacking.append(
                f"settings or state of the optimizer that are no plain values: {', '.join(said['lost'])}"
            )
        return {"name": self._program.optimizer_name, **said}

    def code(self) -> str | None:
        """Returns what the user has to give to `--model`."""
        return code_of(self._model)

    def fit(self, max_bytes: int) -> tuple[str, ...]:
        """Leave out what exceeds the limit; returns what is left out, as sentences."""
        room = self._room(max_bytes)
        weights, moments = bytes_of(self.state) - self._buffer_bytes(), bytes_of(self.moments)
        said = list(self._lacking)
        if weights + moments > room and self.moments:
            self._leave_out_moments()
            said.append(f"the optimizer's state ({shown(moments)}) does not fit into {shown(max_bytes)}")
            moments = 0
        if weights + moments > room:
            self._leave_out_weights()
            said.append(
                f"the parameters ({shown(weights)}) do not fit into {shown(max_bytes)}: give a checkpoint of the "
                f"training from before this step with --checkpoint"
            )
        return tuple(said)

    def lead(self, leading: PriorSteps, max_bytes: int) -> tuple[str, ...]:
        """Add the steps before this one, newest first, until the room ends; returns what is left out, as sentences."""
        self._leave_out_moments()
        self._leave_out_weights()
        room, text = self._room(max_bytes), _MOST_TEXT
        ended = list(leading.left_out)
        for program, loss in zip(
            map(with_inner_autocast, reversed(leading.steps)), reversed(leading.losses), strict=True
        ):
            step = CollectedStep(program, f"earlier/{program.step}/", self._states, self._known)
            step.said |= {"settings": settings_out(program.settings), "loss": loss}
            room, text = room - bytes_of(step.tensors), text - len(json.dumps(step.said, allow_nan=False))
            if step.cannot or room < 0 or text < 0:
                why = step.cannot[0] if step.cannot else "it is more than a bundle may have"
                ended = [f"what was before these {len(self.earlier)} updates is not in it: {why}"]
                break
            self.earlier.insert(0, step)
            self.calls.update(step.tensors)
        self.calls.update(self._states.tensors)
        return (*self._lacking, _weights_of(leading, len(self.earlier)), *ended)

    def _room(self, max_bytes: int) -> int:
        taken = bytes_of(self.calls) + self._buffer_bytes()
        if taken > max_bytes - MANIFEST_ROOM:
            raise OutputError(
                f"no bundle is written: what entered the step takes {shown(taken)}, and the bundle may have "
                f"{shown(max_bytes)}"
            )
        return max_bytes - MANIFEST_ROOM - taken

    def _buffer_bytes(self) -> int:
        return bytes_of({name: one for name, one in self.state.items() if name not in self._weights})

    def _leave_out_moments(self) -> None:
        self.moments.clear()
        if self._optimizer is not None:
            self._optimizer["state"] = {}

    def _leave_out_weights(self) -> None:
        self.has_weights = False
        for name in self._weights:
            self.state.pop(name, None)

    def own_policy(self) -> str:
        """Returns the autocast policy of the device that the step ran on."""
        tensors = [*self._program.given, *self._program.model.parameters()]
        return "cuda" if any(tensor.is_cuda for tensor in tensors) else "native"

    def manifest(self) -> dict[str, Any]:
        """Returns its part of the manifest."""
        program = self._program
        precision, autocast = format_of(program)
        return {
            "precision": precision,
            "autocast": autocast,
            "model": self._model,
            "globals": constants_of(type(part) for part in program.model.modules()),
            "prepared": list(prepared_models(program.model)),
            "evaluating": [name for name, part in program.model.named_modules() if not part.training],
            "optimizer": self._optimizer,
            **self._step.said,
            "cannot": list(dict.fromkeys(self.cannot)),
            "unexplained": list(program.unexplained),
            "random": self._states.entries,
            "parameters": self._parameters,
            "buffers": self._buffers,
        }


def _weights_of(leading: PriorSteps, earlier: int) -> str:
    counted = ""
    if leading.made is not None:
        at = f"{leading.made - earlier} to {leading.made}" if earlier else f"{leading.made}"
        counted = f", whose optimizer had made {at} updates"
    since = f"; the updates since, at most {earlier}, are in it" if earlier else ""
    right = "the last checkpoint from before it" if earlier else "a checkpoint from right before it"
    return (
        f"the parameters and the optimizer's state: the step had changed them before it was known to be sick. Give "
        f"{right} with --checkpoint{counted}{since}"
    )


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the size of tensors in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def shown(count: int) -> str:
    """Returns a number of bytes as text, in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A bundle that was written."""

    folder: Path
    size: int  # bytes of its files
    left_out: tuple[str, ...]  # as sentences
    replays: bool  # whether the step can be run again from it
    code: str | None = None  # what the user has to give to `--model`; None if no code is needed
    from_checkpoint: bool = False  # its weights must come from a checkpoint


def write_bundle(
    folder: Path,
    program: Program,
    *,
    made: Made = lambda _module: None,
    rank: int = 0,
    world: int = 1,
    policy: Literal["cuda", "native"] | None = None,
    weights_before: bool = True,
    leading: PriorSteps | None = None,
    scaler_state: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    log: Sequence[str] = (),
    max_bytes: int = 4_000_000_000,
) -> Written:
    """Write a recorded step into `folder`, which must not exist yet.

    It waits for a GPU, and copies tensors from it one by one; the training's own tensors are not changed.

    `policy` is the autocast policy for a replay on a CPU (None: CUDA's if a tensor was on a GPU, else the CPU's own).
    `weights_before` says whether the weights are still those from before the step. With `leading` the earlier updates
    are written, and weights and optimizer state are left out: they are no longer known. `scaler_state` is the scaler's
    `state_dict` (None: its present state), `diagnosis` is strict JSON, and `log` has the log's last lines without line
    ends. Where the bundle would exceed `max_bytes`, the optimizer's state is left out first, then the parameters.

    Raises OutputError if the calls alone exceed `max_bytes` or the disk fails; no file remains then.
    """
    collected = BundleContents(with_inner_autocast(program), made)
    left_out = collected.fit(max_bytes) if leading is None else collected.lead(leading, max_bytes)
    manifest = {
        "schema": SCHEMA,
        "ampdoctor": version(),
        "versions": _versions(),
        "step": program.step,
        "rank": rank,
        "world": world,
        "policy": policy or collected.own_policy(),
        "weights": ("before the step" if weights_before else "after the step") if collected.has_weights else "left out",
        "scaler": _scaler(program.scaler, scaler_state),
        **({} if leading is None else {"updates": leading.made}),
        **({"earlier": [step.said for step in collected.earlier]} if collected.earlier else {}),
        **collected.manifest(),
        "left_out": list(left_out),
        "diagnosis": None if diagnosis is None else dict(diagnosis),
    }
    manifest["exact"] = _exact(manifest, collected)
    text = json.dumps(manifest, allow_nan=False, indent=1)
    size = _write_whole(folder, collected, text, log)
    return Written(
        folder=folder,
        size=size,
        left_out=left_out,
        replays=not collected.cannot,
        code=collected.code(),
        from_checkpoint=not collected.has_weights,
    )


def _scaler(scaler: Any, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if scaler is None or not hasattr(scaler, "state_dict"):
        return None
    held = scaler.state_dict() if state is None else state
    numbers = {str(key): value for key, value in held.items() if type(value) in (int, float, bool)}
    return {"class": class_name(type(scaler)), "state": {key: written(value) for key, value in numbers.items()}}


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version_of(name)
    return found


def _exact(manifest: Mapping[str, Any], collected: BundleContents) -> dict[str, list[str]]:
    no = list(manifest["unexplained"])
    if "updates" in manifest and (manifest["scaler"] or {}).get("state"):
        no.append("the loss scale is the one behind the step")
    if collected.earlier:
        doubts = Counter(doubt for step in collected.earlier for doubt in step.doubts)
        no += [
            f"of {count} of the {len(collected.earlier)} updates before it: {doubt}" for doubt, count in doubts.items()
        ]
        if manifest["world"] > 1:
            no.append(
                "the recorded updates are of this rank's gradients alone: the weights that they lead to are others"
            )
        no.append(
            "the weights are made again by the recorded updates since the checkpoint: exact where the machine, its "
            "kernels and the updates are those of the training, and near them elsewhere"
        )
    if manifest["weights"] == "after the step":
        no.append("the weights are those after the step: where it changed them, the replay may say otherwise")
    if any(entry["cuda"] for entry in manifest["random"]) and collected.own_policy() == "cuda":
        no.append("random numbers that a GPU drew (dropout) are other ones on a machine without it")
    return {"no": no}


def _write_whole(folder: Path, collected: BundleContents, manifest: str, log: Sequence[str]) -> int:
    if folder.exists():
        raise OutputError(f"{folder} exists: a bundle is never written over anything")
    beside = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        beside.mkdir(parents=True)
        needed = bytes_of(collected.calls) + bytes_of(collected.state) + bytes_of(collected.moments) + len(manifest)
        free = shutil.disk_usage(beside).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"it takes {shown(needed)}, and {shown(free)} are free")  # noqa: TRY301 - the disk would raise the same
        write_safetensors(beside / CALLS, collected.calls)
        write_safetensors(beside / STATE, {**collected.state, **collected.moments})
        _write_text(beside / LOG, "".join(f"{line}\n" for line in log))
        _write_text(beside / MANIFEST, manifest + "\n")
        _flush_folder(beside)
        size = sum(file.stat().st_size for file in beside.iterdir())
        beside.rename(folder)
        _flush_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise OutputError(
            f"no bundle is written in {folder.parent}: {(error.strerror or str(error)).lower()}"
        ) from None
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return size


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
