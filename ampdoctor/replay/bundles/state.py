"""Converts an optimizer and the states of random generators to entries of a manifest, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ampdoctor.errors import CheckpointError
from ampdoctor.hooks.json_values import NotSerializableError, UnreadableTreeError, class_name, read, written
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.replay.bundles.tensors import Entry
from ampdoctor.replay.snapshot import is_one_element

_ON_A_GPU = ("capturable",)  # settings that torch refuses for parameters on a CPU; they change no number


def optimizer_out(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensor: Callable[[str, torch.Tensor], Entry | None],
    settings: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the manifest's entry of an optimizer."""
    lost: list[str] = []
    groups = [
        {"params": [names.get(id(p)) for p in group["params"]], "settings": _settings(kept, lost)}
        for group, kept in zip(optimizer.param_groups, settings or optimizer.param_groups, strict=True)
    ]
    states: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        kept: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                entry = tensor(f"optimizer/{name}/{key}", value)
                if entry is not None:
                    kept[str(key)] = {"tensor": entry}
            else:
                try:
                    kept[str(key)] = {"value": written(value)}
                except NotSerializableError:
                    lost.append(str(key))
        states[name] = kept
    return {"class": class_name(type(optimizer)), "groups": groups, "state": states, "lost": sorted(set(lost))}


def settings_out(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns those settings of an optimizer's groups that are plain values."""
    return [_settings(group, []) for group in groups]


def settings_in(said: Any, find: Callable[[str, str], Any]) -> tuple[dict[str, Any], ...]:
    """Reads settings; raises TypeError or AttributeError if they are no list of tables, else UnreadableTreeError."""
    if not isinstance(said, list):
        raise TypeError("settings")
    return tuple({key: read(one, find) for key, one in group.items() if key != "params"} for group in said)


def _settings(group: Mapping[str, Any], lost: list[str]) -> dict[str, Any]:
    settings = {}
    for key, value in group.items():
        if key != "params":
            try:
                settings[key] = written(value.item() if is_one_element(value) else value)
            except NotSerializableError:
                lost.append(str(key))
    return settings


def optimizer_in(
    said: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    tensor: Callable[[Entry], torch.Tensor],
    find: Callable[[str, str], Any],
    say: Callable[[str], None],
) -> torch.optim.Optimizer | None:
    """Returns the optimizer over a model's parameters (by name); the entry `said` is not trusted.

    If its class is not available, SGD at learning rate 0 replaces it: gradients are unscaled and checked as before.
    """
    try:
        module, _, name = said["class"].partition(":")
        groups = [
            (
                [parameters[one] for one in group["params"] if one is not None],
                {key: read(one, find) for key, one in group["settings"].items()},
            )
            for group in said["groups"]
        ]
        cls = _class(module, name, find)
        if cls is None:
            say(f"the optimizer {name} of {module} is not here: the update is not replayed (gradients are)")
            return torch.optim.SGD([{"params": held} for held, _ in groups if held], lr=0.0)
        optimizer = _made(cls, groups)
        for key, state in said["state"].items():
            parameter = parameters[key]
            kept = optimizer.state[parameter]
            for part, value in state.items():
                kept[part] = tensor(value["tensor"]) if "tensor" in value else read(value["value"], find)
    except (KeyError, TypeError, ValueError, AttributeError, UnreadableTreeError, AssertionError) as error:
        raise CheckpointError(f"the bundle's optimizer cannot be made ({type(error).__name__}: {error}).") from None
    return optimizer


def _class(module: str, name: str, find: Callable[[str, str], Any]) -> type[torch.optim.Optimizer] | None:
    own = module.startswith("torch.optim.") and name.isidentifier()
    found = getattr(torch.optim, name, None) if own else find(module, name)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def _made(
    cls: type[torch.optim.Optimizer], groups: list[tuple[list[torch.Tensor], dict[str, Any]]]
) -> torch.optim.Optimizer:
    known = inspect.signature(cls).parameters
    first = groups[0][1] if groups else {}
    arguments = {key: value for key, value in first.items() if key in known and key != "params"}
    arguments.update(dict.fromkeys((key for key in _ON_A_GPU if key in arguments), False))
    optimizer = cls([{"params": held} for held, _ in groups], **arguments)
    for group, (_, settings) in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in settings.items() if key not in (*_ON_A_GPU, "params")})
    return optimizer


# -- states of the random generators, as tensors; each state is stored once --

_PYTHON = 625
_NUMPY = 624


class StatesOut:
    """Collects states: `entries` for the manifest, `tensors` by name for the file."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._names: dict[bytes, str] = {}

    def index_of(self, state: RandomState) -> int:
        """Returns the index of a state's entry; a new state is added."""
        import numpy as np

        version, words, gauss = state.python
        kind, numbers, *rest = state.numpy
        python = self._kept(torch.tensor(words, dtype=torch.int64))
        numpy = self._kept(torch.from_numpy(np.asarray(numbers).astype(np.int64)))
        cpu = self._kept(state.torch_cpu)
        cuda = tuple(self._kept(one) for one in state.torch_cuda)
        key = version, python, gauss, kind, numpy, tuple(rest), cpu, cuda
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append(
                {
                    "python": {"version": version, "words": python, "gauss": gauss},
                    "numpy": {"kind": kind, "words": numpy, "rest": [int(rest[0]), int(rest[1]), float(rest[2])]},
                    "torch": cpu,
                    "cuda": list(cuda),
                }
            )
        return self._known[key]

    def _kept(self, tensor: torch.Tensor) -> str:
        content = bytes(tensor.numpy().tobytes())
        name = self._names.setdefault(content, f"random/{len(self._names)}")
        self.tensors.setdefault(name, tensor)
        return name


def states_in(entries: Any, tensors: Mapping[str, torch.Tensor], name: str) -> list[RandomState]:
    """Reads states; those of CUDA's generators only if this machine has as many. Raises CheckpointError."""
    try:
        return [_state(entry, tensors) for entry in entries]
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{name}: a random state is malformed ({type(error).__name__}).") from None


def _state(entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> RandomState:
    import numpy as np

    python, numpy = entry["python"], entry["numpy"]
    words, numbers, cpu = tensors[python["words"]], tensors[numpy["words"]], tensors[entry["torch"]]
    cuda = tuple(tensors[one] for one in entry["cuda"])
    if words.shape != (_PYTHON,) or numbers.shape != (_NUMPY,) or python["version"] != 3 or numpy["kind"] != "MT19937":
        raise ValueError("generator")
    if not 0 <= int(words[-1]) <= _PYTHON - 1 or not 0 <= numpy["rest"][0] <= _NUMPY or int(words.min()) < 0:
        raise ValueError("place")
    if cpu.dtype is not torch.uint8 or cpu.shape != torch.get_rng_state().shape:
        raise ValueError("torch")
    gauss = python["gauss"]
    usable = torch.cuda.is_available() and torch.cuda.device_count() == len(cuda)
    return RandomState(
        python=(3, tuple(int(word) for word in words), gauss if gauss is None else float(gauss)),
        torch_cpu=cpu,
        torch_cuda=cuda if usable else (),
        numpy=("MT19937", numbers.numpy().astype(np.uint32), *(numpy["rest"])),
    )
