"""AMP501: updates or moments are lost in their format, as a replay shows it or an fp32 pass lets it be foreseen.

Measured on a character transformer (2 blocks, AdamW and SGD, 300 steps; the final loss in pure bf16 less fp32's): with
up to 0.4 of the update lost at most 0.04; with 0.5 to 0.75 lost 0.1 to 0.3; with more 0.3 to 1. The share of elements
that stay says less: 0.84 of them stood still in a run that ended 0.1 above fp32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampdoctor.diagnosis.catalogue.rule import REPLAYED, register
from ampdoctor.diagnosis.replay.causes import HELP
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription
from ampdoctor.evidence.run_facts import UpdateFacts
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Threshold, Thresholds
from ampdoctor.evidence.trace import Comparison, ModuleUpdate, ParameterBeside

STALLED = Threshold(
    code="AMP501",
    name="stalled",
    default=0.75,
    unit="share",
    why="Share of the elements that move in fp32 and stay, and share of the update that is lost: 0.97 to 1.0 where "
    "training stands still, 0.42 in a pure fp16 run that learns.",
)
RULE = register(
    "AMP501",
    "optimizer-precision",
    "Updates or moments are lost in their format",
    worst="error",
    commands=REPLAYED,
    thresholds=(STALLED,),
)

LOST = 0.5
"""Share of the update that may be lost before something is advised."""
ROUNDS_TO_NEAREST = "torch.optim."
"""Classes from here add an update to a bf16 weight and round to nearest. Others may round stochastically or keep what
is lost (Kahan), which an fp32 pass cannot see."""
REMEDIES = (
    "keep fp32 weights and let autocast compute in half, or give the optimizer fp32 master weights: no update is lost",
    "else an optimizer that rounds stochastically, or keeps what rounding loses (Kahan summation)",
    "torch.optim keeps its moments in the parameters' format, fused and foreach as well: fp32 parameters cure both",
)


@dataclass(frozen=True, slots=True)
class Stagnation:
    """Modules whose updates are lost in their tensors' format.

    Attributes:
        module: The module that holds them all; the worst of them where only the root does.
        updates: Their numbers.
    """

    module: str
    updates: tuple[ModuleUpdate, ...]


def stagnation(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Stagnation | None:
    """Returns what does not move though it does in fp32; None where enough of it does.

    Args:
        comparison: Of one step.
        thresholds: Which share has to stand still (AMP501).
    """
    return stagnation_of(comparison.updates, thresholds)


def stagnation_of(updates: Sequence[ModuleUpdate], thresholds: Thresholds) -> Stagnation | None:
    """The same of a step's updates alone.

    Over all trained half tensors together, as a key bias whose true gradient is 0 stalls in every healthy run. What no
    optimizer holds is judged over several steps (AMP508): a running mean that has settled stands still in most of them.
    """
    share = thresholds[STALLED]
    group = [u for u in updates if u.trained and u.moved]
    moved, stalled = sum(u.moved for u in group), sum(u.stalled for u in group)
    size = math.fsum(u.size**2 for u in group)
    lost = math.sqrt(math.fsum((u.lost * u.size) ** 2 for u in group) / size) if size else 0.0
    still = tuple(u for u in group if u.stalled)
    if still and stalled > share * moved and lost > share:
        return Stagnation(_holder(still), still)
    return None


def unmoved(step: Comparison) -> tuple[ParameterBeside, ...]:
    """Returns the parameters that stand still in a step and move in fp32.

    Args:
        step: The step.
    """
    return tuple(p for p in step.parameters if p.meant_to_move and not p.moved)


def rounded_away(parameters: Sequence[ParameterBeside]) -> bool:
    """Are updates of half a unit in the last place or less why they stand still? Else the update itself is zero.

    Args:
        parameters: Those that stand still.
    """
    given = [p for p in parameters if p.gradient]  # a clip factor of 0 leaves no gradient to round away
    return sum(p.beneath for p in given) > LOST * sum(p.meant_to_move for p in parameters)


def stagnation_finding(step: int, stagnation: Stagnation) -> Finding:
    """The finding for modules that stagnate."""
    moved = sum(u.moved for u in stagnation.updates)
    stalled = sum(u.stalled for u in stagnation.updates)
    return Finding(
        code=RULE.code,
        name=RULE.name,
        severity="error",
        cause="optimizer_precision",
        where=Where(step=step, phase="optimizer", module=stagnation.module, op="aten.add_"),
        message=f"step {step}: {stalled} of {moved} elements of trained weights in {stagnation.module or 'the model'} "
        "do not move "
        "though they do in fp32: each update is below half a unit in the last place of its weight",
        evidence={
            "moved": moved,
            "stalled": stalled,
            "stalled_fraction": stalled / moved,
            "modules": [u.module for u in stagnation.updates[:16]],
            "modules_count": len(stagnation.updates),
            "update_lost": max(u.lost for u in stagnation.updates),
        },
        help=HELP["optimizer_precision"],
    )


def _holder(updates: tuple[ModuleUpdate, ...]) -> str:
    """The innermost module that holds all of them; the one with the most lost elements where that is only the root."""
    paths = [update.module.split(".") for update in updates]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if common and common != [""]:
        return ".".join(common)
    worst = max(updates, key=lambda u: (u.stalled, u.stalled / u.moved if u.moved else math.inf))
    return worst.module


@dataclass(frozen=True, slots=True)
class AllUpdates:
    """All parameters together: shares as in `UpdateFacts`, and the median over parameters of their log2 ratio."""

    stagnant: float
    lost: float
    log2_ratio: float | None


def all_updates(updates: Sequence[UpdateFacts]) -> AllUpdates | None:
    """What bf16 weights would lose of a run's updates; None where nothing moves or nothing was looked at."""
    moved = sum(u.elements * u.updated for u in updates)
    size = math.fsum(u.size**2 for u in updates)
    if not moved or not size:
        return None
    ratios = sorted(u.log2_ratio for u in updates if u.log2_ratio is not None)
    return AllUpdates(
        stagnant=sum(u.elements * u.updated * u.stagnant for u in updates) / moved,
        lost=math.sqrt(math.fsum((u.lost * u.size) ** 2 for u in updates) / size),
        log2_ratio=ratios[len(ratios) // 2] if ratios else None,
    )


def stagnation_expected(updates: Sequence[UpdateFacts], thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Finding | None:
    """AMP501 for a run whose weights are bf16 throughout (no autocast, no fp32 masters), from a pass in fp32.

    Args:
        updates: Of the parameters. Where an optimizer that is not torch's own stepped one, nothing is said.
        thresholds: Which share has to stand still (AMP501).
    """
    if not all(u.optimizer.startswith(ROUNDS_TO_NEAREST) for u in updates):
        return None
    modules: defaultdict[str, list[UpdateFacts]] = defaultdict(list)
    for update in updates:
        modules[update.name.rpartition(".")[0]].append(update)
    found = stagnation_of([_module_update(module, parts) for module, parts in modules.items()], thresholds)
    together = all_updates(updates)
    if found is None or together is None:
        return None
    said = (
        f"kept in bf16, {together.stagnant:.0%} of the weights that move in fp32 stay as they are, and "
        f"{together.lost:.0%} of the update is lost: each is below half a unit in the last place of its weight"
    )
    finding = stagnation_finding(0, found)
    return replace(
        finding,
        message=said,
        where=replace(finding.where, step=None),
        evidence={**finding.evidence, "log2_update_over_weight": together.log2_ratio, "steps": updates[0].steps},
        prescription=Prescription(
            kind="dtype",
            value="float32",
            status="not_run",
            reason="foreseen from a pass in fp32",
            detail=REMEDIES[0],
        ),
    )


def update_remedies(updates: Sequence[UpdateFacts]) -> Iterator[str]:
    """For a run in pure bf16: what to do about lost updates; nothing where few are lost."""
    together = all_updates(updates)
    if together is not None and together.lost > LOST:
        yield f"{_said(together)}: {REMEDIES[0]}"
        yield from REMEDIES[1:]


def update_notes(together: AllUpdates | None) -> Iterator[str]:
    """For a run that may become one in bf16: why its weights stay in fp32."""
    if together is not None and together.lost > LOST:
        yield f"keep the weights in fp32 (autocast): in bf16 {_said(together)}"


def _said(together: AllUpdates) -> str:
    ratio = f" (median |update| / |weight| 2^{together.log2_ratio:.1f})" if together.log2_ratio is not None else ""
    return f"{together.lost:.0%} of the update would be lost and {together.stagnant:.0%} of the elements stay{ratio}"


def _module_update(module: str, parts: Sequence[UpdateFacts]) -> ModuleUpdate:
    size = math.sqrt(math.fsum(u.size**2 for u in parts))
    lost = math.sqrt(math.fsum((u.lost * u.size) ** 2 for u in parts))
    moved = [round(u.elements * u.updated) for u in parts]
    return ModuleUpdate(
        module=module,
        tensors=tuple(u.name for u in parts),
        moved=sum(moved),
        stalled=sum(round(n * u.stagnant) for n, u in zip(moved, parts, strict=True)),
        size=size,
        lost=lost / size if size else 0.0,
        trained=True,
    )
