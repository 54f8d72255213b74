"""The section `path` of a report: how a birth came about, and through which modules its values did harm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampdoctor.evidence.of_runs.trace import Birth, Passage
from ampdoctor.evidence.report.bisection import NodeRole, PathNode, PathSection

MOST_CARRIERS = 200
"""Maximum number of carriers that are shown; of a longer way, the first and the last half."""


def path_section(birth: Birth, fingerprint: str, types: Mapping[str, str]) -> PathSection:
    """Returns the way of one birth as the report shows it.

    Args:
        birth: The birth, with its way.
        fingerprint: Fingerprint of the finding that names the birth.
        types: Each module's class name, by the module's name.

    Returns:
        Nodes in the order of the ops: what fed the birth, the birth, carriers, the first sink of each kind.
    """
    way = birth.way
    half = MOST_CARRIERS // 2
    long = len(way.carriers) > MOST_CARRIERS
    shown = (*way.carriers[:half], *way.carriers[-half:]) if long else way.carriers
    nodes = (
        *(_node("before", passage, types) for passage in way.before),
        _node("birth", _as_passage(birth), types),
        *(_node("carrier", passage, types) for passage in shown),
        *(_node("harm", passage, types) for passage in way.harms),
    )
    return PathSection(
        fingerprint=fingerprint,
        step=birth.where.step or 0,
        nodes=nodes,
        sinks=tuple(birth.harms),
        omitted=way.omitted + len(way.carriers) - len(shown),
    )


def module_types(model: torch.nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the class names of a model's modules.

    Args:
        model: The model.
        names: The report's name for each module, by its name in `named_modules()`.
    """
    return {names.get(name, name): type(module).__name__ for name, module in model.named_modules()}


def _as_passage(birth: Birth) -> Passage:
    """Returns a birth's first non-finite result, beside its largest input."""
    outputs: Iterator[Any] = (stats for stats in birth.outputs if stats.nans or stats.infs)
    made = next(outputs, None)
    return Passage(
        order=birth.order,
        where=birth.where,
        dtype=made.dtype if made is not None else "",
        shape=made.shape if made is not None else (),
        input_amax=max((stats.amax for stats in birth.inputs), default=None),
        amax=made.amax if made is not None else None,
        nans=made.nans if made is not None else 0,
        infs=made.infs if made is not None else 0,
    )


def _node(role: NodeRole, passage: Passage, types: Mapping[str, str]) -> PathNode:
    where = passage.where
    return PathNode(
        role=role,
        order=passage.order,
        phase=where.phase,
        module=where.module,
        type=types.get(where.module, "") if where.module or where.phase in ("forward", "backward") else "",
        op=where.op or "",
        dtype=passage.dtype,
        shape=tuple(passage.shape),
        input_amax=passage.input_amax,
        output_amax=passage.amax,
        nan=passage.nans,
        inf=passage.infs,
        limit=_limit(passage.dtype),
        source=where.source or where.forward_source,
    )


def _limit(dtype: str) -> float | None:
    """Returns the largest finite number of a floating-point dtype; that of its parts for a complex one."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        return None
    return torch.finfo(kind).max
