"""Averaged copies of the weights that lie in one flat state dict with them, under a prefix of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ampdoctor.checkpoints.contents.structure import is_average

LEAST_PAIRED = 0.5
"""Share of a prefix's names that must stand beside it as well: a module that is only called `shadow_net` has none."""


def averaged_names(names: Sequence[str]) -> frozenset[str]:
    """Names under a prefix that says "average" (`model_ema.`, `ema.`), where the weights themselves are there, too.

    Dots do not count: Stable Diffusion's average leaves them out behind its prefix.
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
