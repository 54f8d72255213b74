"""Puts the numbers of a step into its parcel, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampdoctor.live.numbers.norms import local, norms_of, total
from ampdoctor.live.numbers.sampling import sample
from ampdoctor.live.numbers.sent import Sent
from ampdoctor.live.numbers.updates import Updates
from ampdoctor.numerics import extremes_of_each
from ampdoctor.numerics.tensors import Unseen

Named = Sequence[tuple[str, Tensor]]
"""Tensors and their names."""


def add_norms(sent: Sent, gradients: Named, *, fused: bool, check: bool) -> Tensor | None:
    """Adds the gradients' norms: what clipping has computed, and their own where it has not or single ones are wanted.

    Args:
        sent: The step.
        gradients: Those that there are.
        fused: As in `norms_of`.
        check: As there.

    Returns:
        The norm of all, 0-dim and on their device, as clipping saw it or as they are; None where it is in parts.
    """
    parts = sent.clips.parts
    sent.shards = any(hasattr(gradient, "to_local") for _, gradient in gradients)
    for part in parts:
        sent.parcel.add("clip", part.clip.total)
    if parts and sent.reason is None:
        return _one([local(part.clip.total) for part in parts])
    every = norms_of(gradients, fused=fused, check=check)
    for norms in every:
        sent.norms += norms.names
        sent.parcel.add("norms", norms.vector)
        if norms.off is not None:
            sent.parcel.add("off", norms.off)
    if parts:
        return _one([local(part.clip.total) for part in parts])
    return _one([total(norms.vector) for norms in every])


def _one(norms: list[Tensor]) -> Tensor | None:
    """Returns the norm of all, from those of parts; None without a part, or where they lie on several devices."""
    if len(norms) < 2 or len({norm.device for norm in norms}) > 1:
        return norms[0] if len(norms) == 1 else None
    with Unseen(norms[0]):
        return total(torch.stack([norm.to(torch.float32) for norm in norms]))


def add_gradients(sent: Sent, gradients: Named) -> None:
    """Adds samples and extremes of the gradients.

    Args:
        sent: The step.
        gradients: Those that there are.
    """
    elements = [(name, local(gradient)) for name, gradient in gradients]
    for samples in sample(elements):
        sent.sampled += samples.plan
        sent.parcel.add("gradients", samples.buffer)
    full = [(name, part) for name, part in elements if part.numel()]
    for (name, _), (low, high) in zip(full, extremes_of_each(part for _, part in full), strict=True):
        sent.extremes += (name,)
        sent.parcel.add("extremes", low)
        sent.parcel.add("extremes", high)


def add_parameters(sent: Sent, parameters: Named, *, fused: bool, updates: Updates | None) -> None:
    """Adds norms and samples of the parameters before the step.

    Args:
        sent: The step.
        parameters: All of the optimizer's.
        fused: As in `norms_of`.
        updates: Of the same step, announced before; None for the first time.
    """
    sent.updates = Updates(parameters) if updates is None else updates
    for samples in sent.updates.before:
        sent.parcel.add("parameters", samples.buffer)
    for norms in norms_of(parameters, fused=fused):
        sent.weights += norms.names
        sent.parcel.add("weights", norms.vector)


def add_changes(sent: Sent) -> None:
    """Adds what the step has added to the parameters, what modules have returned, and what has come back to outputs."""
    if sent.updates is not None and not sent.skipped:
        for change in sent.updates.changes():
            sent.parcel.add("changes", change)
    for returned in sent.returned:
        sent.parcel.add("returned", returned.values)
        sent.parcel.add("returned_norm", returned.norm)
        for extreme in returned.extremes:
            sent.parcel.add("returned_extremes", extreme)
    for found in sent.arrived:
        sent.parcel.add("arrived", found.values)
