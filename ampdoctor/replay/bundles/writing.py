"""`write_bundle`: a recorded step as a folder, whole or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Literal

import torch

from ampdoctor.errors import OutputError
from ampdoctor.loop.inert.writing import NotInertError, class_name, written
from ampdoctor.loop.program import Program
from ampdoctor.package import version
from ampdoctor.replay.bundles.describing import Made, code_of, described
from ampdoctor.replay.bundles.inner_autocast import prepared_models, with_inner_autocast
from ampdoctor.replay.bundles.instructions import instruction_out, relative
from ampdoctor.replay.bundles.manifest import CALLS, LOG, MANIFEST, SCHEMA, STATE
from ampdoctor.replay.bundles.optimizers import optimizer_out
from ampdoctor.replay.bundles.random_states import StatesOut
from ampdoctor.replay.bundles.safetensors_out import CODES, write_safetensors
from ampdoctor.replay.bundles.tensors import Lying, lying
from ampdoctor.replay.recorded.running import format_of

_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "trl", "numpy")
_MANIFEST_ROOM = 1 << 20
"""Bytes that are counted for manifest and log before they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A bundle that was written.

    Attributes:
        folder: Where it is.
        size: Bytes of its files.
        left_out: What it lacks, in sentences.
        replays: Whether the step can be run again from it.
        code: What `--model` has to name for its model to be made again; None where it takes no code.
    """

    folder: Path
    size: int
    left_out: tuple[str, ...]
    replays: bool
    code: str | None = None


def write_bundle(
    folder: Path,
    program: Program,
    *,
    made: Made = lambda _module: None,
    rank: int = 0,
    world: int = 1,
    policy: Literal["cuda", "native"] | None = None,
    weights_before: bool = True,
    scaler_state: Mapping[str, Any] | None = None,
    diagnosis: Mapping[str, Any] | None = None,
    log: Sequence[str] = (),
    max_bytes: int = 4_000_000_000,
) -> Written:
    """Write a recorded step.

    It waits for a GPU, and copies tensors from it one by one; nothing of the training is changed.

    Args:
        folder: The bundle's own folder; it must not exist.
        program: The step.
        made: As in `Made`.
        rank: The process.
        world: Number of processes.
        policy: The autocast that it replays under on a CPU; None: CUDA's if a tensor lay on a GPU, else the CPU's own.
        weights_before: Whether the weights are still those that the step began with.
        scaler_state: The scaler's `state_dict`; None: as it is now.
        diagnosis: What was found in place; strict JSON.
        log: The log's last lines, without their ends.
        max_bytes: The bundle's size at most. The optimizer's state is left out first, then the parameters.

    Raises:
        OutputError: The calls alone are larger than `max_bytes`, or the disk is full, or refuses; nothing is left then.
    """
    collected = _Collected(with_inner_autocast(program), made)
    left_out = collected.fit(max_bytes)
    manifest = {
        "schema": SCHEMA,
        "ampdoctor": version(),
        "versions": _versions(),
        "step": program.step,
        "rank": rank,
        "world": world,
        "policy": policy or collected.own_policy(),
        "weights": "before the step" if weights_before else "after the step",
        "scaler": _scaler(program.scaler, scaler_state),
        **collected.manifest(),
        "left_out": list(left_out),
        "diagnosis": None if diagnosis is None else dict(diagnosis),
    }
    manifest["exact"] = _exact(manifest, collected)
    text = json.dumps(manifest, allow_nan=False, indent=1)
    size = _write_whole(folder, collected, text, log)
    return Written(folder=folder, size=size, left_out=left_out, replays=not collected.cannot, code=collected.code())


class _Collected:
    """What goes into a bundle.

    Attributes:
        cannot: Why the step cannot be run again from it, in sentences.
        calls: Tensors of the calls by their names in the file.
        state: Parameters and buffers.
        moments: The optimizer's state.
    """

    def __init__(self, program: Program, made: Made) -> None:
        self._program = program
        self.cannot: list[str] = []
        self._lacking: list[str] = []
        self.calls: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        self._weights: set[str] = set()
        base = Path.cwd()
        states = StatesOut()
        self._instructions: list[Any] | None = []
        for one in program.instructions:
            try:
                self._instructions.append(instruction_out(one, states.index_of, base))
            except NotInertError as error:
                self.cannot.append(str(error))
        self._random = states.entries
        self.calls.update(states.tensors)
        self._given = [self._needed(f"given/{index}", tensor) for index, tensor in enumerate(program.given)]
        self._before = {name: self._needed(f"before/{name}", tensor) for name, tensor in program.buffers.items()}
        model = program.model
        self._parameters = self._named(dict(model.named_parameters(remove_duplicate=False)), "parameter")
        self._buffers = self._named(dict(model.named_buffers(remove_duplicate=False)), "buffer")
        self._model = described(model, made)
        self._made_file(base)
        self._optimizer = self._of_optimizer()

    def _made_file(self, base: Path) -> None:
        """Files are named as the user would type them."""
        todo: list[Any] = [self._model]
        while todo:
            part = todo.pop()
            if isinstance(part, dict):
                if isinstance(part.get("file"), str) and isinstance(part.get("class"), str):
                    part["file"] = relative(part["file"], base)
                todo += part.values()
            elif isinstance(part, list):
                todo += part

    def _needed(self, key: str, tensor: torch.Tensor) -> Any:
        lies = lying(key, tensor, CODES)
        if isinstance(lies, str):
            self.cannot.append(f"a tensor that entered the step {lies}")
            return None
        self.calls.update(lies.parts)
        return lies.entry

    def _named(self, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, Any]:
        first: dict[int, str] = {}
        entries: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if first.setdefault(id(tensor), name) != name:
                entries[name] = {"same_as": first[id(tensor)]}
                continue
            lies = lying(f"{what}/{name}", tensor, CODES)
            if isinstance(lies, Lying):
                entries[name] = lies.entry
                self.state.update(lies.parts)
                if what == "parameter":
                    self._weights |= lies.parts.keys()
            else:
                self._lacking.append(f"the {what} {name} {lies}: it stays as the model is made")
        return entries

    def _of_optimizer(self) -> dict[str, Any] | None:
        optimizer = self._program.optimizer
        if optimizer is None:
            return None
        names = {id(p): name for name, p in self._program.model.named_parameters()}

        def tensor(key: str, value: torch.Tensor) -> Any:
            lies = lying(key, value, CODES)
            if isinstance(lies, str):
                self._lacking.append(f"{key} {lies}")
                return None
            self.moments.update(lies.parts)
            return lies.entry

        said = optimizer_out(_bare(optimizer), names, tensor)
        if said["lost"]:
            self._lacking.append(
                f"settings or state of the optimizer that are no plain values: {', '.join(said['lost'])}"
            )
        return {"name": self._program.optimizer_name, **said}

    def code(self) -> str | None:
        """What `--model` has to name."""
        return code_of(self._model)

    def fit(self, max_bytes: int) -> tuple[str, ...]:
        """Leave out what goes beyond the cap; returns what is left out, in sentences.

        Raises:
            OutputError: The calls alone go beyond it.
        """
        room = max_bytes - _MANIFEST_ROOM
        calls = _bytes(self.calls)
        buffers = _bytes({name: one for name, one in self.state.items() if name not in self._weights})
        weights, moments = _bytes(self.state) - buffers, _bytes(self.moments)
        said = list(self._lacking)
        if calls + buffers > room:
            raise OutputError(
                f"no bundle is written: what entered the step takes {_shown(calls + buffers)}, and the bundle may have "
                f"{_shown(max_bytes)}"
            )
        if calls + buffers + weights + moments > room and self.moments and self._optimizer is not None:
            self.moments.clear()
            self._optimizer["state"] = {}
            said.append(f"the optimizer's state ({_shown(moments)}) does not fit into {_shown(max_bytes)}")
            moments = 0
        if calls + buffers + weights + moments > room:
            for name in self._weights:
                del self.state[name]
            said.append(
                f"the parameters ({_shown(weights)}) do not fit into {_shown(max_bytes)}: give a checkpoint of the "
                f"training from before this step with --checkpoint"
            )
        return tuple(said)

    def own_policy(self) -> str:
        """The policy of the device that the step ran on."""
        tensors = [*self._program.given, *self._program.model.parameters()]
        return "cuda" if any(tensor.is_cuda for tensor in tensors) else "native"

    def manifest(self) -> dict[str, Any]:
        """Its part of the manifest."""
        program = self._program
        precision, autocast = format_of(program)
        line = program.line
        return {
            "precision": precision,
            "autocast": autocast,
            "model": self._model,
            "prepared": list(prepared_models(program.model)),
            "evaluating": [name for name, part in program.model.named_modules() if not part.training],
            "optimizer": self._optimizer,
            "line": None if line is None else [relative(line[0], Path.cwd()), line[1]],
            "instructions": [] if self.cannot else self._instructions,
            "cannot": list(dict.fromkeys(self.cannot)),
            "unexplained": list(program.unexplained),
            "random": self._random,
            "given": self._given,
            "before": self._before,
            "parameters": self._parameters,
            "buffers": self._buffers,
        }

    def draws_on_gpu(self) -> bool:
        """Whether random numbers may have been drawn by a GPU's generator."""
        return any(entry["cuda"] for entry in self._random) and self.own_policy() == "cuda"


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a framework's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


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


def _exact(manifest: Mapping[str, Any], collected: _Collected) -> dict[str, list[str]]:
    """What is as it was, and what is not, in sentences."""
    yes = ["what entered the models, buffers, autocast and the order of calls and backwards"]
    no = list(manifest["unexplained"])
    if manifest["weights"] == "before the step":
        yes.append("the weights, which are those before the step")
    else:
        no.append("the weights are those after the step: where it changed them, the replay may say otherwise")
    if collected.draws_on_gpu():
        no.append("random numbers that a GPU drew (dropout) are other ones on a machine without it")
    else:
        yes.append("random numbers")
    return {"yes": yes, "no": no}


def _write_whole(folder: Path, collected: _Collected, manifest: str, log: Sequence[str]) -> int:
    if folder.exists():
        raise OutputError(f"{folder} exists: a bundle is never written over anything")
    beside = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        beside.mkdir(parents=True)
        needed = _bytes(collected.calls) + _bytes(collected.state) + _bytes(collected.moments) + len(manifest)
        free = shutil.disk_usage(beside).free
        if needed > free:
            raise OutputError(
                f"no bundle is written: it takes {_shown(needed)}, and {folder.parent} has {_shown(free)}"
            )
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


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _shown(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
