"""How many samples and tokens a loop has trained on, counted from what its models are called with."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampdoctor.numerics.tensors import is_plain

_IDS = frozenset({torch.int64, torch.int32})


@dataclass(frozen=True, slots=True)
class Counted:
    """A number of samples and of tokens; None where it is not certain.

    Attributes:
        samples: Rows of batches.
        tokens: Elements of batches of ids, padding among them.
    """

    samples: int | None = 0
    tokens: int | None = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(_sum(self.samples, other.samples), _sum(self.tokens, other.tokens))

    def times(self, ranks: int) -> Counted:
        """Returns the same for so many processes."""
        if ranks == 1:
            return self
        return Counted(*(None if n is None else n * ranks for n in (self.samples, self.tokens)))


_UNKNOWN = Counted(None, None)


class Batches:
    """Counts, of each step, the batch of the first call before each of its backwards.

    What is not certain is not counted, nor anything after it: a step whose backwards begin with calls of different
    models (a GAN's critic), a call with tensors whose first dimensions differ, with lists of tensors, or of a model
    that has its batches second; on several processes any model but one that is replicated over all of them.

    Args:
        world_size: Number of processes.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._step = Counted()
        self._over = False  # an optimizer has used what is counted in the step, and another one may as well
        self._counted_at: int | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._batch: weakref.ref[Tensor] | None = None
        self._totals: dict[str, Counted] = {}
        self._factors: dict[int, tuple[weakref.ref[nn.Module], int | None]] = {}

    def called(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backwards: int
    ) -> Tensor | None:
        """A model was called by the loop, after so many backwards of the running step.

        Returns:
            The tensor that stands for the batch; None where none is certain, or this one was told before.
        """
        if self._over:
            self._step, self._over, self._counted_at = Counted(), False, None
            self._model = self._batch = None
        if self._counted_at == backwards:
            return None
        self._counted_at = backwards
        if self._model is not None and self._model() is not model:
            self._step = _UNKNOWN
        self._model = weakref.ref(model)
        found = _batch_in(args, kwargs)
        if found is None:
            self._step = _UNKNOWN
            return None
        if self._batch is not None and self._batch() is found:  # a closure that is evaluated again
            return None
        self._batch = weakref.ref(found)
        ranks = self._ranks(model)
        self._step += _UNKNOWN if ranks is None else _size(found).times(ranks)
        return found

    def stepping(self, optimizer: str) -> Counted:
        """An optimizer is about to step: returns all that it has been given from the beginning to this step."""
        untold = self._counted_at is None
        self._over = True
        total = self._totals.get(optimizer, Counted()) + (_UNKNOWN if untold else self._step)
        self._totals[optimizer] = total
        return total

    def _ranks(self, model: nn.Module) -> int | None:
        known = self._factors.get(id(model))
        if known is None or known[0]() is not model:
            known = weakref.ref(model), None if _has_batches_second(model) else self._replicas(model)
            self._factors[id(model)] = known
        return known[1]

    def _replicas(self, model: nn.Module) -> int | None:
        """Processes that have a batch each; None where that is not certain."""
        if self.world_size == 1:
            return 1
        group = getattr(model, "process_group", None)  # DistributedDataParallel, and the first FSDP
        mesh = getattr(next(model.parameters(), None), "device_mesh", None)  # the second
        if group is not None:
            size = group.size()
        else:
            size = mesh.size() if mesh is not None and mesh.ndim == 1 and _is_fsdp(model) else 0
        return size if size == self.world_size else None


def _batch_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that stands for the batch: ids by their usual name, else the first; None where no one does."""
    named: list[tuple[str, Any]] = [("", value) for value in args]
    named += kwargs.items()
    found: list[tuple[str, Tensor]] = []
    for name, value in named:
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, dict | Mapping):  # the first is quick to tell
            found += [(str(key), inner) for key, inner in value.items() if isinstance(inner, Tensor)]
        elif isinstance(value, list | tuple) and any(isinstance(inner, Tensor) for inner in value):
            return None
    shaped = [(name, tensor) for name, tensor in found if tensor.dim() > 0]
    if not shaped or not all(is_plain(tensor) and not tensor.is_nested for _, tensor in shaped):
        return None
    if len({tensor.shape[0] for _, tensor in shaped} - {1}) > 1:
        return None
    rows = max(tensor.shape[0] for _, tensor in shaped)
    ids = (tensor for name, tensor in shaped if name == "input_ids")
    batch = next(ids, shaped[0][1])
    return batch if batch.shape[0] == rows else None


def _size(batch: Tensor) -> Counted:
    is_ids = batch.dtype in _IDS and batch.dim() == 2
    return Counted(batch.shape[0], batch.numel() if is_ids else None)


def _has_batches_second(model: nn.Module) -> bool:
    """Whether a part of it says that its batches are in the second dimension, as torch's recurrent layers may."""
    return any(getattr(part, "batch_first", True) is False for part in model.modules())


def _is_fsdp(model: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
