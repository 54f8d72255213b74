"""`Bundle` reads a bundle's files within bounds, runs none of their content, and makes training runs from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch

from ampdoctor.checkpoints.files import RegularFile
from ampdoctor.checkpoints.json_files import parse_json
from ampdoctor.checkpoints.safetensors_file import read_safetensors
from ampdoctor.errors import CheckpointError, FactoryError, LimitExceededError, ReplayError
from ampdoctor.evidence.json_records import DuplicateKeyError
from ampdoctor.hooks.json_values import UnreadableTreeError, read
from ampdoctor.hooks.program import Call, Instruction, PriorSteps, Program
from ampdoctor.replay.bundles.classes import NamedCode
from ampdoctor.replay.bundles.entries import optimizer_in, put_weights, settings_in, states_in, tensor_of
from ampdoctor.replay.bundles.instructions import InstructionsIn, line_in
from ampdoctor.replay.bundles.model import ModelBuilder
from ampdoctor.replay.recorded_step import LeadUp, converts_outputs, run_of
from ampdoctor.replay.training_run import TrainingRun

# -- the manifest --

SCHEMA = 3
"""It rises when an older reader would misread a newer bundle; bundles of another schema are refused."""
MANIFEST, CALLS, STATE, LOG = "manifest.json", "calls.safetensors", "state.safetensors", "log.jsonl"
_LARGEST = 32 * 1024 * 1024  # bytes; the manifest of 1000 micro-batches with their loss code has a few MB


def bundle_at(target: str) -> Path | None:
    """Returns the bundle's folder if the path is the folder or its manifest, else None."""
    path = Path(target).expanduser()
    folder = path.parent if path.name == MANIFEST else path
    try:
        return folder if (folder / MANIFEST).is_file() and (folder / CALLS).exists() else None
    except OSError:
        return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a bundle's manifest."""
    name = f"{folder.name}/{MANIFEST}"
    with RegularFile(folder / MANIFEST, name) as file:
        if file.size > _LARGEST:
            raise LimitExceededError(f"{name}: bytes", _LARGEST, file.size)
        try:
            content = parse_json(file.read(0, file.size), name, strict=True)
        except DuplicateKeyError as error:
            raise CheckpointError(f"{name} has the key {error.key[:80]!r} twice; refused.") from None
        except ValueError as error:
            raise CheckpointError(f"{name} is not valid JSON ({type(error).__name__}).") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise CheckpointError(f"{name} is no manifest of a bundle.")
    if content["schema"] != SCHEMA:
        raise CheckpointError(
            f"{name} has the schema {str(content['schema'])[:20]!r}, and this ampdoctor reads {SCHEMA}."
        )
    return content


# -- the bundle --

UserCode = Callable[[str], AbstractContextManager[None]]
"""Surrounds the user's code; the argument names the code that runs."""


_Step = tuple[tuple[Instruction, ...], tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
_FINITE_HERE = (
    "the step was not finite in its loop, and is finite here: the weights that the checkpoint and the recorded updates "
    "lead to are others than it had, or what was not recorded made it so"
)


class Bundle:
    """A bundle on the disk; `path` is its folder or its manifest."""

    def __init__(self, path: str) -> None:
        folder = bundle_at(path)
        if folder is None:
            raise CheckpointError(f"{path} is no bundle: it has no manifest.json beside a calls.safetensors.")
        self.folder = folder
        self.manifest = read_manifest(folder)  # not trusted
        self.policy: Literal["cuda", "native"] = self.manifest.get("policy")  # type: ignore[assignment]  # checked below
        self.step: int = self.manifest.get("step")  # type: ignore[assignment]  # the same
        if self.policy not in ("cuda", "native") or type(self.step) is not int or not 0 <= self.step < 2**62:
            raise CheckpointError(f"{folder.name}/manifest.json: policy or step is malformed.")

    @property
    def needs_checkpoint(self) -> bool:
        """Returns whether its parameters were left out."""
        return self.manifest.get("weights") == "left out"

    @property
    def lacks(self) -> str:
        """Returns the reason why it has no parameters, as a part of a sentence."""
        late = "updates" in self.manifest
        return "which the step had changed before it was known to be sick" if late else "for its size"

    @property
    def name(self) -> str:
        """Returns its name for sentences."""
        return self.folder.name or str(self.folder)

    def run(self, code: NamedCode | None, user_code: UserCode = lambda _what: nullcontext()) -> TrainingRun:
        """Returns a fresh run of its step; `code` is what `--model` names, `user_code` surrounds it."""
        said = self.manifest
        cannot = _listed(said, "cannot")
        if cannot:
            raise ReplayError(f"{self.name} cannot be replayed: {'; '.join(str(one)[:200] for one in cannot[:3])}")
        notes: list[str] = [] if code is None else list(code.notes)
        making = ModelBuilder(self.name, code, notes.append)
        with user_code("making the bundle's model"):
            making.give_globals(said.get("globals"))
            model = making.model(said.get("model"))
        whose = f"--model {code.spec}" if code is not None else "this transformers"
        with _Tensors(self.folder / CALLS) as calls, _Tensors(self.folder / STATE) as state:
            put_weights(model, said, state.made, whose)
            program = self._program(model, calls, state, making.find, notes.append)
            late = "updates" in said or "earlier" in said
            leading = self._leading(program, calls, making.find) if late else None
        notes += self._notes()
        run = run_of(program)
        run.lead_up = None if leading is None else LeadUp(program, leading)
        run.finite_again = self._finite_again()
        run.notes = (*run.notes, *dict.fromkeys(notes))
        return run

    def _program(
        self,
        model: torch.nn.Module,
        calls: _Tensors,
        state: _Tensors,
        find: Callable[[str, str], Any],
        say: Callable[[str], None],
    ) -> Program:
        said, name = self.manifest, f"{self.name}/manifest.json"
        try:
            instructions, given, before = _Steps(self, model, calls, find).made(said)
            for key in said["prepared"]:
                converts_outputs(model.get_submodule(key))
            optimizer = None
            if said["optimizer"] is not None:
                parameters = dict(model.named_parameters(remove_duplicate=False))
                optimizer = optimizer_in(
                    said["optimizer"], parameters, lambda e: _there(state.made(e), name), find, say
                )
            return Program(
                model=model,
                optimizer=optimizer,
                optimizer_name="optimizer" if said["optimizer"] is None else str(said["optimizer"]["name"]),
                scaler=_scaler(said["scaler"]),
                instructions=instructions,
                given=given,
                buffers=before,
                step=self.step,
                line=line_in(said["line"]),
                unexplained=tuple(map(str, said["unexplained"])),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{name} is malformed ({type(error).__name__}: {str(error)[:80]}).") from None

    def _leading(self, program: Program, calls: _Tensors, find: Callable[[str, str], Any]) -> PriorSteps:
        said, made, name = self.manifest.get("earlier", []), self.manifest.get("updates"), f"{self.name}/manifest.json"
        groups = 0 if program.optimizer is None else len(program.optimizer.param_groups)
        try:
            reader = _Steps(self, program.model, calls, find)
            steps = tuple(_earlier(program, one, reader.made(one), find) for one in said)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, UnreadableTreeError) as error:
            raise CheckpointError(f"{name}: its earlier steps are malformed ({type(error).__name__}).") from None
        counts = made is None or (type(made) is int and 0 <= made < 2**62)
        if [one.step for one in steps] != list(range(self.step - len(steps), self.step)) or not counts:
            raise CheckpointError(f"{name}: its earlier steps do not lead up to step {self.step}.")
        if any(len(one.settings) != groups for one in steps):
            raise CheckpointError(f"{name}: its earlier steps have the settings of another optimizer.")
        losses = tuple(one.get("loss") for one in said)
        if not all(one is None or type(one) in (int, float) for one in losses):
            raise CheckpointError(f"{name}: the losses of its earlier steps are no numbers.")
        return PriorSteps(steps=steps, losses=losses, made=made)

    def _finite_again(self) -> str | None:
        told = self.manifest.get("diagnosis")
        errors = told.get("errors") if isinstance(told, dict) else None
        notes = [one for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
        known = next((str(one.get("message"))[:600] for one in notes if one.get("kind") == "not_reproduced"), None)
        if known is None and any(one.get("kind") == "too_late" for one in notes):
            return _FINITE_HERE
        return known

    def _notes(self) -> list[str]:
        said = self.manifest
        notes = [f"of the bundle: {str(one)[:300]}" for one in _listed(said, "left_out")]
        notes += [str(one)[:300] for one in _listed(said.get("exact"), "no")]
        versions = said.get("versions")
        then = str(versions.get("torch")) if isinstance(versions, dict) else ""
        if then.partition("+")[0] != torch.__version__.partition("+")[0]:
            notes.append(f"the step was recorded with torch {then[:40]}, and is replayed with {torch.__version__}")
        if type(said.get("world")) is int and said["world"] > 1:
            notes.append(
                f"the step is rank {said.get('rank')}'s of {said['world']}: gradients are its own, not reduced"
            )
        return notes


class _Steps:
    def __init__(
        self, bundle: Bundle, model: torch.nn.Module, calls: _Tensors, find: Callable[[str, str], Any]
    ) -> None:
        self._name, self._calls, self._find = f"{bundle.name}/manifest.json", calls, find
        self._random = states_in(bundle.manifest["random"], calls.all("random/"), self._name)
        self._held = {key for key, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        self._modules = {key for key, _ in model.named_modules()}
        self._known: dict[str, torch.Tensor] = {}  # by entry: a tensor that enters several steps is loaded once

    def made(self, said: Mapping[str, Any]) -> _Step:
        given = tuple(map(self._tensor, said["given"]))
        before = {str(key): self._tensor(entry) for key, entry in said["before"].items()}
        reader = InstructionsIn(self._find, self._random, len(given), self._name)
        instructions = reader.all(said["instructions"])
        absent = [key for key in (*reader.held, *before) if key not in self._held]
        absent += [one.model for one in instructions if isinstance(one, Call) and one.model not in self._modules]
        if absent:
            raise FactoryError(f"the bundle's step uses {absent[0]!r}, which the model that was made does not have")
        return instructions, given, before

    def _tensor(self, entry: Mapping[str, Any]) -> torch.Tensor:
        said = json.dumps(entry)
        if said not in self._known:
            self._known[said] = _there(self._calls.made(entry), self._name)
        return self._known[said]


def _earlier(program: Program, said: Mapping[str, Any], made: _Step, find: Callable[[str, str], Any]) -> Program:
    instructions, given, before = made
    if type(said["step"]) is not int:
        raise TypeError("step")
    return replace(
        program,
        instructions=instructions,
        given=given,
        buffers=before,
        step=said["step"],
        line=line_in(said["line"]),
        settings=settings_in(said["settings"], find),
    )


class _Tensors:
    def __init__(self, path: Path) -> None:
        self._file = RegularFile(path, f"{path.parent.name}/{path.name}")
        try:
            self._stored = read_safetensors(self._file).tensors
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def made(self, entry: Mapping[str, Any]) -> torch.Tensor | None:
        key = str(entry.get("key")) if isinstance(entry, dict) else ""
        if key not in self._stored:
            return None
        return tensor_of(entry, self._stored[key].load(), self._file.name)

    def all(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name: one.load() for name, one in self._stored.items() if name.startswith(prefix)}


def _listed(said: Any, key: str) -> list[Any]:
    found = said.get(key) if isinstance(said, dict) else None
    return found if isinstance(found, list) else []


def _there(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    if tensor is None:
        raise CheckpointError(f"{name} names a tensor that its file does not hold.")
    return tensor


def _scaler(said: Any) -> Callable[[], torch.amp.GradScaler] | None:
    state = {} if said is None else {str(key): read(one, lambda _m, _q: None) for key, one in said["state"].items()}
    if not state:
        return None

    def make() -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        scaler.load_state_dict({**scaler.state_dict(), **state})
        return scaler

    return make
