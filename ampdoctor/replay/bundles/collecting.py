"""What goes into a bundle, and what is left out of it where it would be too large."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ampdoctor.errors import OutputError
from ampdoctor.loop.inert.constants import constants_of
from ampdoctor.loop.inert.writing import NotInertError
from ampdoctor.loop.recorded.program import Program
from ampdoctor.replay.bundles.describing import Made, code_of, described
from ampdoctor.replay.bundles.instructions import instruction_out, relative
from ampdoctor.replay.bundles.optimizers import optimizer_out
from ampdoctor.replay.bundles.random_states import StatesOut
from ampdoctor.replay.bundles.safetensors_out import CODES
from ampdoctor.replay.bundles.tensors import Lying, lying
from ampdoctor.replay.recorded.inner_autocast import prepared_models
from ampdoctor.replay.recorded.running import format_of

MANIFEST_ROOM = 1 << 20
"""Bytes that are counted for manifest and log before they are written."""


class Collected:
    """What goes into a bundle.

    Attributes:
        cannot: Why the step cannot be run again from it, in sentences.
        calls: Tensors of the calls by their names in the file.
        state: Parameters and buffers.
        moments: The optimizer's state.
        has_weights: The parameters are among it.
    """

    def __init__(self, program: Program, made: Made) -> None:
        self._program = program
        self.cannot: list[str] = []
        self._lacking: list[str] = []
        self.calls: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        self.has_weights = True
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
        room = max_bytes - MANIFEST_ROOM
        calls = bytes_of(self.calls)
        buffers = bytes_of({name: one for name, one in self.state.items() if name not in self._weights})
        weights, moments = bytes_of(self.state) - buffers, bytes_of(self.moments)
        said = list(self._lacking)
        if calls + buffers > room:
            raise OutputError(
                f"no bundle is written: what entered the step takes {shown(calls + buffers)}, and the bundle may have "
                f"{shown(max_bytes)}"
            )
        if calls + buffers + weights + moments > room and self.moments and self._optimizer is not None:
            self.moments.clear()
            self._optimizer["state"] = {}
            said.append(f"the optimizer's state ({shown(moments)}) does not fit into {shown(max_bytes)}")
            moments = 0
        if calls + buffers + weights + moments > room:
            self.has_weights = False
            for name in self._weights:
                del self.state[name]
            said.append(
                f"the parameters ({shown(weights)}) do not fit into {shown(max_bytes)}: give a checkpoint of the "
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
            "globals": constants_of(type(part) for part in program.model.modules()),
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


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of tensors in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def shown(count: int) -> str:
    """Returns a number of bytes in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
