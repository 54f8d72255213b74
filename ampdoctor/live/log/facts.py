"""What `run.json` says of the machine: the facts that `ampdoctor env` lists."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ampdoctor.evidence.software import machine, packages, variables

if TYPE_CHECKING:
    from torch import nn


def software() -> dict[str, Any]:
    """Command line, versions, and the variables of the environment that change numbers; it needs no torch."""
    return {
        "command": list(sys.orig_argv),
        "software": machine() | packages(),
        "environment": variables(),
    }


def hardware() -> dict[str, Any]:
    """What torch computes on. GPUs are named only where CUDA is in use already: asking would begin to use it."""
    import torch

    from ampdoctor.precision.hardware import device_facts, torch_facts

    return {"hardware": {**torch_facts(), **(device_facts() if torch.cuda.is_initialized() else {})}}


def models_of(roots: Iterable[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    """The models that a loop trains: name, class, number of parameters, and their dtypes.

    Args:
        roots: Each with its name.
    """
    return [
        {
            "name": name,
            "class": f"{type(root).__module__}.{type(root).__qualname__}",
            "parameters": sum(p.numel() for p in root.parameters()),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in root.parameters()}),
        }
        for name, root in roots
    ]
