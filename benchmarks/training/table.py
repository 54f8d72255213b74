"""From trainings to figures over the seeds, to a verdict, to a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.training.advice import Advice
from benchmarks.training.arm import KINDS, Shadow, Trained

LAST = 20
"""Steps over which the final loss is averaged."""
HARMLESS = {
    "skipped steps": 0.0,
    "flushed activation gradients": 1e-2,
    "flushed weight gradients": 1e-2,
    "gradient error": 5e-3,
    "final loss": 0.0,
}
"""Up to here a figure is as good as none: runs that flushed 1 % of their gradients, or whose gradients were as far from
fp32's as bf16's are (5e-3), trained like fp32 (measured on small transformers)."""
MENDABLE = ("skipped steps", "flushed activation gradients", "flushed weight gradients")
"""What loss scaling can mend: without either, what error there is comes from rounding, which no scale changes."""
WITHIN = (1e-3, 1e-1)
"""Where a predicted share of flushed elements is held to account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One seed: in fp32, with the default, and as recommended (the default again where nothing is to change)."""

    seed: int
    fp32: Trained
    default: Trained
    recommended: Trained
    advice: Advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run, of each seed.

    Attributes:
        name: What it is; a key of `HARMLESS`.
        default: With torch's default; a final loss is given as what it is above fp32's of the same seed.
        recommended: With the recommendation.
    """

    name: str
    default: Sequence[float]
    recommended: Sequence[float]

    @property
    def spread(self) -> float:
        """How far the seeds are apart, in the way in which they are further apart."""
        return max(max(side) - min(side) for side in (self.default, self.recommended))

    def better(self) -> bool:
        """The recommendation is better by more than the spread, and the default is not harmless."""
        return _exceeds(self.default, self.recommended, self.spread, HARMLESS[self.name])

    def worse(self) -> bool:
        """The recommendation is worse by more than the spread, and is not harmless."""
        return _exceeds(self.recommended, self.default, self.spread, HARMLESS[self.name])


def _exceeds(high: Sequence[float], low: Sequence[float], spread: float, harmless: float) -> bool:
    above, below = statistics.fmean(high), statistics.fmean(low)
    if math.isnan(above) or math.isnan(below):
        return math.isnan(above) and not math.isnan(below)
    return above > harmless and above - below > spread


def figures(pairs: Sequence[Pair]) -> list[Figure]:
    """All figures of a run."""

    def both(name: str, read: Callable[[Pair, Trained], float]) -> Figure:
        return Figure(
            name=name,
            default=[read(pair, pair.default) for pair in pairs],
            recommended=[read(pair, pair.recommended) for pair in pairs],
        )

    names = dict(zip(KINDS, ("flushed activation gradients", "flushed weight gradients"), strict=True))
    return [
        both("skipped steps", lambda _, trained: float(len(trained.skipped))),
        *(
            both(name, lambda pair, trained, kind=kind: _mean(s.flushed[kind] for s in _common(pair, trained)))  # type: ignore[misc]
            for kind, name in names.items()
        ),
        both("gradient error", lambda pair, trained: _mean(s.error for s in _common(pair, trained))),
        both("final loss", lambda pair, trained: final_loss(trained) - final_loss(pair.fp32)),
    ]


def final_loss(trained: Trained) -> float:
    """Mean loss of the last steps; NaN where the training ended early."""
    last = trained.losses[-LAST:]
    if trained.failure is not None or not last or any(loss is None for loss in last):
        return math.nan
    return statistics.fmean(loss for loss in last if loss is not None)


def verdict(measured: Sequence[Figure], *, changed: bool) -> str:
    """In a few words."""
    worse = [figure.name for figure in measured if figure.worse()]
    better = [figure.name for figure in measured if figure.better()]
    if worse:
        return f"WORSE: {', '.join(worse)}" + (f"; better: {', '.join(better)}" if better else "")
    if better:
        return f"better: {', '.join(better)}"
    wrong = [f.name for f in measured if f.name in MENDABLE and _mean(f.default) > HARMLESS[f.name]]
    if changed:
        return "as good" if not wrong else f"as good; still not right: {', '.join(wrong)}"
    return "the default is right, kept" if not wrong else f"kept, NOT RIGHT: {', '.join(wrong)}"


def comparison_table(runs: Sequence[tuple[str, Sequence[Pair]]]) -> Iterator[str]:
    """One row a run: default -> recommendation, means over the seeds."""
    yield (
        "| run | recommended | skipped steps | flushed activation gradients | flushed weight gradients "
        "| gradient error | final loss: fp32 | default | recommended | spread of the seeds | verdict |"
    )
    yield "|---|---|" + "---:|" * 8 + "---|"
    for name, pairs in runs:
        said = sorted({pair.advice.sentence() for pair in pairs})
        measured = figures(pairs)
        skipped, *shares, loss = measured
        cells = [_arrow(skipped, "{:.1f}"), *(_arrow(figure, "{:.2g}") for figure in shares)]
        level = _mean(final_loss(pair.fp32) for pair in pairs)
        changed = any(pair.advice.changes for pair in pairs)
        yield (
            f"| {name} | {' / '.join(said)} | {' | '.join(cells)} | {level:.4g} | {_mean(loss.default):+.2g} "
            f"| {_mean(loss.recommended):+.2g} | {loss.spread:.2g} | {verdict(measured, changed=changed)} |"
        )


def prediction_table(runs: Sequence[tuple[str, Sequence[Pair]]]) -> Iterator[str]:
    """One row a run: flushed shares from the fp32 histogram against the half-precision step's, at two scales."""
    yield (
        "| run | scale 1: activation gradients, predicted / observed | off by at most | weight gradients "
        "| own scale: activation gradients | off by at most | weight gradients |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, pairs in runs:
        sides = [
            [s for pair in pairs for s in getattr(pair.default, which) if not s.skipped]
            for which in ("unscaled", "compared")
        ]
        cells = [f"{_against(s, KINDS[0])} | {_furthest(s, KINDS[0])} | {_against(s, KINDS[1])}" for s in sides]
        yield f"| {name} | {' | '.join(cells)} |"


def _common(pair: Pair, trained: Trained) -> list[Shadow]:
    """The compared steps that both ways of training took, so that neither is judged by its easier ones."""
    taken = [{s.step for s in one.compared if not s.skipped} for one in (pair.default, pair.recommended)]
    return [s for s in trained.compared if s.step in taken[0] & taken[1]]


def _against(shadows: Sequence[Shadow], kind: str) -> str:
    return f"{_mean(s.predicted[kind] for s in shadows):.3g} / {_mean(s.flushed[kind] for s in shadows):.3g}"


def _furthest(shadows: Sequence[Shadow], kind: str) -> str:
    """The largest relative distance of a prediction from what came, of the steps that are held to account."""
    seen = [(s.predicted[kind], s.flushed[kind] or 0.0) for s in shadows]
    off = [abs(predicted / observed - 1.0) for predicted, observed in seen if WITHIN[0] <= observed <= WITHIN[1]]
    return f"{max(off):.1%} of {len(off)}" if off else "-"


def _arrow(figure: Figure, form: str) -> str:
    before, after = (form.format(_mean(side)) for side in (figure.default, figure.recommended))
    return before if before == after else f"{before} → {after}"


def _mean(values: object) -> float:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return statistics.fmean(known) if known else math.nan
