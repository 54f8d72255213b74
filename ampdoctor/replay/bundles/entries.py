"""Entries of a bundle's manifest and back: tensors with their file, the optimizer, the states of random generators."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ampdoctor.errors import CheckpointError, FactoryError
from ampdoctor.hooks.json_values import NotSerializableError, UnreadableTreeError, class_name, read, written
from ampdoctor.hooks.process_state import RandomState
from ampdoctor.replay.snapshot import is_one_element

Entry = Mapping[str, Any]
"""A tensor's entry in the manifest, as plain JSON."""

_PAIRS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
WRITTEN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        torch.bool,
    }
)
"""The dtypes that safetensors writes in all its versions from 0.5 on."""
_LARGEST_EXPANSION = 1 << 40  # bytes that an expanded view may seem to have: stride 0 takes no memory


def stored_tensor(key: str, tensor: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor] | str:
    """Returns a tensor's entry and what is stored under `key`, or a predicate that says why it cannot be stored."""
    entry = {
        "key": key,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "requires_grad": bool(tensor.requires_grad and tensor.is_leaf),
        "form": "plain",
    }
    bare = tensor.detach()
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__qualname__}, which is not written"
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return "has no values that are written"
    if bare.layout is not torch.strided:
        return f"has the layout {bare.layout}, which is not written"
    bare = bare.resolve_conj().resolve_neg()
    if 0 in bare.stride() and bare.numel():
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in bare.stride())
        if math.prod(bare[once].shape) < bare.numel():
            entry["stored_shape"] = list(bare[once].shape)
            bare = bare[once]
    elif bare.numel() and not bare.is_contiguous() and _is_dense(bare):
        entry["stride"] = list(bare.stride())
    if bare.dtype in _PAIRS:
        entry["form"], bare = "pairs", torch.view_as_real(bare.contiguous())
    if bare.dtype not in WRITTEN:
        return f"has the dtype {bare.dtype}, which is not written"
    return entry, bare


def tensor_of(entry: Entry, stored: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the tensor of an entry (not trusted), on the CPU; raises CheckpointError with the file's `name`."""
    try:
        tensor = _made(entry, stored)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{name}: the entry of a tensor is malformed ({type(error).__name__}).") from None
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.requires_grad_(entry.get("requires_grad") is True)
    return tensor


def _made(entry: Entry, stored: torch.Tensor) -> torch.Tensor:
    form, shape, dtype = entry["form"], _sizes(entry["shape"]), getattr(torch, entry["dtype"].removeprefix("torch."))
    if form == "pairs":
        stored = torch.view_as_complex(stored)
    if stored.dtype is not dtype or form not in ("plain", "pairs"):
        raise ValueError(form)
    if "stored_shape" in entry:
        if list(stored.shape) != _sizes(entry["stored_shape"]) or math.prod(shape) > _LARGEST_EXPANSION:
            raise ValueError("stored_shape")
        return stored.expand(shape)
    if list(stored.shape) != shape:
        raise ValueError("shape")
    if "stride" in entry:
        again = torch.empty_strided(shape, _sizes(entry["stride"]), dtype=dtype)
        if not _is_dense(again):
            raise ValueError("stride")
        return again.copy_(stored)
    return stored


def _is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill a block of memory exactly, in some order of the dimensions?"""
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != reach:
            return False
        reach *= size
    return True


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**48 for one in value):
        raise ValueError("sizes")
    return value


# -- the safetensors file --


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write strided tensors with dtypes in `WRITTEN` to the disk, from any device; raises OSError if that fails."""
    apart = {  # safetensors refuses tensors that share memory
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    try:
        save_file(apart, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None
    with path.open("rb+") as file:
        os.fsync(file.fileno())


# -- tensors into a model --

_NAMED = 3


def put_weights(
    model: nn.Module,
    manifest: Mapping[str, Any],
    stored: Callable[[Mapping[str, Any]], torch.Tensor | None],
    whose: str,
) -> None:
    """Give `model` the bundle's parameters and buffers, dtypes, tied and frozen parameters, and training modes."""
    try:
        _put_parameters(model, manifest["parameters"], stored, whose)
        _put_buffers(model, manifest["buffers"], stored)
        model.train()
        modules = dict(model.named_modules())
        for name in manifest["evaluating"]:
            if name in modules:
                modules[name].training = False
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the bundle's entries of the model are malformed ({type(error).__name__}).") from None


def _put_parameters(
    model: nn.Module, entries: Mapping[str, Any], stored: Callable[[Mapping[str, Any]], torch.Tensor | None], whose: str
) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    _check_names(own.keys(), entries.keys(), whose)
    tied = {name: entry["same_as"] for name, entry in entries.items() if "same_as" in entry}
    for name, entry in entries.items():
        if name in tied:
            continue
        parameter, tensor = own[name], stored(entry)
        if list(parameter.shape) != entry["shape"]:
            shape = "x".join(map(str, entry["shape"])) or "a number"
            here = "x".join(map(str, parameter.shape)) or "a number"
            raise FactoryError(f"{whose} makes a model whose {name} is {here}, and the bundle's is {shape}")
        if tensor is None:
            parameter.data = parameter.data.to(getattr(torch, entry["dtype"].removeprefix("torch.")))
        else:
            parameter.data = tensor.detach()
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(entry["requires_grad"] is True)
    for name, first in tied.items():
        if own[name] is not own[first]:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, own[first])
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first_name.setdefault(id(parameter), name)
        if tied.get(name, name) != tied.get(known, known):
            raise FactoryError(f"{whose} makes a model that ties {name} to {known}, and the bundle's does not")


def _put_buffers(
    model: nn.Module, entries: Mapping[str, Any], stored: Callable[[Mapping[str, Any]], torch.Tensor | None]
) -> None:
    modules = dict(model.named_modules())
    made: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        parent, _, last = name.rpartition(".")
        holder = modules.get(parent)
        tensor = made.get(entry["same_as"]) if "same_as" in entry else stored(entry)
        if holder is None or tensor is None:
            continue
        made[name] = tensor
        if last in holder._buffers:  # noqa: SLF001 - which tensor a module has registered
            holder._buffers[last] = tensor  # noqa: SLF001 - the same
        elif last.isidentifier() and not hasattr(holder, last):  # made by a forward
            holder.register_buffer(last, tensor, persistent=False)


def _check_names(own: Any, said: Any, whose: str) -> None:
    lacks, more = [name for name in said if name not in own], [name for name in own if name not in said]
    if lacks or more:
        parts = [
            f"{what} {', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}"
            for what, names in (("lacks", lacks), ("has besides", more))
            if names
        ]
        raise FactoryError(f"{whose} makes another model than the bundle's: it {' and '.join(parts)}")


# -- optimizers --

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
        optimizer = _optimizer_made(cls, groups)
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


def _optimizer_made(
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
