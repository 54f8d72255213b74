"""Profiles of tensors that a test holds in its hands."""

from __future__ import annotations

import torch

from ampdoctor.evidence.run_facts import Place
from ampdoctor.numerics.counting import count
from ampdoctor.ranges.profile import Collector, RunFacts


def place(name, kind="activation_grad"):
    return Place(name, kind, "parameter" if kind.startswith("weight") else "output")


def values(log2_size, *, seed=0, count=2000, zeros=0, spread=0.0):
    """Normally distributed, of one size or of sizes that differ by `spread` binades; some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=generator) * 2.0**log2_size
    made *= torch.exp2(spread * torch.randn(count, generator=generator))
    made[:zeros] = 0.0
    return made


def collected(steps, *, weights=None, wide=(), sizes=None, more=None, **facts):
    """The profile of these tensors.

    Args:
        steps: For each step the tensors by place.
        weights: Tensors by place, counted once.
        wide: Names of the places that are no half ones.
        sizes: Parameter elements by module, 100 where nothing is said.
        more: Further fields of the profile.
        facts: Of the run.
    """
    collector = Collector()
    if weights is not None:
        collector.add_weights({where: count(tensor) for where, tensor in weights.items()})
    for step in steps:
        collector.add_step({where: count(tensor) for where, tensor in step.items()})
    return collector.profile(
        RunFacts(**{"precision": "fp16", **facts}),
        half=lambda where: where.name not in wide,
        weight=lambda module: (sizes or {}).get(module, 100),
        **(more or {}),
    )
