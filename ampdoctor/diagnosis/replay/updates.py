"""Rules on an optimizer's updates compared with fp32's: lost, frozen, stuck, or of another length."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ampdoctor.diagnosis.catalogue import REPLAYED, rule, short
from ampdoctor.diagnosis.replay.gradients import common_module, listing
from ampdoctor.diagnosis.replay.nonfinite import HELP
from ampdoctor.evidence.location import Where
from ampdoctor.evidence.report import Finding, Prescription, Severity
from ampdoctor.evidence.run_facts import UpdateFacts
from ampdoctor.evidence.thresholds import DEFAULT_THRESHOLDS, Thresholds
from ampdoctor.evidence.trace import Comparison, ModuleUpdate, ParameterVsFp32, StateVsFp32

OPTIMIZER_PRECISION = rule("AMP501", REPLAYED)

LOST_SHARE = 0.5  # lost share of the update from which something is advised
ROUNDS_TO_NEAREST = "torch.optim."
"""Optimizers from here round the update of a bf16 weight to nearest. Others may round stochastically or keep what is
lost (Kahan), which an fp32 pass cannot see."""
REMEDIES = (
    "keep fp32 weights and let autocast compute in half, or give the optimizer fp32 master weights: no update is lost",
    "else an optimizer that rounds stochastically, or keeps what rounding loses (Kahan summation)",
    "torch.optim keeps its moments in the parameters' format, fused and foreach as well: fp32 parameters cure both",
)


@dataclass(frozen=True, slots=True)
class Stagnation:
    """Modules whose updates are lost; `module` holds them all, or where only the root does, is the worst."""

    module: str
    updates: tuple[ModuleUpdate, ...]


def stagnation(comparison: Comparison, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> Stagnation | None:
    """Returns the modules of one step that stand still although fp32 moves them; None where enough of them move."""
    return stagnation_of(comparison.updates, thresholds)


def stagnation_of(updates: Sequence[ModuleUpdate], thresholds: Thresholds) -> Stagnation | None:
    """Returns the same for the updates of one step, all trained half tensors together."""
    share = thresholds[OPTIMIZER_PRECISION["stalled"]]
    group = [u for u in updates if u.trained and u.moved]
    moved, stalled = sum(u.moved for u in group), sum(u.stalled for u in group)
    size = math.fsum(u.size**2 for u in group)
    lost = math.sqrt(math.fsum((u.lost * u.size) ** 2 for u in group) / size) if size else 0.0
    still = tuple(u for u in group if u.stalled)
    if still and stalled > share * moved and lost > share:
        return Stagnation(_holder(still), still)
    return None


def unmoved(step: Comparison) -> tuple[ParameterVsFp32, ...]:
    """Returns the parameters that stand still in a step although fp32 moves them."""
    return tuple(p for p in step.parameters if p.meant_to_move and not p.moved)


def rounded_away(parameters: Sequence[ParameterVsFp32]) -> bool:
    """Returns whether most stand still due to rounding (at most half a unit in the last place), not a zero update."""
    given = [p for p in parameters if p.gradient]  # a clip factor of 0 leaves no gradient to round away
    return sum(p.below_half_ulp for p in given) > LOST_SHARE * sum(p.meant_to_move for p in parameters)


def stagnation_finding(step: int, stagnation: Stagnation) -> Finding:
    """Makes the finding for modules that stagnate."""
    moved = sum(u.moved for u in stagnation.updates)
    stalled = sum(u.stalled for u in stagnation.updates)
    return OPTIMIZER_PRECISION.finding(
        "error",
        f"step {step}: {stalled:,} of {moved:,} trained elements of {stagnation.module or 'the model'} do not move, "
        "and in fp32 they do: each update is too small to change its weight",
        where=Where(step=step, phase="optimizer", module=stagnation.module, op="aten.add_"),
        cause="optimizer_precision",
        evidence={
            "moved": moved,
            "stalled": stalled,
            "stalled_fraction": stalled / moved,
            **listing([u.module for u in stagnation.updates], "modules"),
            "update_lost": max(u.lost for u in stagnation.updates),
        },
        advice=HELP["optimizer_precision"],
    )


def _holder(updates: tuple[ModuleUpdate, ...]) -> str:
    worst = max(updates, key=lambda u: (u.stalled, u.stalled / u.moved if u.moved else math.inf))
    return common_module([f"{update.module}." for update in updates]) or worst.module


@dataclass(frozen=True, slots=True)
class AllUpdates:
    """All parameters together: shares as in `UpdateFacts`, and the median over parameters of their log2 ratio."""

    stagnant: float
    lost: float
    log2_ratio: float | None


def all_updates(updates: Sequence[UpdateFacts]) -> AllUpdates | None:
    """Returns what bf16 weights would lose of a run's updates; None where nothing moves or nothing was examined."""
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
    """Judges AMP501 by an fp32 pass: bf16 weights without autocast or master weights, with torch's optimizers."""
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
        f"in bf16, {together.stagnant:.0%} of the weights that move in fp32 stay as they are, and "
        f"{together.lost:.0%} of the update is lost: updates are too small to change their weights"
    )
    finding = stagnation_finding(0, found)
    return replace(
        finding,
        message=said,
        where=replace(finding.where, step=None),
        evidence={**finding.evidence, "log2_update_over_weight": together.log2_ratio, "steps": updates[0].steps},
        prescription=Prescription(
            kind="dtype", value="float32", status="not_run", reason="foreseen from a pass in fp32", detail=REMEDIES[0]
        ),
    )


def update_remedies(updates: Sequence[UpdateFacts]) -> Iterator[str]:
    """Yields what to do about lost updates in pure bf16; nothing where few are lost."""
    together = all_updates(updates)
    if together is not None and together.lost > LOST_SHARE:
        yield f"{_said(together)}: {REMEDIES[0]}"
        yield from REMEDIES[1:]


def update_notes(together: AllUpdates | None) -> Iterator[str]:
    """Yields why the weights should stay in fp32, for a run that may become a bf16 run."""
    if together is not None and together.lost > LOST_SHARE:
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


# -- tensors over the compared steps --


SHOWN = 3  # steps in a row, up to the last compared one, in which something must hold
STRAIGHT = 0.75
"""Least |sum of fp32's moves| / sum of |moves| of a tensor. The steps of a mean at rest go to and fro: 0.58 after three
steps, 1 / sqrt(n) in the long run. Measured where something stands still: 0.79 to 1."""
COINS = 5  # signs after the first that must be equal where only few elements are seen: by chance once in 32
Beside = TypeVar("Beside", ParameterVsFp32, StateVsFp32)


def lasting(
    steps: Sequence[Sequence[Beside]],
    holds: Callable[[Beside], bool],
    shows: Callable[[Sequence[Beside]], bool] = lambda _: True,
    least: int = SHOWN,
) -> tuple[int, Mapping[str, tuple[Beside, ...]]]:
    """Returns the first step (index) since which `holds` is true of tensors, and these with their values since."""
    runs: dict[str, list[Beside]] = {beside.name: [] for beside in steps[-1]} if steps else {}
    going = set(runs)
    for step in reversed(steps):
        going &= {beside.name for beside in step if holds(beside)}
        for beside in step:
            if beside.name in going:
                runs[beside.name].append(beside)
    found = {name: tuple(run[::-1]) for name, run in runs.items() if len(run) >= least and shows(run[::-1])}
    longest = max(map(len, found.values()), default=0)
    return len(steps) - longest, {name: run for name, run in found.items() if len(run) == longest}


def goes_one_way(run: Sequence[Beside], coins: int = 0) -> bool:
    """Returns whether the fp32 moves of a tensor that stands still add up; with `coins` equal signs, if given."""
    elements = zip(*(beside.course for beside in run), strict=True)
    moving = [of for of in elements if any(of)]
    if moving and all(move == of[0] for of in moving for move in of):
        return True  # a counter
    if not moving or len(moving) * (len(run) - 1) < coins:
        return False
    whole = math.fsum(abs(move) for of in moving for move in of)
    return math.fsum(abs(math.fsum(of)) for of in moving) >= STRAIGHT * whole


def named(names: Sequence[str], module: str) -> str:
    """Formats the tensors; `module` holds them all."""
    return names[0] if len(names) == 1 else f"{len(names)} tensors of {module or 'the run'} ({names[0]}, ...)"


def within(run: Sequence[Comparison], since: int) -> str:
    """Formats the range of steps; `since` is the index of the first."""
    steps = len(run) - since
    return f"in all {steps} steps that were compared" if not since else f"in the last {steps} of {len(run)} steps"


# AMP506: the model's total does not show these parameters.


FROZEN_PARAMETERS = rule("AMP506", REPLAYED)

FROZEN_NOTED = 1e-3  # share of the squared gradient below which tensors of several elements are not reported
FROZEN_ALONE = 1e-6
"""The same for a tensor of one element, as a temperature or a logit scale: no other moves in its place. This is a
gradient of a thousandth of the run's, as for a step that has converged."""


def frozen(compared: Sequence[Comparison]) -> tuple[ParameterVsFp32, ...]:
    """Returns the parameters that stand still in each step though fp32 moves them one way, as in the first."""
    since, runs = lasting([step.parameters for step in compared], _stands_still, goes_one_way)
    if since:
        return ()
    still = [run[0] for run in runs.values()]
    alone = [p for p in still if p.looked_at == 1 and share_of(compared, [p.name]) >= FROZEN_ALONE]
    several = [p for p in still if p.looked_at > 1]
    if share_of(compared, [p.name for p in several]) < FROZEN_NOTED:
        several = []
    return tuple(p for p in still if p in alone or p in several)


def severity_of_frozen(
    compared: Sequence[Comparison], parameters: Sequence[ParameterVsFp32], thresholds: Thresholds
) -> Severity:
    """Returns "error" where one has a single element or their share is large, else "note"."""
    own = any(p.looked_at == 1 for p in parameters)
    large = share_of(compared, [p.name for p in parameters]) >= thresholds[FROZEN_PARAMETERS["share"]]
    return "error" if own or large else "note"


def share_of(compared: Sequence[Comparison], names: Sequence[str]) -> float:
    """Returns the share of the squared fp32 gradient, over all steps, of these parameters."""
    own = set(names)
    whole = math.fsum(p.expected**2 for step in compared for p in step.parameters)
    return math.fsum(p.expected**2 for step in compared for p in step.parameters if p.name in own) / (whole or 1.0)


def frozen_finding(
    compared: Sequence[Comparison], parameters: Sequence[ParameterVsFp32], severity: Severity, op: str
) -> Finding:
    """Makes one finding for parameters that stand still, as they share a cause; `op` writes them."""
    names = [p.name for p in parameters]
    module = common_module(names)
    stand = "stands" if len(names) == 1 else "stand"
    share = share_of(compared, names)
    far = max(abs(half_units) for p in parameters for half_units in p.course)
    return FROZEN_PARAMETERS.finding(
        severity,
        f"step {compared[0].step}: {named(names, module)} {stand} still {within(compared, 0)}, and in fp32 "
        f"{'it moves' if len(names) == 1 else 'they move'}. Each update is below half the distance to the next "
        f"number ({far:.2g} of it at most); its share of the squared gradient is {share:.2g}.",
        where=Where(
            step=compared[0].step, phase="optimizer", module=module, op=op, tensor=names[0] if len(names) == 1 else None
        ),
        cause="optimizer_precision",
        evidence={
            **listing(names),
            "steps": [step.step for step in compared],
            "share_of_squared_gradient": share,
            "largest_update_in_half_units": far,
        },
        advice=HELP["optimizer_precision"],
    )


def _stands_still(p: ParameterVsFp32) -> bool:
    """Whether a parameter with a gradient moves in fp32, but not here, where the update rounds away."""
    return p.gradient > 0 and p.meant_to_move > 0 and not p.moved and 2 * p.below_half_ulp > p.meant_to_move


STUCK_STATE = rule("AMP508", REPLAYED)

_OPTIMIZER = "optimizer:"


def stuck(compared: Sequence[Comparison]) -> tuple[int, tuple[StateVsFp32, ...]]:
    """Returns the first step (index) from which states stand still that fp32 moves one way, and these."""
    since, runs = lasting([step.states for step in compared], lambda state: not state.moved, _is_stuck)
    return since, tuple(run[0] for run in runs.values())


def _is_stuck(run: Sequence[StateVsFp32]) -> bool:
    counts = run[0].looked_at == 1 and len({state.course for state in run}) == 1
    return counts or (run[0].kind != "counter" and goes_one_way(run, COINS))


def owner_of(name: str) -> str:
    """Returns the module of a state; for an optimizer's state that of the parameter."""
    path = name.removeprefix(_OPTIMIZER)
    return path.rpartition(".")[0].rpartition(".")[0] if name.startswith(_OPTIMIZER) else path.rpartition(".")[0]


def stuck_finding(compared: Sequence[Comparison], since: int, states: Sequence[StateVsFp32], where: Where) -> Finding:
    """Makes one finding for states that stand still from step `since` (index) on, as they share a cause."""
    names, step = [state.name for state in states], compared[since].step
    inside = [owner_of(state.name) for state in states if state.kind != "own"]
    module, common = (inside[0] if inside else ""), common_module([f"{path}." for path in inside])
    stand = "stands" if len(names) == 1 else "stand"
    return STUCK_STATE.finding(
        "error",
        f"step {step}: {named(names, common)} in {short(states[0].dtype)} {stand} still {within(compared, since)}. "
        f"In fp32 {'it moves' if len(names) == 1 else 'they move'} one way: what is added is too small beside it.",
        where=replace(where, step=step, module=module, tensor=names[0] if len(names) == 1 else None),
        cause="optimizer_precision",
        evidence={
            **listing(names, "tensors"),
            "steps": [step.step for step in compared[since:]],
            "dtype": states[0].dtype,
            "largest_value": max(state.value for state in states),
            "largest_move_in_half_units": max(abs(move) for state in states for move in state.course),
        },
        advice=HELP["optimizer_precision"],
    )


WRONG_STEP = rule("AMP507", REPLAYED)
WRONG_RATIO = WRONG_STEP["ratio"]

ROUNDED = 4.0  # norms that differ by fewer roundings of the weight differ by its own rounding
RIGHT_GRADIENT = 0.5  # relative error up to which a gradient is not the cause

Far = tuple[ParameterVsFp32, ...]


def far_from(compared: Sequence[Comparison], thresholds: Thresholds) -> tuple[int, tuple[Far, ...]]:
    """Returns the first step (index) from which updates are wrong, and each parameter's values since."""
    ratio = thresholds[WRONG_RATIO]
    least = max(1, min(SHOWN, len(compared)))  # with a correct gradient, one wrong step is enough, if there is only one
    since, runs = lasting([step.parameters for step in compared], lambda p: is_far(p, ratio), least=least)
    return since, tuple(runs.values())


def is_far(parameter: ParameterVsFp32, ratio: float) -> bool:
    """Returns whether an update is too long or too short, beyond rounding, although its gradient is correct."""
    p = parameter
    if not p.moved or not p.expected_update or p.error > RIGHT_GRADIENT * p.expected:
        return False
    apart = abs(p.update - p.expected_update) > ROUNDED * p.rounding
    return apart and not 1 / ratio <= p.update / p.expected_update <= ratio


def made_zero(compared: Sequence[Comparison]) -> tuple[int, Far]:
    """Returns the first step (index) in which parameters with a correct gradient get a zero update; and these."""
    for at, step in enumerate(compared):
        still = tuple(p for p in step.parameters if _is_zero(p))
        if still:
            return at, still
    return 0, ()


def _is_zero(p: ParameterVsFp32) -> bool:
    right = p.gradient > 0.0 and p.error <= RIGHT_GRADIENT * p.expected
    return right and p.meant_to_move > 0 and not p.moved and not rounded_away([p])


def wrong_step_finding(compared: Sequence[Comparison], since: int, found: Sequence[Far], op: str) -> Finding:
    """Makes one finding for wrong updates from step `since` (index) on; `op` is the first that differs from fp32's."""
    names = [run[0].name for run in found]
    module = common_module(names)
    ratios = [p.update / p.expected_update for run in found for p in run]
    step = compared[since].step
    worst = max(found, key=lambda run: run[0].expected)
    return WRONG_STEP.finding(
        "error",
        f"step {step}: the update of {named(names, module)} is {min(ratios):.2g} to {max(ratios):.2g} times as "
        f"long as in fp32 {within(compared, since)}; its gradient is right",
        where=Where(
            step=step,
            phase="optimizer",
            module=module or worst[0].name.rpartition(".")[0],
            op=op,
            tensor=names[0] if len(names) == 1 else None,
        ),
        cause="optimizer_precision",
        evidence={
            **listing(names),
            "steps": [step.step for step in compared[since:]],
            "smallest_ratio": min(ratios),
            "largest_ratio": max(ratios),
        },
        advice=HELP["optimizer_precision"],
    )
