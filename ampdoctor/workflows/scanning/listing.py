"""`scan --list`: the contents of a checkpoint, without reading its tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampdoctor.checkpoints import Checkpoint, TensorRef
from ampdoctor.checkpoints.contents.scalers import number
from ampdoctor.checkpoints.family import Member
from ampdoctor.checkpoints.found import find
from ampdoctor.diagnosis.scaler.scaler_finding import scaler_numbers
from ampdoctor.evidence.of_checkpoints.checkpoint import ROLES
from ampdoctor.evidence.paths import shown_path
from ampdoctor.evidence.report import Report
from ampdoctor.evidence.report.scans import (
    ListedGroup,
    ListedLog,
    ListedMember,
    ListedOptimizer,
    ListedRole,
    ListedTensor,
    StructureSection,
)

_SETTINGS = frozenset(
    {
        "lr", "initial_lr", "min_lr", "max_lr", "lr_mult", "lr_scale", "lr_decay", "lr_max", "weight_lr_power",
        "betas", "beta1", "beta2", "beta3", "max_momentum", "base_momentum", "momentum", "nesterov", "dampening",
        "eps", "eps2", "weight_decay", "wd_mult", "decay", "decoupled_weight_decay", "correct_bias", "bias_correction",
        "alpha", "centered", "rho", "lambd", "t0", "etas", "step_sizes", "momentum_decay",
        "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "adamw_mode", "use_nesterov",
        "initial_accumulator_value", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size",
        "clip_threshold", "decay_rate", "scale_parameter", "relative_step", "warmup_init", "warmup_steps",
        "d", "d0", "d_coef", "d_denom", "d_numerator", "growth_rate", "safeguard_warmup", "use_bias_correction",
        "r", "k", "train_mode", "scheduled_lr", "weight_sum", "max_grad_norm", "trust_coefficient", "grad_averaging",
        "percentile_clipping", "optim_bits", "min_8bit_size", "block_wise", "max_unorm", "step", "rank",
        "update_proj_gap", "precondition_frequency", "ns_steps", "is_expert", "is_decoupled_lr", "skip_zeros",
    }
)  # fmt: skip
"""Numbers that optimizers keep in their groups. Anything else there is the user's own and may be private, and the
listing is made to be shown to others."""

_SHORT = 8
"""Longest list among hyperparameters (`betas`) that is shown, in elements."""


def list_structure(path: str | os.PathLike[str]) -> Report:
    """List a checkpoint's contents, or the members of a folder of many; no tensor is read.

    Args:
        path: As for `scan`.

    Returns:
        A report with verdict `not_judged` and the section `structure`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is refused.
        LimitExceededError: The checkpoint asks for more than a safe bound.
    """
    found = find(path)
    if len(found.members) > 1:
        return Report(
            command="scan",
            target={
                "path": found.name,
                "location": shown_path(path),
                "format": f"{len(found.members)} checkpoints",
                "count": len(found.members),
            },
            verdict="not_judged",
            structure=StructureSection(members=tuple(map(_member, found.members))),
        )
    with found.open() as checkpoint:
        checkpoint.require_unchanged()
        return Report(
            command="scan",
            target={
                "path": checkpoint.path,
                "location": shown_path(path),
                "format": checkpoint.format,
                "files": [{"path": file.path, "bytes": file.bytes} for file in checkpoint.files],
                "tensors": len(checkpoint),
                "bytes": checkpoint.total_bytes,
                "global_step": checkpoint.global_step,
            },
            verdict="not_judged",
            complete=not checkpoint.errors,
            skipped=checkpoint.skipped,
            errors=checkpoint.errors,
            structure=_structure(checkpoint),
        )


def _structure(checkpoint: Checkpoint) -> StructureSection:
    refs = list(checkpoint)
    return StructureSection(
        tensors=tuple(_tensor(ref) for role in ROLES for ref in refs if ref.role == role),
        roles={
            role: _total([ref for ref in refs if ref.role == role])
            for role in ROLES
            if any(ref.role == role for ref in refs)
        },
        optimizers=tuple(_optimizers(checkpoint)),
        scalers=tuple({"key": s.key, "file": s.file, **scaler_numbers(s)} for s in checkpoint.scalers),
        foreign=tuple(checkpoint.foreign),
        log=_log(checkpoint),
    )


def _member(member: Member) -> ListedMember:
    return ListedMember(
        name=member.name, step=member.step, unit=member.unit, placed=member.placed, files=tuple(member.files)
    )


def _tensor(ref: TensorRef) -> ListedTensor:
    return ListedTensor(
        role=ref.role,
        name=ref.name,
        group=ref.group,
        entry=ref.entry,
        dtype=str(ref.dtype).removeprefix("torch."),
        shape=tuple(ref.shape),
        bytes=ref.nbytes,
        file=ref.file,
    )


def _total(refs: Sequence[TensorRef]) -> ListedRole:
    dtypes = Counter(str(ref.dtype).removeprefix("torch.") for ref in refs)
    return ListedRole(
        tensors=len(refs),
        elements=sum(ref.stored.numel for ref in refs),
        bytes=sum(ref.nbytes for ref in refs),
        dtypes=dict(dtypes),
    )


def _optimizers(checkpoint: Checkpoint) -> Iterator[ListedOptimizer]:
    for path, optimizer in checkpoint.optimizers().items():
        groups = [group for group in optimizer["param_groups"] if isinstance(group, Mapping)]
        yield ListedOptimizer(path=path, parameters=len(optimizer["state"]), groups=tuple(map(_group, groups)))


def _group(group: Mapping[Any, Any]) -> ListedGroup:
    params = group.get("params")
    shown = {key: _value(item) for key, item in group.items() if isinstance(key, str) and key in _SETTINGS}
    settings = {key: item for key, item in shown.items() if item is not None}
    return ListedGroup(parameters=len(params) if isinstance(params, list | tuple) else None, settings=settings)


def _value(item: Any) -> Any:
    """Returns a hyperparameter as a JSON value; None if it is not one."""
    if isinstance(item, bool):
        return item
    if isinstance(item, list | tuple):
        parts = [_value(part) for part in item[:_SHORT]]
        return parts if len(item) <= _SHORT and None not in parts else None
    if isinstance(item, int) and abs(item) < 2**63:
        return item
    return number(item)


def _log(checkpoint: Checkpoint) -> ListedLog | None:
    steps = [entry.step for entry in checkpoint.log]
    return ListedLog(entries=len(steps), first_step=min(steps), last_step=max(steps)) if steps else None
