"""The facts of a run: the machine, the models, and the rank of this process in its job. No torch."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ampdoctor.evidence.software import machine, packages, variables

if TYPE_CHECKING:
    from torch import nn


def software() -> dict[str, Any]:
    """Returns the command line, versions, and the environment variables that change numbers; needs no torch."""
    return {"command": list(sys.orig_argv), "software": machine() | packages(), "environment": variables()}


def hardware() -> dict[str, Any]:
    """Returns the devices; GPUs are named only where CUDA is initialized, because asking would initialize it."""
    import torch

    from ampdoctor.precision.spec import device_facts, torch_facts

    return {"hardware": {**torch_facts(), **(device_facts() if torch.cuda.is_initialized() else {})}}


def models_of(roots: Iterable[tuple[str, nn.Module]]) -> list[dict[str, Any]]:
    """Returns the name, class, number of parameters and dtypes of each model that a loop trains."""
    return [
        {
            "name": name,
            "class": f"{type(root).__module__}.{type(root).__qualname__}",
            "parameters": sum(p.numel() for p in root.parameters()),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in root.parameters()}),
        }
        for name, root in roots
    ]


# -- rank: from the process group, else from the launcher's environment variables --

_NUMBER = re.compile("[0-9]{1,9}")
"""A rank or size; `int` itself raises for thousands of digits."""
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Launchers, with the variables of a process's rank and of their number.

The order matters, because each launcher may use a later one: mpirun starts one daemon a node by srun. For Slurm it is
the size of a step, which only srun sets: a batch script is one process, and has `SLURM_PROCID` 0 and the `SLURM_NTASKS`
of its allocation.
"""
_KEY = "ampdoctor/run_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInJob:
    """The rank of this process in its job."""

    rank: int = 0
    world: int = 1  # number of processes
    launcher: str | None = None  # "torchrun", "srun", "mpirun" or unknown


def launched(environment: Mapping[str, str] | None = None) -> RankInJob:
    """Returns the rank that torchrun, Slurm or Open MPI has put into the environment; rank 0 of 1 without them."""
    known = os.environ if environment is None else environment
    for launcher, number, several in _LAUNCHERS:
        rank, size = known.get(number, ""), known.get(several, "")
        if _NUMBER.fullmatch(rank) and _NUMBER.fullmatch(size) and int(rank) < int(size):
            return RankInJob(rank=int(rank), world=int(size), launcher=launcher)
    return RankInJob()


def restarts() -> int:
    """Returns how often torchrun has restarted the job's processes."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if _NUMBER.fullmatch(text) else 0


def grouped() -> RankInJob | None:
    """Returns the rank in the process group; None as long as there is none. Runs no collective."""
    distributed = _distributed()
    if distributed is None:
        return None
    return RankInJob(rank=distributed.get_rank(), world=distributed.get_world_size(), launcher=launched().launcher)


def exit_code_ends_others() -> bool:
    """Whether a launcher watches this process's exit code, and ends or restarts the others where it is not 0."""
    place = grouped() or launched()
    return place.world > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def run_id_of_all() -> str:
    """Returns an id, the same in all processes of a run: from the store of the process group."""
    made = secrets.token_hex(8)
    distributed = _distributed()
    if distributed is not None and distributed.get_world_size() > 1:
        with suppress(Exception):  # a backend without a store, or the store is gone
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way
            return bytes(store.compare_set(_KEY, "", made)).decode("ascii")
    return made


def _distributed() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")
    joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if joined else None
