"""Repairs broken state for a replay: values that a checkpoint lost are replaced by harmless ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ampdoctor.checkpoints.measures.summary import NEVER_NEGATIVE
from ampdoctor.diagnosis.tensors.tensor_finding import FP16_MAX
from ampdoctor.evidence.report import Prescription
from ampdoctor.probes.cheap.nonfinite import state_tensors

if TYPE_CHECKING:
    from ampdoctor.evidence.where import Where
    from ampdoctor.replay.session import Session
    from ampdoctor.workflows.proving.trials import Trials


def repaired(places: Sequence[Where]) -> Callable[[Session], AbstractContextManager[Any]]:
    """Returns a change: the broken elements of some tensors replaced.

    A weight or a buffer gets the median of the tensor's other elements: near 0 for weights that are drawn around 0,
    near 1 for the scale of a normalisation, a usual variance for a running variance. If no element is sound, it gets 0,
    a variance 1. An optimizer's moment becomes 0, and so do the parameter's other moments at those elements, as before
    the first step: 0 in the second moment alone would make the update as large as 1/epsilon.

    Args:
        places: Where findings about state, or births that the state caused, name their `tensor` and `op`.
    """

    @contextmanager
    def change(session: Session) -> Iterator[None]:
        wanted = {_key(where) for where in places}
        masks: dict[str, torch.Tensor] = {}
        for kind, name, tensor in state_tensors(session):
            if name not in wanted or not tensor.is_floating_point():
                continue
            bad = _broken(kind, name, tensor.detach())
            if kind == "optimizer_state":
                owner = name.partition(":")[0]
                masks[owner] = masks[owner] | bad if owner in masks and masks[owner].shape == bad.shape else bad
            else:
                with torch.no_grad():
                    tensor[bad] = _usual(name, tensor.detach(), bad)
        for kind, name, tensor in state_tensors(session):
            mask = masks.get(name.partition(":")[0]) if kind == "optimizer_state" else None
            if mask is not None and mask.shape == tensor.shape and tensor.is_floating_point():
                tensor[mask] = 0.0
        session.state_loaded()
        yield

    return change


def repair(places: Sequence[Where], trials: Trials) -> Prescription:
    """Returns the prescription for broken state: its values are lost, but the rest of the run is shown to be well.

    Args:
        places: See `repaired`.
        trials: The trials of the first step that reads the state.
    """
    names = list(dict.fromkeys(where.tensor or "" for where in places))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return trials.attempt(
        "code",
        f"replace {shown}",
        repaired(places),
        f"Resume from a checkpoint in which {shown} is sound. Replayed with the broken elements replaced (weights and "
        "buffers by the median of the others, moments by 0): their own values are lost.",
        stands_in=True,
        restores=True,
    )


def _key(where: Where) -> str:
    op = where.op or ""
    entry = op.removeprefix("optimizer_state:")
    return f"{where.tensor}:{entry}" if entry != op else where.tensor or ""


def _broken(kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    leaf = name.rpartition(":")[2].rpartition(".")[2]
    bad = ~torch.isfinite(tensor)
    if leaf in NEVER_NEGATIVE:
        bad |= tensor < 0
    if kind == "param":
        bad |= tensor.abs() == FP16_MAX
    return bad


def _usual(name: str, tensor: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    sound = tensor[~bad]
    if sound.numel():
        return sound.float().median().to(tensor.dtype)
    return tensor.new_tensor(1.0 if name.rpartition(".")[2] in NEVER_NEGATIVE else 0.0)
