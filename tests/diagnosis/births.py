"""Births for the tests of this folder: plain evidence, no torch."""

from __future__ import annotations

from ampdoctor.evidence.location import Where
from ampdoctor.evidence.trace import NonFiniteOrigin, Recomputation, TensorStats


def stats(dtype="float16", *, name=None, shape=(4,), amax=1.0, nans=0, infs=0, zeros=0):
    return TensorStats(name=name, dtype=dtype, shape=shape, amax=amax, nans=nans, infs=infs, zeros=zeros)


def origin(
    phase="forward",
    *,
    came_from="op",
    kernel="aten.mul",
    nonfinite="inf",
    verdict=None,
    order=1,
    affected=("loss",),
    **rest,
):
    """An origin; `verdict` is (finite, amax in float64, limit of the format)."""
    where = {
        "step": 3,
        "phase": phase,
        "module": "net.fc",
        "op": kernel,
        "nonfinite": nonfinite,
        **rest.pop("where", {}),
    }
    given = {"inputs": (stats(),), "outputs": (stats(infs=1),), **rest}
    return NonFiniteOrigin(
        order=order,
        where=Where(**where),
        came_from=came_from,
        kernel=kernel,
        recomputed=None if verdict is None else Recomputation(finite=verdict[0], amax=verdict[1], limit=verdict[2]),
        affected=affected,
        **given,
    )
