"""Finds the numbers of a saved object that are NaN or infinite and belong to no tensor that is examined.

A loss, a metric, a list of losses, a learning rate in a schedule, an array of NumPy's: they are plain values, tensors
of one element outside the models and optimizers, or bytes in the pickle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampdoctor.checkpoints.contents.below import is_optimizer, join
from ampdoctor.checkpoints.contents.scalers import number, scaler_fields
from ampdoctor.checkpoints.pickles.inert import Inert
from ampdoctor.checkpoints.pickles.objects import is_module, numpy_array, parts_of
from ampdoctor.checkpoints.storage.stored import StoredTensor
from ampdoctor.evidence.checkpoint_stats import LostNumbers

_PLAIN = frozenset({int, str, bool, bytes, type(None)})


def lost_numbers(tree: Any, told: Mapping[str, Any], examined: Collection[int]) -> Iterator[LostNumbers]:
    """Yield the numbers that are not finite, in stored order; a container in several places counts at its first.

    Args:
        tree: The saved object.
        told: Entries at its top that are read as something else (the loss), by key.
        examined: Addresses of the tensors that are examined as such.

    Raises:
        CheckpointError: A tensor's bytes cannot be read.
    """
    seen: set[int] = set()
    pending: list[tuple[Any, str]] = [(tree, "")]
    while pending:
        node, path = pending.pop()
        if isinstance(node, StoredTensor):
            yield from _lost(path or "tensor", [_number(node, examined)])
            continue
        if not isinstance(node, Mapping | list | tuple | Inert) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Inert) and (array := numpy_array(node)) is not None:
            yield from _lost_in_array(path, array)
            continue
        apart: tuple[type, ...] = ()
        if isinstance(node, list | tuple):
            yield from _lost(path, [_number(part, examined) for part in node])
            apart = (float, StoredTensor)
        elif scaler_fields(node) is not None:  # AMP401 to AMP404 judge it
            apart = (float, StoredTensor)
        kept = [(key, part) for key, part in _parts(node) if type(part) not in _PLAIN and not isinstance(part, apart)]
        kept = kept if path else [(key, part) for key, part in kept if key not in told]
        for key, part in kept:
            if isinstance(part, float):
                yield from _lost(join(path, key), [part])
        pending.extend((part, join(path, key)) for key, part in reversed(kept) if not isinstance(part, float))


def _parts(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a container's parts with their keys; what an optimizer's groups hold is judged with it (AMP505)."""
    if isinstance(node, Mapping):
        yield from ((key, part) for key, part in node.items() if key != "param_groups" or not is_optimizer(node))
    elif not isinstance(node, Inert):
        yield from enumerate(node)
    elif not is_module(node):
        yield from ((key, part) for key, part in parts_of(node) if key != "param_groups")


def _number(node: Any, examined: Collection[int]) -> float | None:
    if isinstance(node, StoredTensor):
        alone = not node.shape and node.dtype.is_floating_point and id(node) not in examined
        return number(node) if alone else None
    return node if type(node) is float else None


def _lost(name: str, values: Sequence[float | None]) -> Iterator[LostNumbers]:
    numbers = [value for value in values if value is not None]
    nans, infs = sum(map(math.isnan, numbers)), sum(map(math.isinf, numbers))
    if nans or infs:
        yield LostNumbers(name=name, count=len(numbers), nans=nans, infs=infs, last=numbers[-1])


def _lost_in_array(name: str, array: NDArray[Any]) -> Iterator[LostNumbers]:
    if array.dtype.kind not in "fc":
        return
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    if nans or infs:
        yield LostNumbers(name=name, count=array.size, nans=nans, infs=infs, last=float(np.abs(array[-1])))
