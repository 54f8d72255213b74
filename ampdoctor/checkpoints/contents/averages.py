"""Averaged copies of the weights that share a flat state dict with them, under their own prefix."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.checkpoints.contents.structure import is_average

LEAST_PAIRED = 0.5
"""Least share of a prefix's names that must also exist without it: a module called `shadow_net` has none."""


def averaged_names(names: Sequence[str]) -> frozenset[str]:
    """Returns names under a prefix that says "average" (`model_ema.`, `ema.`), if the weights themselves exist, too.

    Dots do not count: Stable Diffusion's average has none after its prefix.
    """
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        prefix, dot, rest = name.partition(".")
        if dot and is_average(prefix):
            by_prefix.setdefault(prefix, []).append(rest)
    if not by_prefix:
        return frozenset()
    own = [name for name in names if name.partition(".")[0] not in by_prefix]
    there = {_bare(name) for name in own} | {_bare(name.partition(".")[2]) for name in own}
    averaged = {
        prefix
        for prefix, rests in by_prefix.items()
        if sum(_bare(rest) in there for rest in rests) >= LEAST_PAIRED * len(rests)
    }
    return frozenset(name for name in names if name.partition(".")[0] in averaged)


def _bare(name: str) -> str:
    return name.replace(".", "")
