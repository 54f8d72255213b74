"""What `run.json` says of the machine: the facts that `ampdoctor env` lists."""

from __future__ import annotations

import sys
from typing import Any

from ampdoctor.evidence.software import machine, packages, variables


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
