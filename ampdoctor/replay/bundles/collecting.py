"""What goes into a bundle, and what is left out of it where it would be too large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ampdoctor.errors import OutputError
from ampdoctor.hooks.json_values import NotInertError, constants_of
from ampdoctor.hooks.program import Leading, Program
from ampdoctor.package import working_folder
from ampdoctor.replay.bundles.describing import Made, code_of, described
from ampdoctor.replay.bundles.instructions import instruction_out, relative
from ampdoctor.replay.bundles.optimizers import optimizer_out, settings_out
from ampdoctor.replay.bundles.random_states import StatesOut
from ampdoctor.replay.bundles.safetensors_out import CODES
from ampdoctor.replay.bundles.tensors import Lying, lying
from ampdoctor.replay.recorded.inner_autocast import prepared_models, with_inner_autocast
from ampdoctor.replay.recorded.running import format_of

MANIFEST_ROOM = 1 << 20
"""Bytes that are counted for manifest and log before they are written."""
_MOST_TEXT = 4 << 20
"""Characters of all earlier steps in a manifest: its reader has bounds, and indents take as much again."""


class CollectedStep:
    """What goes into a bundle of one step.

    Args:
        program: The step.
        name: What the names of its tensors begin with in the file.
        states: Takes its random states.
        known: Entries of tensors by their `id`: what enters several steps is kept once.

    Attributes:
        cannot: Why it cannot be run again, in sentences.
        doubts: What its instructions do not hold, in sentences.
        tensors: Those that entered it, and its buffers, by their names in the file.
        said: Its part of the manifest.
    """

    def __init__(self, program: Program, name: str, states: StatesOut, known: dict[int, dict[str, Any]]) -> None:
        self.cannot: list[str] = []
        self.doubts = program.unexplained
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = known
        base, line = working_folder(), program.line
        instructions: list[Any] = []
        for one in program.instructions:
            try:
                instructions.append(instruction_out(one, states.index_of, base))
            except NotInertError as error:
                self.cannot.append(str(error))
        given = [self._needed(f"{name}given/{index}", tensor) for index, tensor in enumerate(program.given)]
        before = {key: self._needed(f"{name}before/{key}", tensor) for key, tensor in program.buffers.items()}
        self.said: dict[str, Any] = {
            "step": program.step,
            "line": None if line is None else [relative(line[0], base), line[1]],
            "instructions": [] if self.cannot else instructions,
            "given": given,
            "before": before,
        }

    def _needed(self, key: str, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        lies = lying(key, tensor, CODES)
        if isinstance(lies, str):
            self.cannot.append(f"a tensor that entered the step {lies}")
            return None
        self.tensors.update(lies.parts)
        self._known[id(tensor)] = lies.entry
        return lies.entry


class Collected:
    """What goes into a bundle.

    Attributes:
        cannot: Why the step cannot be run again from it, in sentences.
        calls: Tensors of the calls by their names in the file.
        state: Parameters and buffers.
        moments: The optimizer's state.
        has_weights: The parameters are among it.
        earlier: The steps that lead up to it, oldest first.
    """

    def __init__(self, program: Program, made: Made) -> None:
        self._program = program
        self._lacking: list[str] = []
        self.earlier: list[CollectedStep] = []
        self.calls: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        self.has_weights = True
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
        self._made_file(working_folder())
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

        said = optimizer_out(_bare(optimizer), names, tensor, self._program.settings)
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

    def lead(self, leading: Leading, max_bytes: int) -> tuple[str, ...]:
        """Take in what leads up to the step, as far as it goes, in the place of its weights and its optimizer's state.

        Returns what is left out, in sentences; raises as `fit`.
        """
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
        """Bytes that are left for what else there is."""
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
        """The policy of the device that the step ran on."""
        tensors = [*self._program.given, *self._program.model.parameters()]
        return "cuda" if any(tensor.is_cuda for tensor in tensors) else "native"

    def manifest(self) -> dict[str, Any]:
        """Its part of the manifest."""
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

    def draws_on_gpu(self) -> bool:
        """Whether random numbers may have been drawn by a GPU's generator."""
        return any(entry["cuda"] for entry in self._states.entries) and self.own_policy() == "cuda"


def _weights_of(leading: Leading, earlier: int) -> str:
    """Says which checkpoints bring what a bundle lacks."""
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
    """The optimizer inside a framework's wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the bytes of tensors in a file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def shown(count: int) -> str:
    """Returns a number of bytes in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
